"""A pool whose ranks are on the hosts that torchrun has started, on one or several machines.

In every other way it is a pool like the one of this machine. This module imports no torch before
it is attached.

Lost hosts. If the lane that forks ranks dies and the host above it lives, the subject has killed
the lane, as on one machine. If the host is gone, or its machine no longer answers, nobody is known
to be to blame. torchrun may then start all hosts anew. The run that was under way is repeated once,
so that the other rules can be judged, and it is recorded as an interruption. An interrupted session
certifies nothing: a subject that takes a node down now and then must not be certified by trying
again.
"""

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.errors import KitError, ProfileError, TargetError
from conformance.hosts.environment import fast_folder
from conformance.hosts.remote.attached_hosts import AttachedHosts
from conformance.hosts.remote.rendezvous import (
    Announcement,
    HostsNotFound,
)
from conformance.hosts.remote.run import ANSWER, Member, RemoteRun
from conformance.hosts.remote.wire import (
    ENDED,
    SAVED,
    SILENT,
    ConnectionLost,
)
from conformance.hosts.supervisor import GRACE
from conformance.records.files import OUTCOME, write_json
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.subjects.spec import SubjectSpec

LOADING = 180.0  # seconds for a host that listens to import its modules
_LANE_MARGIN = 30.0  # seconds by which a lane's own deadline is later than the controller's
_CLOCK_ROUNDS = 5  # pings by which a host's clock is measured
_RETRY = 0.2  # seconds between attempts to attach


@dataclass
class _Attempt:
    """One attempt to carry out a run.

    Attributes:
        interrupted: whether it began and a host was lost.
    """

    folder: Path
    outcome: dict[str, Any]
    interrupted: bool


class AttachedPool:
    """Runs scenarios on the hosts of a rendezvous. It has the methods of ``Pool``.

    Args:
        endpoint: torchrun's ``--rdzv-endpoint``.
        deadline: seconds after which the ranks of a run count as hanging.
        wait: seconds to wait for all hosts, at first and after one was lost.
    """

    lanes = 1  # a run has all hosts

    def __init__(self, endpoint: str, deadline: float, wait: float) -> None:
        self.endpoint = endpoint
        self.deadline = deadline
        self.wait = wait
        self.interruptions: list[str] = []
        self._hosts = AttachedHosts(endpoint)
        self._common: dict[str, Any] = {}
        # The last subject that was described, to compare it after hosts were started anew.
        self._described: tuple[SubjectSpec, Profile, dict[str, Any]] | None = None
        # Why the hosts are given up, if they are.
        self._given_up: str | None = None
        self._base = Path()
        self._lock = threading.RLock()

    def __enter__(self) -> "AttachedPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Do nothing: torchrun has started the hosts."""

    def prepare(self, scenarios: Iterable[Scenario]) -> None:
        """Do nothing: each host hashes strings in its own way."""

    @property
    def capacity(self) -> int:
        """The largest world size that the attached hosts can run."""
        return len(self._hosts.hosts)

    def greeting(self) -> dict[str, Any]:
        """Return the description of the machines that all hosts have in common.

        Raises:
            ProfileError: there are no hosts, or they are too different to judge by them together.
        """
        with self._lock:
            if not self._common:
                try:
                    self._hosts.attach(time.monotonic() + self.wait)
                except HostsNotFound as error:
                    raise ProfileError(
                        f"--attach {self.endpoint}: {error}; waited {self.wait:.0f} seconds"
                    ) from error
                self._common = self._hosts.common_greeting()
            return self._common

    def describe(self, subject: SubjectSpec, profile: Profile = GLOO_CPU) -> dict[str, Any]:
        """Import the subject on every node.

        Returns:
            The description of the subject; it has ``error`` if an import fails, or if the nodes
            have different subjects of this name.
        """
        with self._lock:
            command = {"op": "describe", "subject": subject.to_json(), "imports": profile.imports}
            answers = self._request_nodes(command, profile, "importing it")
            first = next(iter(answers.values()))
            for name, answer in answers.items():
                if "error" in answer:
                    return {"error": f"on {name}: {answer['error']}"}
                if answer != first:
                    return {
                        "error": f"{name} has another {subject.name} than the nodes before it; "
                        "install the same on all"
                    }
            self._described = (subject, profile, first)
            return first

    def probe_profile(self, profile: Profile) -> dict[str, Any]:
        """Probe a profile on every node (``profile_check.probe_profile``).

        ``devices`` in the result counts the devices for which there are hosts.
        """
        with self._lock:
            command = {"op": "probe_profile", "profile": asdict(profile)}
            answers = self._request_nodes(command, profile, "looking for it")
            for name, answer in answers.items():
                for reason in ("error", "unknown", "fails"):
                    if reason in answer:
                        return {**answer, reason: f"on {name}: {answer[reason]}"}
            return self._merge_probes(list(answers.values()))

    def _merge_probes(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the answers of all nodes as if they were one machine."""
        first = answers[0]
        if "devices" not in first:
            return first
        usable = [
            min(answer["devices"], len(self._hosts.of_node(node)))
            for node, answer in zip(self._hosts.nodes, answers, strict=True)
        ]
        # A node without devices cannot run its part.
        devices = sum(usable) if all(answer["devices"] for answer in answers) else 0
        names = [name for answer in answers for name in answer.get("names", ())]
        merged = {**first, "devices": devices, "names": names}
        if all(answer.get("nccl") for answer in answers):
            # Only features of the oldest NCCL are available on all nodes.
            merged["nccl"] = min(answer["nccl"] for answer in answers)
        return merged

    def _request_nodes(
        self, command: dict[str, Any], profile: Profile, activity: str
    ) -> dict[str, dict[str, Any]]:
        """Send a command to the first host of every node; return the answers by node name."""
        self.greeting()
        deadline = self.deadline + profile.startup
        answers: dict[str, dict[str, Any]] = {}
        for node in self._hosts.nodes:
            host = self._hosts.of_node(node)[0]
            try:
                host.lane.send({**command, "deadline": deadline})
                answer = host.lane.receive(deadline + ANSWER)["answer"]
            except (ConnectionLost, KeyError) as error:
                answer = {"error": f"{activity} lost the process that did ({error})"}
            answers[host.announcement.node_name] = answer
        return answers

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Path:
        """Run a scenario; return the folder of its records, which includes ``outcome.json``.

        Raises:
            KitError: a machine lacks disk space or processes for the run, or the pool was closed.
            ProfileError, TargetError: hosts that torchrun started anew differ from those before.
        """
        with self._lock:
            self.greeting()
            attempt = self._attempt(scenario, world, subject, name)
            if attempt.interrupted and not self._hosts.closed:
                shutil.rmtree(attempt.folder, ignore_errors=True)
                attempt = self._attempt(scenario, world, subject, name)
            write_json(attempt.folder / OUTCOME, attempt.outcome)
            return attempt.folder

    def _attempt(
        self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str
    ) -> _Attempt:
        """Try to carry out a run; if a host is lost, record an interruption."""
        if self._hosts.closed:
            raise KitError("the pool was closed")
        try:
            self._require_hosts(world)
        except HostsNotFound as error:
            outcome = {"stopped": "node", "host": str(error), "left_processes": [], "ranks": []}
            return _Attempt(self._new_folder(name), outcome, interrupted=False)
        folder = self._new_folder(name)
        outcome = self._carry_out(scenario, world, subject, folder)
        interrupted = outcome["stopped"] == "node"
        if interrupted:
            self.interruptions.append(f"{name} was interrupted: {outcome['host']}")
        return _Attempt(folder, outcome, interrupted)

    def close(self, finished: bool = True) -> None:
        """Release the hosts, which kill their ranks, and remove this machine's files.

        Args:
            finished: whether hosts that were started with ``--once`` may end.
        """
        self._hosts.closed = True
        # Without the lock: another thread may hold it while it waits for a run, and hanging up
        # ends that run.
        for host in list(self._hosts.hosts):
            with contextlib.suppress(ConnectionLost):
                host.control.send({"bye" if finished else "leave": True})
            host.control.hang_up()
            host.lane.hang_up()
        with self._lock:
            self._hosts.release()
        if self._base != Path():
            shutil.rmtree(self._base, ignore_errors=True)

    def _carry_out(
        self, scenario: Scenario, world: int, subject: SubjectSpec | None, folder: Path
    ) -> dict[str, Any]:
        """Run a scenario once and return its outcome. Raises: KitError."""
        deadline = min(self.deadline, scenario.deadline or self.deadline) + scenario.profile.startup
        # The records of ranks on other machines cannot be watched while they are written.
        deadline += scenario.patience
        announcements = [host.announcement for host in self._hosts.hosts]
        hosts = placement(world, announcements)
        connected = {host.announcement.host_rank: host for host in self._hosts.hosts}
        members = []
        for rank, announcement in enumerate(hosts):
            host = connected[announcement.host_rank]
            members.append(Member(announcement, host.lane, (rank,), host.clock_offset))
        others = [
            (host.announcement, host.control)
            for host in self._hosts.hosts
            if host.announcement not in hosts
        ]
        store_address, store_port = announcements[0].store
        command = {
            "op": "run",
            "scenario": scenario.to_json(),
            "world": world,
            "subject": subject.to_json() if subject else None,
            "deadline": deadline + _LANE_MARGIN,
            "meeting": {
                "host": store_address,
                "port": store_port,
                # Every run has its own keys in the store.
                "run": f"conformance/{self._hosts.id}/{next(self._hosts.numbers)}",
            },
        }
        remote_run = RemoteRun(members, folder, others)
        # After a fault that the kit causes, the other ranks get the whole deadline to notice it.
        grace = deadline if scenario.fault.kind != "none" else GRACE
        try:
            remote_run.start(command, _saved_files(scenario, world), rank_environments(hosts))
            outcome = remote_run.supervise(deadline, grace)
        except OSError as error:
            reason = error.strerror
            raise KitError(f"cannot keep the records of {folder.name}: {reason}") from error
        for member in members:
            if member.kit_error is not None:
                node = member.host.node_name
                raise KitError(f"cannot run {folder.name} on {node}: {member.kit_error}")
        if lost := [member for member in members if member.state == "lost"]:
            outcome |= self._explain_loss(lost)
            if outcome["stopped"] == "node" and remote_run.lost_others:
                # torchrun ended the other hosts because of the first one.
                first, reason = remote_run.lost_others[0]
                outcome["host"] = f"{first.node_name}: {reason}; then {outcome['host']}"
        return outcome

    def _explain_loss(self, lost: list[Member]) -> dict[str, Any]:
        """Return the outcome's fields for lost members.

        A lane that died is distinguished from a host that is gone: a lane is replaced here, a host
        is not.
        """
        gone: list[tuple[Member, str]] = []
        killed: list[tuple[Member, str]] = []
        for member in sorted(lost, key=lambda member: member.lost_at):
            host = next(host for host in self._hosts.hosts if host.announcement == member.host)
            lane_end = None
            if member.reason in (ENDED, SILENT):
                lane_end = self._hosts.replace_lane(host, member.reason)
            if lane_end is None:
                host.is_lost = True
                gone.append((member, member.reason))
            else:
                host.is_lost = False
                killed.append((member, lane_end))
        if gone:
            return {"stopped": "node", "host": _describe_losses(gone)}
        return {"stopped": "host", "host": _describe_losses(killed)}

    def _require_hosts(self, world: int) -> None:
        """Make sure that all hosts are connected, and enough for a world size.

        Raises:
            HostsNotFound: hosts are missing. If a host was lost and has not come back, all later
                runs fail too.
            ProfileError, TargetError: hosts that torchrun started anew differ from those before.
        """
        if self._given_up is None:
            try:
                self._reattach()
            except HostsNotFound as error:
                self._given_up = str(error)
        if self._given_up is not None:
            raise HostsNotFound(self._given_up)
        if world > self.capacity:
            raise HostsNotFound(f"there are only {self.capacity} hosts now")

    def _reattach(self) -> None:
        """Attach to all hosts again unless they are all connected.

        Raises:
            HostsNotFound: a host was lost and has not come back.
            ProfileError, TargetError: hosts that torchrun started anew differ from those before.
        """
        if self._hosts.are_connected:
            return
        try:
            self._hosts.attach(time.monotonic() + self.wait)
        except HostsNotFound as error:
            lost = self.interruptions[-1] if self.interruptions else "a host was lost"
            raise HostsNotFound(
                f"{lost}; it has not come back within {self.wait:.0f} seconds: {error}"
            ) from error
        if self._hosts.common_greeting() != self._common:
            raise ProfileError(
                "the hosts that torchrun started anew are on other machines, "
                "or have other software, than before"
            )
        if self._described is not None:
            subject, profile, before = self._described
            again = self.describe(subject, profile)
            if again != before:
                raise TargetError(
                    again.get("error")
                    or f"the hosts that torchrun started anew have another {subject.name} "
                    "than before"
                )

    def _new_folder(self, name: str) -> Path:
        try:
            if self._base == Path():
                made = tempfile.mkdtemp(prefix="conformance-attached-", dir=fast_folder())
                self._base = Path(made)
            folder = self._base / name
            if folder.exists():
                folder = self._base / f"{name}-{next(self._hosts.numbers)}"
            folder.mkdir()
        except OSError as error:
            raise KitError(f"cannot create a folder for {name}: {error.strerror}") from error
        return folder


def placement(world: int, hosts: list[Announcement]) -> list[Announcement]:
    """Return the host of each rank.

    The ranks are spread over as many nodes as possible, and the ranks of a node are numbered one
    after another, as on a larger machine: with two hosts on each of two nodes a world of 3 has
    ranks 0 and 1 on the first node and rank 2 on the second.
    """
    by_turns = sorted(hosts, key=lambda host: (host.local_rank, host.node))
    return sorted(by_turns[:world], key=lambda host: (host.node, host.local_rank))


def rank_environments(hosts: list[Announcement]) -> dict[str, dict[str, str]]:
    """Return the environment variables that torchrun would set for each rank of a run.

    Args:
        hosts: the host of each rank.
    """
    nodes = list(dict.fromkeys(host.node for host in hosts))
    environments = {}
    for rank, host in enumerate(hosts):
        ranks_of_node = [other for other, its in enumerate(hosts) if its.node == host.node]
        environments[str(rank)] = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": str(ranks_of_node.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(ranks_of_node)),
            "GROUP_RANK": str(nodes.index(host.node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(len(hosts)),
        }
    return environments


def _saved_files(scenario: Scenario, world: int) -> list[tuple[int, Path]]:
    """Return the files that an earlier run saved for this one, each with its rank."""
    if not scenario.resume.saved_in:
        return []
    saved = Path(scenario.resume.saved_in)
    of_rank_0 = scenario.resume.of_rank_0
    return [
        (rank, saved / str(0 if of_rank_0 else rank) / name)
        for rank in range(world)
        for name in SAVED
    ]


def _describe_losses(lost: list[tuple[Member, str]]) -> str:
    """Name the nodes of lost members with their ranks and the reason, the first loss first."""
    descriptions = []
    for node in dict.fromkeys(member.host.node_name for member, _ in lost):
        of_node = [(member, reason) for member, reason in lost if member.host.node_name == node]
        ranks = sorted(rank for member, _ in of_node for rank in member.ranks)
        plural = "s" if len(ranks) > 1 else ""
        first_reason = of_node[0][1]
        descriptions.append(f"{node}, rank{plural} {', '.join(map(str, ranks))}: {first_reason}")
    return "; ".join(descriptions)

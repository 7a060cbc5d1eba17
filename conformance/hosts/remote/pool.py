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
import itertools
import secrets
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.errors import KitError, ProfileError, TargetError
from conformance.hosts.environment import describe_exit, fast_folder
from conformance.hosts.remote.rendezvous import (
    CONNECT_TIMEOUT,
    Announcement,
    HostsNotFound,
    find_hosts,
    kit_digest,
    parse_endpoint,
)
from conformance.hosts.remote.run import ANSWER, Member, RemoteRun
from conformance.hosts.remote.wire import (
    ENDED,
    SAVED,
    SILENT,
    ConnectionLost,
    Stream,
    describe_process,
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
class _Host:
    """A host that this controller is connected to.

    Attributes:
        greeting: the host's description of its machine.
        clock_offset: by how many seconds its clock is ahead of the controller's.
        lane_number: the number of the present lane.
        is_lost: whether it was lost in a run.
    """

    announcement: Announcement
    control: Stream
    lane: Stream
    greeting: dict[str, Any]
    clock_offset: float = 0.0
    lane_number: int = 0
    is_lost: bool = False


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
        self._address = parse_endpoint(endpoint)
        self._hosts: list[_Host] = []
        # The ids of the hosts that were attached last.
        self._last_ids: set[str] = set()
        self._common: dict[str, Any] = {}
        # The last subject that was described, to compare it after hosts were started anew.
        self._described: tuple[SubjectSpec, Profile, dict[str, Any]] | None = None
        # Why the hosts are given up, if they are.
        self._given_up: str | None = None
        self._base = Path()
        self._id = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._closed = False

    def __enter__(self) -> "AttachedPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Do nothing: torchrun has started the hosts."""

    @property
    def _nodes(self) -> list[int]:
        return sorted({host.announcement.node for host in self._hosts})

    def _hosts_of(self, node: int) -> list[_Host]:
        return [host for host in self._hosts if host.announcement.node == node]

    @property
    def capacity(self) -> int:
        """The largest world size that the attached hosts can run."""
        return len(self._hosts)

    def greeting(self) -> dict[str, Any]:
        """Return the description of the machines that all hosts have in common.

        Raises:
            ProfileError: there are no hosts, or they are too different to judge by them together.
        """
        with self._lock:
            if not self._common:
                try:
                    self._attach(time.monotonic() + self.wait)
                except HostsNotFound as error:
                    raise ProfileError(
                        f"--attach {self.endpoint}: {error}; waited {self.wait:.0f} seconds"
                    ) from error
                self._common = self._compare_greetings()
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
            min(answer["devices"], len(self._hosts_of(node)))
            for node, answer in zip(self._nodes, answers, strict=True)
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
        for node in self._nodes:
            host = self._hosts_of(node)[0]
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
            if attempt.interrupted and not self._closed:
                shutil.rmtree(attempt.folder, ignore_errors=True)
                attempt = self._attempt(scenario, world, subject, name)
            write_json(attempt.folder / OUTCOME, attempt.outcome)
            return attempt.folder

    def _attempt(
        self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str
    ) -> _Attempt:
        """Try to carry out a run; if a host is lost, record an interruption."""
        if self._closed:
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
        self._closed = True
        # Without the lock: another thread may hold it while it waits for a run, and hanging up
        # ends that run.
        for host in list(self._hosts):
            with contextlib.suppress(ConnectionLost):
                host.control.send({"bye" if finished else "leave": True})
            host.control.hang_up()
            host.lane.hang_up()
        with self._lock:
            self._release()
        if self._base != Path():
            shutil.rmtree(self._base, ignore_errors=True)

    def _carry_out(
        self, scenario: Scenario, world: int, subject: SubjectSpec | None, folder: Path
    ) -> dict[str, Any]:
        """Run a scenario once and return its outcome. Raises: KitError."""
        deadline = min(self.deadline, scenario.deadline or self.deadline) + scenario.profile.startup
        announcements = [host.announcement for host in self._hosts]
        hosts = placement(world, announcements)
        connected = {host.announcement.host_rank: host for host in self._hosts}
        members = []
        for rank, announcement in enumerate(hosts):
            host = connected[announcement.host_rank]
            members.append(Member(announcement, host.lane, (rank,), host.clock_offset))
        others = [
            (host.announcement, host.control)
            for host in self._hosts
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
                "run": f"conformance/{self._id}/{next(self._numbers)}",
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
            host = next(host for host in self._hosts if host.announcement == member.host)
            lane_end = None
            if member.reason in (ENDED, SILENT):
                lane_end = self._replace_lane(host, member.reason)
            if lane_end is None:
                host.is_lost = True
                gone.append((member, member.reason))
            else:
                host.is_lost = False
                killed.append((member, lane_end))
        if gone:
            return {"stopped": "node", "host": _describe_losses(gone)}
        return {"stopped": "host", "host": _describe_losses(killed)}

    def _replace_lane(self, host: _Host, reason: str) -> str | None:
        """Open another lane on a host, and return how the lost lane ended.

        A lane that lives and is silent is the subject's doing. If a lane lives and only its
        connection has ended, nobody is to blame.

        Args:
            reason: how the lane was lost.

        Returns:
            How the lane ended; None if the host itself is gone, or only a connection was lost.
        """
        try:
            host.lane.hang_up()
            host.control.send({"end": host.lane_number})
            report: dict[str, Any] = {}
            while report.get("lane") != host.lane_number:
                report = host.control.receive(ANSWER)
            host.lane.close()
            self._open_lane(host)
        except ConnectionLost:
            return None
        if reason == SILENT:
            return SILENT
        if report.get("killed") or not report["ended"]:
            return None
        return describe_exit(int(report["ended"]))

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
        if self._hosts and all(self._is_connected(host) for host in self._hosts):
            return
        try:
            self._attach(time.monotonic() + self.wait)
        except HostsNotFound as error:
            lost = self.interruptions[-1] if self.interruptions else "a host was lost"
            raise HostsNotFound(
                f"{lost}; it has not come back within {self.wait:.0f} seconds: {error}"
            ) from error
        if self._compare_greetings() != self._common:
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

    def _is_connected(self, host: _Host) -> bool:
        with contextlib.suppress(ConnectionLost):
            return not host.is_lost and bool(self._ping(host))
        return False

    def _ping(self, host: _Host) -> dict[str, Any]:
        """Return a host's answer to a ping. Raises: ConnectionLost."""
        number = next(self._numbers)
        answer: dict[str, Any] = {}
        host.control.send({"ping": number})
        while answer.get("pong") != number:
            answer = host.control.receive(ANSWER)
        return answer

    def _attach(self, until: float) -> None:
        """Connect to all hosts.

        Args:
            until: when to give up, on the monotonic clock; there is at least one attempt.

        Raises:
            HostsNotFound: hosts are missing still.
            ProfileError: a host serves another controller.
            UsageError: there are hosts of several rendezvous.
        """
        while True:
            self._release()
            try:
                self._connect_all()
                return
            except (HostsNotFound, ConnectionLost) as error:
                self._release()
                reason = str(error)
            if self._closed or time.monotonic() >= until:
                raise HostsNotFound(reason)
            time.sleep(_RETRY)

    def _connect_all(self) -> None:
        """Connect to all hosts. Raises: HostsNotFound, ConnectionLost, ProfileError, UsageError."""
        announcements = find_hosts(*self._address)
        ids = {announcement.id for announcement in announcements}
        # torchrun restarts all hosts together: if some are new, the others are about to end.
        is_mixed = ids != self._last_ids and not ids.isdisjoint(self._last_ids)
        if is_mixed:
            raise HostsNotFound("torchrun has not started all of its hosts anew")
        for announcement in announcements:
            self._hosts.append(self._connect(announcement))
        for host in self._hosts:
            host.clock_offset = self._measure_clock_offset(host)
        self._last_ids = ids

    def _connect(self, announcement: Announcement) -> _Host:
        """Open both connections to a host.

        Raises:
            HostsNotFound: it answers at none of its addresses.
            ProfileError: it serves another controller.
        """
        reason: str | None = None
        for address in announcement.addresses:
            try:
                host = self._connect_at(announcement, address)
            except (OSError, ConnectionLost) as error:
                place = f"{address}:{announcement.port}"
                # The first address is the best one, so its error is reported.
                reason = reason or f"{announcement.node_name} does not answer at {place} ({error})"
                continue
            if host is not None:
                return host
        raise HostsNotFound(reason or f"{announcement.node_name} does not answer")

    def _connect_at(self, announcement: Announcement, address: str) -> _Host | None:
        """Open both connections to a host at an address.

        Returns:
            The connected host; None if another host answers at the address.

        Raises:
            OSError, ConnectionLost: it does not answer.
            ProfileError: it serves another controller.
        """
        control = self._open(announcement, address, "control")
        try:
            answer = control.receive(LOADING)
            if "busy" in answer:
                raise ProfileError(
                    f"--attach {self.endpoint}: "
                    f"another controller has these hosts already: {answer['busy']}"
                )
            greeting = answer.get("greeting", {})
            if greeting.get("id") == announcement.id:
                host = _Host(announcement, control, control, greeting)
                self._open_lane(host)
                return host
        except BaseException:
            control.close()
            raise
        control.close()
        return None

    def _open(
        self, announcement: Announcement, address: str, purpose: str, **fields: Any
    ) -> Stream:
        """Connect to a host and send the first message. Raises: OSError, ConnectionLost."""
        connection = socket.create_connection((address, announcement.port), timeout=CONNECT_TIMEOUT)
        stream = Stream(connection)
        message = {
            "token": announcement.token,
            "wants": purpose,
            "id": self._id,
            "name": describe_process(),
            **fields,
        }
        try:
            stream.send(message)
        except ConnectionLost:
            stream.close()
            raise
        return stream

    def _open_lane(self, host: _Host) -> None:
        """Make a host fork a lane, and connect to it. Raises: ConnectionLost."""
        host.lane_number += 1
        # The host answers at the address of its control connection.
        address = host.control.peer_address
        try:
            lane = self._open(host.announcement, address, "lane", lane=host.lane_number)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        try:
            # The lane's first message is that it is ready.
            lane.receive(ANSWER)
        except ConnectionLost:
            lane.close()
            raise
        host.lane = lane

    def _measure_clock_offset(self, host: _Host) -> float:
        """Return by how many seconds a host's clock is ahead. Raises: ConnectionLost.

        The host's clock is compared with the middle between sending a ping and receiving the
        answer. The quickest of some answers has the smallest error.
        """
        measured = []
        for _ in range(_CLOCK_ROUNDS):
            before = time.monotonic()
            answer = self._ping(host)
            after = time.monotonic()
            offset = float(answer.get("clock", 0.0)) - (before + after) / 2
            measured.append((after - before, offset))
        return min(measured)[1]

    def _compare_greetings(self) -> dict[str, Any]:
        """Return the certificate's description of the machines.

        Raises:
            ProfileError: hosts differ in the kit or in torch, or torch differs from this machine's.
        """
        import torch

        own_kit = kit_digest()
        first = self._hosts[0]
        first_torch = first.greeting["torch"]
        for host in self._hosts:
            prefix = f"--attach {self.endpoint}: {host.announcement.node_name}"
            if host.greeting.get("kit") != own_kit:
                raise ProfileError(
                    f"{prefix} has another version of the kit than this machine; "
                    "install the same on all"
                )
            if host.greeting["torch"] != first_torch:
                raise ProfileError(
                    f"{prefix} has torch {host.greeting['torch']}, "
                    f"{first.announcement.node_name} has {first_torch}; install the same"
                )
        # The part after the plus sign is the build, such as cpu or cu126.
        if first_torch.partition("+")[0] != torch.__version__.partition("+")[0]:
            raise ProfileError(
                f"--attach {self.endpoint}: the nodes have torch {first_torch}, "
                f"this machine has {torch.__version__}, "
                "which makes the inputs that results are compared with; install the same"
            )
        common = {key: value for key, value in first.greeting.items() if key not in ("kit", "id")}
        return {**common, "nodes": [self._node_entry(node) for node in self._nodes]}

    def _node_entry(self, node: int) -> dict[str, Any]:
        """Return the certificate's entry for a node."""
        hosts = self._hosts_of(node)
        software = {key: hosts[0].greeting[key] for key in ("torch", "python", "platform")}
        return {"host": hosts[0].announcement.hostname, "slots": len(hosts), **software}

    def _new_folder(self, name: str) -> Path:
        try:
            if self._base == Path():
                made = tempfile.mkdtemp(prefix="conformance-attached-", dir=fast_folder())
                self._base = Path(made)
            folder = self._base / name
            if folder.exists():
                folder = self._base / f"{name}-{next(self._numbers)}"
            folder.mkdir()
        except OSError as error:
            raise KitError(f"cannot create a folder for {name}: {error.strerror}") from error
        return folder

    def _release(self) -> None:
        """Close the connections to all hosts."""
        for host in self._hosts:
            for stream in (host.lane, host.control):
                stream.hang_up()
                stream.close()
        self._hosts = []


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
    return [(rank, saved / str(rank) / name) for rank in range(world) for name in SAVED]


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

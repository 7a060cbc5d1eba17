"""Runs on the hosts that torchrun has started, which may be on several machines; in every other way a pool. Imports no torch.

A host that is lost. When the process that forks ranks dies and the host above it lives, the subject has killed it: the same as
on one machine. When the host is gone, or its machine no longer answers, nobody is known to be to blame. torchrun may start all
hosts anew; the run that was under way is then done again, once, so that the rest can be judged. It is on record as an
interruption, and an interrupted session certifies nothing: a subject that takes a node down now and then must not be certified
by trying again.
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
from conformance.hosts.environment import fast_folder, in_words
from conformance.hosts.remote.rendezvous import PATIENCE, Announcement, NobodyThere, find, kit_digest, parse_endpoint
from conformance.hosts.remote.run import ANSWER, Member, RemoteRun
from conformance.hosts.remote.wire import ENDED, SAVED, SILENT, ConnectionLost, Stream, who_am_i
from conformance.hosts.supervisor import GRACE
from conformance.records.files import OUTCOME, write_json
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.subjects.spec import SubjectSpec

LOADING = 180.0  # seconds for a host that is there to have imported what it needs
_LATER = 30.0  # seconds after the deadline in which a lane stops a run by itself: its controller does so before
_ROUNDS = 5  # questions from which a clock is read


@dataclass
class _Host:
    """A host that this controller is connected to."""

    said: Announcement
    control: Stream
    lane: Stream
    greeting: dict[str, Any]
    ahead: float = 0.0
    lane_number: int = 0
    is_lost: bool = False


class AttachedPool:
    """Runs scenarios on the hosts of a rendezvous. A context manager, with the methods of ``Pool``.

    Args:
        endpoint: torchrun's ``--rdzv-endpoint``.
        deadline: seconds that one run may take before its ranks are taken to hang.
        wait: seconds for all hosts to be there: at first, and after one was lost.
    """

    lanes = 1  # a run has all hosts

    def __init__(self, endpoint: str, deadline: float, wait: float) -> None:
        self.endpoint, self.deadline, self.wait = endpoint, deadline, wait
        self._address = parse_endpoint(endpoint)
        self.interruptions: list[str] = []
        self._hosts: list[_Host] = []
        self._before: set[str] = set()  # ids of the hosts that were attached last
        self._profile: dict[str, Any] = {}
        self._described: tuple[SubjectSpec, Profile, dict[str, Any]] | None = None
        self._given_up = ""
        self._base = Path()
        self._id, self._runs = secrets.token_hex(8), itertools.count(1)
        self._lock, self._closed = threading.RLock(), False

    def __enter__(self) -> "AttachedPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Nothing is to be started: torchrun has done so."""

    @property
    def _nodes(self) -> list[int]:
        return sorted({host.said.node for host in self._hosts})

    @property
    def capacity(self) -> int:
        """The largest world size that the attached hosts can run."""
        return len(self._hosts)

    def greeting(self) -> dict[str, Any]:
        """Return what the hosts said of their machines.

        Raises:
            ProfileError: there are no hosts, or hosts that cannot be judged by together.
        """
        with self._lock:
            if not self._profile:
                if why := self._attach(time.monotonic() + self.wait):
                    raise ProfileError(f"--attach {self.endpoint}: {why}; waited {self.wait:.0f} seconds")
                self._profile = self._agreed()
            return self._profile

    def describe(self, subject: SubjectSpec, profile: Profile = GLOO_CPU) -> dict[str, Any]:
        """Import the subject on every node; the answer has ``error`` when that fails, or they have not got the same."""
        with self._lock:
            command = {"op": "describe", "subject": subject.to_json(), "imports": profile.imports}
            said = self._ask_nodes(command, self.deadline + profile.startup, "importing it")
            answer = next(iter(said.values()))
            for name, its in said.items():
                if "error" in its:
                    return {"error": f"on {name}: {its['error']}"}
                if its != answer:
                    return {"error": f"{name} has another {subject.name} than the nodes before it; install the same on all"}
            self._described = subject, profile, answer
            return answer

    def look(self, profile: Profile) -> dict[str, Any]:
        """Find out on every node what it has for a profile, see ``machine.look``; ``devices`` are those that hosts have ranks for."""
        with self._lock:
            command = {"op": "look", "profile": asdict(profile)}
            said = self._ask_nodes(command, self.deadline + profile.startup, "looking for it")
            for name, its in said.items():
                for why in ("error", "unknown", "fails"):
                    if why in its:
                        return {**its, why: f"on {name}: {its[why]}"}
            return self._together(list(said.values()))

    def _together(self, said: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what nodes have, as one machine would say it: the oldest NCCL is the one that has to do."""
        if "devices" not in said[0]:
            return said[0]
        hosts = [sum(host.said.node == node for host in self._hosts) for node in self._nodes]
        found = {**said[0], "devices": sum(min(its["devices"], here) for its, here in zip(said, hosts, strict=True))}
        if not all(its["devices"] for its in said):
            found["devices"] = 0  # a node without any runs nothing of it
        found["names"] = [name for its in said for name in its.get("names", ())]
        if all(its.get("nccl") for its in said):
            found["nccl"] = min(its["nccl"] for its in said)
        return found

    def _ask_nodes(self, command: dict[str, Any], deadline: float, what: str) -> dict[str, dict[str, Any]]:
        """Return what the first host of every node says to a command, by the node's name."""
        self.greeting()
        answers = {}
        for host in [next(host for host in self._hosts if host.said.node == node) for node in self._nodes]:
            try:
                host.lane.send({**command, "deadline": deadline})
                answers[host.said.node_name] = host.lane.receive(deadline + ANSWER)["said"]
            except (ConnectionLost, KeyError) as error:
                answers[host.said.node_name] = {"error": f"{what} lost the process that did ({error})"}
        return answers

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Path:
        """Run a scenario and return the folder of its records, with ``outcome.json`` in it.

        Raises:
            KitError: the run could not be carried out for want of disk or processes, or the pool was closed.
            ProfileError, TargetError: hosts that torchrun started anew are not what they were.
        """
        with self._lock:
            self.greeting()
            for attempt in itertools.count():
                if self._closed:
                    raise KitError("the pool was closed")
                lost = "" if self._given_up else self._reattach()
                folder = self._new_folder(name)
                if self._given_up or lost or world > self.capacity:
                    self._given_up = self._given_up or lost
                    why = self._given_up or f"there are only {self.capacity} hosts now"
                    outcome = {"stopped": "node", "host": why, "left_processes": [], "ranks": []}
                else:
                    outcome = self._try(scenario, world, subject, folder)
                    if outcome["stopped"] == "node":
                        self.interruptions.append(f"{name} was interrupted: {outcome['host']}")
                        if not attempt and not self._closed:
                            shutil.rmtree(folder, ignore_errors=True)
                            continue
                write_json(folder / OUTCOME, outcome)
                return folder
            raise AssertionError

    def close(self, finished: bool = True) -> None:
        """Let go of the hosts, which kill their ranks, and remove what was left on this machine's disk.

        Args:
            finished: whether hosts may end that serve once.
        """
        self._closed = True
        for host in list(self._hosts):
            with contextlib.suppress(ConnectionLost):
                host.control.send({"bye" if finished else "leave": True})
            host.control.hang_up()
            host.lane.hang_up()
        with self._lock:
            self._let_go()
        if self._base != Path():
            shutil.rmtree(self._base, ignore_errors=True)

    def _try(self, scenario: Scenario, world: int, subject: SubjectSpec | None, folder: Path) -> dict[str, Any]:
        """Run it once."""
        deadline = min(self.deadline, scenario.deadline or self.deadline) + scenario.profile.startup
        hosts, store = place(world, [host.said for host in self._hosts]), self._hosts[0].said.store
        connected = {host.said.slot: host for host in self._hosts}
        members = [Member(host, connected[host.slot].lane, (rank,), connected[host.slot].ahead) for rank, host in enumerate(hosts)]
        command = {
            "op": "run",
            "scenario": scenario.to_json(),
            "world": world,
            "subject": subject.to_json() if subject else None,
            "deadline": deadline + _LATER,
            "meeting": {"host": store[0], "port": store[1], "run": f"conformance/{self._id}/{next(self._runs)}"},
        }
        saved = Path(scenario.resume.saved_in)
        files = [(rank, saved / str(rank) / name) for rank in range(world) for name in SAVED] if scenario.resume.saved_in else []
        crew = RemoteRun(members, folder, [(host.said, host.control) for host in self._hosts if host.said not in hosts])
        try:
            crew.begin(command, files, environments(hosts))
            outcome = crew.carry_out(deadline, deadline if scenario.fault.kind != "none" else GRACE)
        except OSError as error:
            raise KitError(f"cannot keep the records of {folder.name}: {error.strerror}") from error
        if failed := next((member for member in members if member.kit_error), None):
            raise KitError(f"cannot run {folder.name} on {failed.host.node_name}: {failed.kit_error}")
        if lost := [member for member in members if member.state == "lost"]:
            outcome |= self._why_lost(lost)
            if outcome["stopped"] == "node" and crew.lost_beside:
                first, how = crew.lost_beside[0]
                outcome["host"] = f"{first.node_name}: {how}; then {outcome['host']}"
        return outcome

    def _why_lost(self, lost: list[Member]) -> dict[str, Any]:
        """Tell a lane that died from a host that is gone; a lane is replaced, a host is not."""
        gone: list[tuple[Member, str]] = []
        killed: list[tuple[Member, str]] = []
        for member in sorted(lost, key=lambda member: member.lost_at):
            host = next(host for host in self._hosts if host.said == member.host)
            how = self._how_its_lane_ended(host, member.how) if member.how in (ENDED, SILENT) else ""
            host.is_lost = not how
            (killed if how else gone).append((member, how or member.how))
        if gone:
            return {"stopped": "node", "host": _named(gone)}
        return {"stopped": "host", "host": _named(killed)}

    def _how_its_lane_ended(self, host: _Host, lost: str) -> str:
        """Return how a host says that its lane ended, and open another; '' where the host is gone itself, or only a connection.

        A lane that is there and says nothing is the subject's doing; one that is there when its connection has ended is nobody's.
        """
        try:
            host.lane.hang_up()
            host.control.send({"end": host.lane_number})
            said: dict[str, Any] = {}
            while said.get("lane") != host.lane_number:
                said = host.control.receive(ANSWER)
            host.lane.close()
            self._open_lane(host)
        except ConnectionLost:
            return ""
        if lost == SILENT:
            return SILENT
        return "" if said.get("killed") or not said["ended"] else in_words(int(said["ended"]))

    def _reattach(self) -> str:
        """Make sure that all hosts are there; return why they are not."""
        if self._hosts and all(self._is_there(host) for host in self._hosts):
            return ""
        until = time.monotonic() + self.wait
        if why := self._attach(until):
            lost = f"{self.interruptions[-1]}; " if self.interruptions else ""
            return f"{lost or 'a host was lost; '}it has not come back within {self.wait:.0f} seconds: {why}"
        if self._agreed() != self._profile:
            raise ProfileError("the hosts that torchrun started anew are on other machines, or have other software, than before")
        if self._described is not None:
            subject, profile, before = self._described
            again = self.describe(subject, profile)
            if again != before:
                raise TargetError(again.get("error") or f"the hosts that torchrun started anew have another {subject.name} than before")
        return ""

    def _is_there(self, host: _Host) -> bool:
        with contextlib.suppress(ConnectionLost):
            return not host.is_lost and bool(self._ask(host))
        return False

    def _ask(self, host: _Host) -> dict[str, Any]:
        """Return a host's sign of life. Raises: ConnectionLost."""
        number = next(self._runs)
        said: dict[str, Any] = {}
        host.control.send({"ping": number})
        while said.get("pong") != number:
            said = host.control.receive(ANSWER)
        return said

    def _attach(self, until: float) -> str:
        """Connect to all hosts; return '' or, when the time is over, what is missing. Raises: ProfileError, UsageError."""
        self._let_go()
        while True:
            try:
                announced = find(*self._address)
                new = {host.id for host in announced}
                if self._before and not (new == self._before or new.isdisjoint(self._before)):
                    raise NobodyThere("torchrun has not started all of its hosts anew")
                self._hosts = []
                for host in announced:
                    self._hosts.append(self._connect(host))
                for connected in self._hosts:
                    connected.ahead = self._clock_of(connected)
                self._before = new
                return ""
            except (NobodyThere, ConnectionLost) as error:
                self._let_go()
                why = str(error)
            if self._closed or time.monotonic() >= until:
                return why
            time.sleep(0.2)

    def _connect(self, said: Announcement) -> _Host:
        """Open both connections to a host. Raises: NobodyThere, ConnectionLost; ProfileError, where it serves another controller."""
        why = ""
        for address in said.addresses:
            try:
                control = self._open(said, address, "control")
            except (OSError, ConnectionLost) as error:
                why = why or f"{said.node_name} does not answer at {address}:{said.port} ({error})"
                continue
            host = _Host(said, control, control, {})
            try:
                answer = control.receive(LOADING)
                if "busy" in answer:
                    raise ProfileError(f"--attach {self.endpoint}: another controller has these hosts already: {answer['busy']}")
                host.greeting = answer.get("greeting", {})
                if host.greeting.get("id") == said.id:
                    self._open_lane(host)
                    return host
            except ConnectionLost as error:
                why = why or f"{said.node_name} does not answer at {address}:{said.port} ({error})"
            except BaseException:
                control.close()
                raise
            control.close()
        raise NobodyThere(why or f"{said.node_name} does not answer")

    def _open(self, said: Announcement, address: str, wants: str, **more: Any) -> Stream:
        """Connect to a host and say what for. Raises: OSError, ConnectionLost."""
        stream = Stream(socket.create_connection((address, said.port), timeout=PATIENCE))
        try:
            stream.send({"token": said.token, "wants": wants, "id": self._id, "who": who_am_i(), **more})
        except ConnectionLost:
            stream.close()
            raise
        return stream

    def _open_lane(self, host: _Host) -> None:
        """Have a host fork a lane. Raises: ConnectionLost."""
        host.lane_number += 1
        try:
            lane = self._open(host.said, host.control.addresses[1], "lane", lane=host.lane_number)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        try:
            lane.receive(ANSWER)  # it is ready
        except ConnectionLost:
            lane.close()
            raise
        host.lane = lane

    def _clock_of(self, host: _Host) -> float:
        """Return by how many seconds a host's clock is ahead, from the quickest of some answers. Raises: ConnectionLost."""
        measured = []
        for _ in range(_ROUNDS):
            before = time.monotonic()
            said = self._ask(host)
            after = time.monotonic()
            measured.append((after - before, float(said.get("clock", 0.0)) - (before + after) / 2))
        return min(measured)[1]

    def _agreed(self) -> dict[str, Any]:
        """Return what a certificate says of the machines. Raises: ProfileError, where hosts are not alike."""
        import torch

        first, own = self._hosts[0], kit_digest()
        for host in self._hosts:
            where = f"--attach {self.endpoint}: {host.said.node_name}"
            if host.greeting.get("kit") != own:
                raise ProfileError(f"{where} has another version of the kit than this machine; install the same on all")
            if host.greeting["torch"] != first.greeting["torch"]:
                raise ProfileError(
                    f"{where} has torch {host.greeting['torch']}, {first.said.node_name} has {first.greeting['torch']}; install the same"
                )
        if first.greeting["torch"].partition("+")[0] != torch.__version__.partition("+")[0]:
            raise ProfileError(
                f"--attach {self.endpoint}: the nodes have torch {first.greeting['torch']}, this machine has {torch.__version__}, "
                "which makes the inputs that results are compared with; install the same"
            )
        kept = {key: value for key, value in first.greeting.items() if key not in ("kit", "id")}
        return {**kept, "nodes": [_node(self._hosts, node) for node in self._nodes]}

    def _new_folder(self, name: str) -> Path:
        try:
            if self._base == Path():
                self._base = Path(tempfile.mkdtemp(prefix="conformance-attached-", dir=fast_folder()))
            folder = self._base / name
            if folder.exists():
                folder = self._base / f"{name}-{next(self._runs)}"
            folder.mkdir()
        except OSError as error:
            raise KitError(f"cannot create a folder for {name}: {error.strerror}") from error
        return folder

    def _let_go(self) -> None:
        for host in self._hosts:
            for stream in (host.lane, host.control):
                stream.hang_up()
                stream.close()
        self._hosts = []


def place(world: int, hosts: list[Announcement]) -> list[Announcement]:
    """Return the host of each rank: as many nodes as there can be, and as on a larger machine the ranks of a node one after another.

    A world of 3 on two nodes with two slots each has ranks 0 and 1 on the first and rank 2 on the second.
    """
    by_turns = sorted(hosts, key=lambda host: (host.place, host.node))
    return sorted(by_turns[:world], key=lambda host: (host.node, host.place))


def environments(hosts: list[Announcement]) -> dict[str, dict[str, str]]:
    """Return what torchrun would have put into the environment of each rank of a run; ``hosts`` are theirs, in order."""
    nodes = list(dict.fromkeys(host.node for host in hosts))
    found = {}
    for rank, host in enumerate(hosts):
        together = [other for other, its in enumerate(hosts) if its.node == host.node]
        found[str(rank)] = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": str(together.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(together)),
            "GROUP_RANK": str(nodes.index(host.node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(len(hosts)),
        }
    return found


def _named(lost: list[tuple[Member, str]]) -> str:
    """Name the nodes of what was lost, with its ranks and how it was lost; first the node that was lost first."""
    said = []
    for node in dict.fromkeys(member.host.node_name for member, _ in lost):
        here = [(member, how) for member, how in lost if member.host.node_name == node]
        ranks = sorted(rank for member, _ in here for rank in member.ranks)
        said.append(f"{node}, rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {here[0][1]}")
    return "; ".join(said)


def _node(hosts: list[_Host], node: int) -> dict[str, Any]:
    here = [host for host in hosts if host.said.node == node]
    return {"host": here[0].said.hostname, "slots": len(here), **{key: here[0].greeting[key] for key in ("torch", "python", "platform")}}

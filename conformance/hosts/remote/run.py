"""One run on ranks of several hosts, as its controller sees it. Imports no torch.

Each host supervises its own ranks; what only all of them together can know is decided here. When a rank dies its peers get the
same grace as on one machine; when the deadline passes, or a rank floods its output, or a host is lost, the others are stopped.
They are stopped in two steps: every host takes the evidence of its ranks, and only when all have it are ranks killed; else a
rank that hangs would be told of as one whose peer had closed the connection.
"""

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.hosts.remote.rendezvous import Announcement
from conformance.hosts.remote.wire import RECORDS, SAVED, SILENCE, SILENT, ConnectionLost, Stream

ANSWER = SILENCE + 8.0  # seconds in which a host that is there must have taken evidence, or killed
TEXT_LIMIT = 20_000  # characters of what a host says of a rank


@dataclass
class Member:
    """A host that takes part in a run.

    Attributes:
        host: which.
        lane: the connection to the process that forks its ranks.
        ranks: those that it runs.
        ahead: by how many seconds its clock is ahead of the controller's.
        state: ``running``, ``evidence``, ``done`` or ``lost``.
        how: how it was lost, and ``lost_at`` when.
        said: what it said of its ranks, by rank, once it is done.
    """

    host: Announcement
    lane: Stream
    ranks: tuple[int, ...]
    ahead: float = 0.0
    state: str = "running"
    how: str = ""
    lost_at: float = 0.0
    said: dict[int, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    kit_error: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "lost")


class RemoteRun:
    """The hosts of one run.

    Args:
        members: every host, in the order of their ranks.
        folder: the run's, on this machine; records are written there.
        others: hosts that have no rank of it, and a connection to each: when one of them dies torchrun may start all anew.

    Attributes:
        lost_beside: which of those were lost before the run was over, and how.
    """

    def __init__(self, members: Sequence[Member], folder: Path, others: Sequence[tuple[Announcement, Stream]] = ()) -> None:
        self.members, self._folder = members, folder
        self._others = {stream: host for host, stream in others}
        self.lost_beside: list[tuple[Announcement, str]] = []
        self._stopped, self._killing = "", False

    def begin(self, command: dict[str, Any], files: Sequence[tuple[int, Path]], environment: dict[str, dict[str, str]]) -> None:
        """Send the command, and the files that go with it; each host gets the environment of its own ranks."""
        for member in self.members:
            own = {str(rank): environment[str(rank)] for rank in member.ranks}
            try:
                member.lane.send({**command, "ranks": member.ranks, "environment": own}, files)
            except ConnectionLost as error:
                self._lose(member, str(error))

    def carry_out(self, deadline: float, grace: float) -> dict[str, Any]:
        """Watch the run to its end, and return its outcome as a lane of this machine would.

        Args:
            deadline: seconds after which ranks still alive are taken to hang.
            grace: seconds that the others get after the first one died.
        """
        stop, reason, patience = time.monotonic() + deadline, "hang", 0.0
        while running := [member for member in self.members if not member.is_over]:
            now = time.monotonic()
            if not self._stopped:
                if self._failed and reason != "peer" and now + grace < stop:
                    stop, reason = now + grace, "peer"
                if any(member.state == "lost" or member.kit_error for member in self.members):
                    stop, reason = now, "node"
                by_itself = next((member.how for member in self.members if member.state == "evidence"), "")
                if by_itself or now >= stop:
                    self._stop(by_itself or reason)
                    patience = now + ANSWER
            if self._stopped and not self._killing and all(member.state != "running" for member in self.members):
                self._kill()
                patience = now + ANSWER
            if self._stopped and now >= patience:
                for member in running:
                    self._lose(member, SILENT)
            running = [member for member in running if not member.is_over]
            until = patience if self._stopped else stop
            streams = [*self._others, *(member.lane for member in running)]
            for stream in select.select(streams, [], [], max(0.0, until - now))[0] if running else ():
                if stream in self._others:
                    self._hear_beside(stream)
                else:
                    self._hear(next(member for member in running if member.lane is stream))
        return self._outcome()

    @property
    def _failed(self) -> bool:
        """Whether a rank has ended as none should."""
        return any(rank["exit"] != 0 for member in self.members for rank in member.said.values())

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        for member in self.members:
            if member.state == "running":
                self._tell(member, {"stop": reason})

    def _kill(self) -> None:
        self._killing = True
        for member in self.members:
            if member.state == "evidence":
                self._tell(member, {"kill": True})

    def _tell(self, member: Member, message: dict[str, Any]) -> None:
        try:
            member.lane.send(message)
        except ConnectionLost as error:
            self._lose(member, str(error))

    def _lose(self, member: Member, how: str) -> None:
        member.state, member.how, member.lost_at = "lost", how, time.monotonic()

    def _hear(self, member: Member) -> None:
        try:
            member.lane.fill()
            while (message := member.lane.pop()) is not None:
                if "evidence" in message:
                    member.state, member.how = "evidence", str(message["evidence"])
                elif "kit_error" in message:
                    member.state, member.kit_error = "done", str(message["kit_error"])[:500]
                elif "outcome" in message:
                    self._take(member, message)
        except ConnectionLost as error:
            self._lose(member, str(error))

    def _hear_beside(self, stream: Stream) -> None:
        try:
            stream.fill()
        except ConnectionLost as error:
            self.lost_beside.append((self._others.pop(stream), str(error)))

    def _take(self, member: Member, message: dict[str, Any]) -> None:
        """Take what a host says of its ranks, and their records."""
        for rank in member.ranks:
            (self._folder / str(rank)).mkdir(exist_ok=True)
        member.lane.receive_files(message, self._folder, member.ranks, RECORDS + SAVED)
        try:
            said = message["outcome"]
            for entry in said["ranks"]:
                if entry["rank"] in member.ranks:
                    member.said[entry["rank"]] = _checked(entry, member.ahead)
            member.left = [str(line)[:200] for line in said["left_processes"]][:100]
        except (KeyError, TypeError, ValueError) as error:
            raise ConnectionLost("it sent what is no outcome") from error
        if set(member.said) != set(member.ranks):
            raise ConnectionLost("it left out a rank")
        member.state = "done"

    def _outcome(self) -> dict[str, Any]:
        said = {rank: entry for member in self.members for rank, entry in member.said.items()}
        ranks = [rank for member in self.members for rank in member.ranks]
        ended = not self._stopped and all(member.state == "done" for member in self.members)
        return {
            "stopped": "ended" if ended else self._stopped or "node",
            "left_processes": [line for member in self.members for line in member.left],
            "ranks": [said.get(rank, {"rank": rank, "exit": None}) for rank in sorted(ranks)],
        }


def _checked(entry: dict[str, Any], ahead: float) -> dict[str, Any]:
    """Return what a host may say of a rank, on the controller's clock. Raises: TypeError, ValueError, KeyError."""
    exit_status, died = entry["exit"], entry.get("died")
    checked: dict[str, Any] = {
        "rank": int(entry["rank"]),
        "exit": None if exit_status is None else int(exit_status),
        "died": None if died is None else float(died) - ahead,
        "printed": int(entry["printed"]),
        "clock": ahead,
    }
    for name in ("output", "stacks", "flight"):
        if name in entry:
            checked[name] = str(entry[name])[:TEXT_LIMIT]
    return {**checked, "killed": True} if entry.get("killed") else checked

"""One run on ranks of several hosts, as its controller sees it.

Each host supervises its own ranks. This module makes the decisions that need all ranks. When a rank
dies, its peers get the same grace as on one machine. When the deadline passes, a rank floods its
output, or a host is lost, the other hosts are stopped.

Hosts are stopped in two steps: every host collects the evidence of its ranks, and only when all
hosts have it are ranks killed. If a rank were killed earlier, a peer that hangs would look like a
rank whose peer had closed the connection. This module imports no torch.
"""

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.hosts.remote.rendezvous import Announcement
from conformance.hosts.remote.wire import (
    RECORDS,
    SAVED,
    SILENCE,
    SILENT,
    ConnectionLost,
    Stream,
)

ANSWER = SILENCE + 8.0  # seconds for a host to collect evidence, or to kill its ranks
# Limits for values that a host sends.
TEXT_LIMIT = 20_000  # characters of a rank's output, stacks and flight recorder, each
_KIT_ERROR_LIMIT = 500  # characters
_COMMAND_LINE_LIMIT = 200  # characters
_LEFT_PROCESSES_LIMIT = 100


@dataclass
class Member:
    """A host that takes part in a run.

    Attributes:
        host: its announcement.
        lane: the connection to the lane that forks its ranks.
        ranks: the ranks that it runs.
        clock_offset: by how many seconds its clock is ahead of the controller's.
        state: ``running``; ``evidence`` when it has collected evidence and waits for permission to
            kill; ``done`` or ``lost``.
        reason: why it stopped its ranks, or how it was lost.
        lost_at: when it was lost, on the monotonic clock.
        rank_outcomes: the outcome of each of its ranks, once it is done.
        left_processes: command lines of processes that outlived their rank.
        kit_error: an error of the kit on this host; None if there was none.
    """

    host: Announcement
    lane: Stream
    ranks: tuple[int, ...]
    clock_offset: float = 0.0
    state: str = "running"
    reason: str = ""
    lost_at: float = 0.0
    rank_outcomes: dict[int, dict[str, Any]] = field(default_factory=dict)
    left_processes: list[str] = field(default_factory=list)
    kit_error: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "lost")

    def lose(self, reason: str) -> None:
        self.state = "lost"
        self.reason = reason
        self.lost_at = time.monotonic()


class RemoteRun:
    """A run on several hosts.

    Args:
        members: the hosts of the run, in the order of their ranks.
        folder: the run's folder on this machine, for the records.
        others: the other hosts of the rendezvous, each with a connection. If one of them dies,
            torchrun may start all hosts anew.

    Attributes:
        lost_others: those of ``others`` that were lost during the run, each with the reason.
    """

    def __init__(
        self,
        members: Sequence[Member],
        folder: Path,
        others: Sequence[tuple[Announcement, Stream]] = (),
    ) -> None:
        self.members = members
        self.lost_others: list[tuple[Announcement, str]] = []
        self._folder = folder
        self._others = {stream: host for host, stream in others}
        self._stopped: str | None = None
        self._killing = False

    def start(
        self,
        command: dict[str, Any],
        files: Sequence[tuple[int, Path]],
        environment: dict[str, dict[str, str]],
    ) -> None:
        """Send the command and its files to every host.

        Args:
            environment: the environment of each rank; a host gets those of its own ranks.
        """
        for member in self.members:
            own = {str(rank): environment[str(rank)] for rank in member.ranks}
            message = {**command, "ranks": member.ranks, "environment": own}
            try:
                member.lane.send(message, files)
            except ConnectionLost as error:
                member.lose(str(error))

    def supervise(self, deadline: float, grace: float) -> dict[str, Any]:
        """Watch the run to its end, and return its outcome in the form of a local lane's.

        Args:
            deadline: seconds after which ranks that are still alive count as hanging.
            grace: seconds that the other ranks get after the first one died.
        """
        stop = time.monotonic() + deadline
        reason = "hang"
        # Until when members must answer, once the run is being stopped.
        patience = 0.0
        while not all(member.is_over for member in self.members):
            now = time.monotonic()
            if self._stopped is None:
                if self._has_failed_rank and reason != "peer" and now + grace < stop:
                    stop = now + grace
                    reason = "peer"
                if any(m.state == "lost" or m.kit_error is not None for m in self.members):
                    stop = now
                    reason = "node"
                waiting = [m.reason for m in self.members if m.state == "evidence"]
                if waiting or now >= stop:
                    # A member that collected evidence without a request has a reason of its own.
                    self._stop(waiting[0] if waiting else reason)
                    patience = now + ANSWER
            has_all_evidence = all(member.state != "running" for member in self.members)
            if self._stopped is not None and not self._killing and has_all_evidence:
                self._kill()
                patience = now + ANSWER
            if self._stopped is not None and now >= patience:
                for member in self.members:
                    if not member.is_over:
                        member.lose(SILENT)
            until = stop if self._stopped is None else patience
            self._receive(max(0.0, until - now))
        return self._outcome()

    @property
    def _has_failed_rank(self) -> bool:
        """Whether a rank has ended with an exit status other than 0."""
        return any(
            outcome["exit"] != 0
            for member in self.members
            for outcome in member.rank_outcomes.values()
        )

    def _stop(self, reason: str) -> None:
        """Make all hosts collect evidence."""
        self._stopped = reason
        for member in self.members:
            if member.state == "running":
                self._send(member, {"stop": reason})

    def _kill(self) -> None:
        """Permit all hosts to kill their ranks."""
        self._killing = True
        for member in self.members:
            if member.state == "evidence":
                self._send(member, {"kill": True})

    def _send(self, member: Member, message: dict[str, Any]) -> None:
        try:
            member.lane.send(message)
        except ConnectionLost as error:
            member.lose(str(error))

    def _receive(self, seconds: float) -> None:
        """Wait for messages of members and for ends of other hosts, and handle them."""
        lanes = {member.lane: member for member in self.members if not member.is_over}
        if not lanes:
            return
        for stream in select.select([*self._others, *lanes], [], [], seconds)[0]:
            if stream in lanes:
                self._receive_from(lanes[stream])
            else:
                self._read_other(stream)

    def _receive_from(self, member: Member) -> None:
        try:
            member.lane.read()
            while (message := member.lane.next_message()) is not None:
                if "evidence" in message:
                    member.state = "evidence"
                    member.reason = str(message["evidence"])
                elif "kit_error" in message:
                    member.state = "done"
                    member.kit_error = str(message["kit_error"])[:_KIT_ERROR_LIMIT]
                elif "outcome" in message:
                    self._receive_outcome(member, message)
        except ConnectionLost as error:
            member.lose(str(error))

    def _read_other(self, stream: Stream) -> None:
        """Notice the end of a host that has no rank of the run; its messages wait."""
        try:
            stream.read()
        except ConnectionLost as error:
            self.lost_others.append((self._others.pop(stream), str(error)))

    def _receive_outcome(self, member: Member, message: dict[str, Any]) -> None:
        """Receive the outcome of a host's ranks, and their records.

        Raises:
            ConnectionLost: the outcome is invalid. A host cannot report about the ranks of another.
        """
        for rank in member.ranks:
            (self._folder / str(rank)).mkdir(exist_ok=True)
        member.lane.receive_files(message, self._folder, member.ranks, RECORDS + SAVED)
        try:
            outcome = message["outcome"]
            for entry in outcome["ranks"]:
                rank = entry["rank"]
                if rank in member.ranks:
                    member.rank_outcomes[rank] = _check_entry(entry, member.clock_offset)
            lines = [str(line)[:_COMMAND_LINE_LIMIT] for line in outcome["left_processes"]]
            member.left_processes = lines[:_LEFT_PROCESSES_LIMIT]
        except (KeyError, TypeError, ValueError) as error:
            raise ConnectionLost("it sent an invalid outcome") from error
        if set(member.rank_outcomes) != set(member.ranks):
            raise ConnectionLost("it left out a rank")
        member.state = "done"

    def _outcome(self) -> dict[str, Any]:
        entries: dict[int, dict[str, Any]] = {}
        left_processes = []
        for member in self.members:
            for rank in member.ranks:
                entries[rank] = member.rank_outcomes.get(rank, {"rank": rank, "exit": None})
            left_processes += member.left_processes
        stopped = self._stopped
        if stopped is None:
            all_done = all(member.state == "done" for member in self.members)
            stopped = "ended" if all_done else "node"
        return {
            "stopped": stopped,
            "left_processes": left_processes,
            "ranks": [entries[rank] for rank in sorted(entries)],
        }


def _check_entry(entry: dict[str, Any], clock_offset: float) -> dict[str, Any]:
    """Return the known fields of a rank's outcome, with times on the controller's clock.

    Raises:
        TypeError, ValueError, KeyError: the entry is invalid.
    """
    exit_status = entry["exit"]
    died = entry.get("died")
    checked: dict[str, Any] = {
        "rank": int(entry["rank"]),
        "exit": None if exit_status is None else int(exit_status),
        "died": None if died is None else float(died) - clock_offset,
        "printed": int(entry["printed"]),
        "clock": clock_offset,
    }
    for name in ("output", "stacks", "flight"):
        if name in entry:
            checked[name] = str(entry[name])[:TEXT_LIMIT]
    if entry.get("killed"):
        checked["killed"] = True
    return checked

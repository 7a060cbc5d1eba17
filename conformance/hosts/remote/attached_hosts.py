"""Connections to the hosts of a rendezvous: finding hosts, attaching to them, and their lanes.

torchrun may start all hosts anew after one was lost. They are then attached again, all together.
This module imports no torch before it is attached.
"""

import contextlib
import itertools
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from conformance.errors import ProfileError
from conformance.hosts.environment import describe_exit
from conformance.hosts.remote.rendezvous import (
    CONNECT_TIMEOUT,
    Announcement,
    HostsNotFound,
    find_hosts,
    kit_digest,
    parse_endpoint,
)
from conformance.hosts.remote.run import ANSWER
from conformance.hosts.remote.wire import SILENT, ConnectionLost, Stream, describe_process

LOADING = 180.0  # seconds for a host that listens to import its modules
_CLOCK_ROUNDS = 5  # pings by which a host's clock is measured
_RETRY = 0.2  # seconds between attempts to attach


@dataclass
class AttachedHost:
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


class AttachedHosts:
    """The hosts of a rendezvous that this controller is connected to.

    Args:
        endpoint: torchrun's ``--rdzv-endpoint``.

    Attributes:
        hosts: the connected hosts, in the order of their ranks.
        id: the id of this controller.
        numbers: numbers that this controller has not used yet.
        closed: no further attempt to attach is made.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.hosts: list[AttachedHost] = []
        self.id = secrets.token_hex(8)
        self.numbers = itertools.count(1)
        self.closed = False
        self._address = parse_endpoint(endpoint)
        # The ids of the hosts that were attached last.
        self._last_ids: set[str] = set()

    @property
    def nodes(self) -> list[int]:
        return sorted({host.announcement.node for host in self.hosts})

    def of_node(self, node: int) -> list[AttachedHost]:
        return [host for host in self.hosts if host.announcement.node == node]

    @property
    def are_connected(self) -> bool:
        """Whether there are hosts, and all of them answer."""
        return bool(self.hosts) and all(self._is_connected(host) for host in self.hosts)

    def _is_connected(self, host: AttachedHost) -> bool:
        with contextlib.suppress(ConnectionLost):
            return not host.is_lost and bool(self._ping(host))
        return False

    def _ping(self, host: AttachedHost) -> dict[str, Any]:
        """Return a host's answer to a ping. Raises: ConnectionLost."""
        number = next(self.numbers)
        answer: dict[str, Any] = {}
        host.control.send({"ping": number})
        while answer.get("pong") != number:
            answer = host.control.receive(ANSWER)
        return answer

    def attach(self, until: float) -> None:
        """Connect to all hosts.

        Args:
            until: when to give up, on the monotonic clock; there is at least one attempt.

        Raises:
            HostsNotFound: hosts are missing still.
            ProfileError: a host serves another controller.
            UsageError: there are hosts of several rendezvous.
        """
        while True:
            self.release()
            try:
                self._connect_all()
                return
            except (HostsNotFound, ConnectionLost) as error:
                self.release()
                reason = str(error)
            if self.closed or time.monotonic() >= until:
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
            self.hosts.append(self._connect(announcement))
        for host in self.hosts:
            host.clock_offset = self._measure_clock_offset(host)
        self._last_ids = ids

    def _connect(self, announcement: Announcement) -> AttachedHost:
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

    def _connect_at(self, announcement: Announcement, address: str) -> AttachedHost | None:
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
                host = AttachedHost(announcement, control, control, greeting)
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
            "id": self.id,
            "name": describe_process(),
            **fields,
        }
        try:
            stream.send(message)
        except ConnectionLost:
            stream.close()
            raise
        return stream

    def _open_lane(self, host: AttachedHost) -> None:
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

    def _measure_clock_offset(self, host: AttachedHost) -> float:
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

    def common_greeting(self) -> dict[str, Any]:
        """Return the certificate's description of the machines.

        Raises:
            ProfileError: hosts differ in the kit or in torch, or torch differs from this machine's.
        """
        import torch

        own_kit = kit_digest()
        first = self.hosts[0]
        first_torch = first.greeting["torch"]
        for host in self.hosts:
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
        return {**common, "nodes": [self._node_entry(node) for node in self.nodes]}

    def _node_entry(self, node: int) -> dict[str, Any]:
        """Return the certificate's entry for a node."""
        hosts = self.of_node(node)
        software = {key: hosts[0].greeting[key] for key in ("torch", "python", "platform")}
        return {"host": hosts[0].announcement.hostname, "slots": len(hosts), **software}

    def replace_lane(self, host: AttachedHost, reason: str) -> str | None:
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

    def release(self) -> None:
        """Close the connections to all hosts."""
        for host in self.hosts:
            for stream in (host.lane, host.control):
                stream.hang_up()
                stream.close()
        self.hosts = []

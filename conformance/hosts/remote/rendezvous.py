"""How a controller finds the hosts that torchrun started: in the store of torchrun's rendezvous.

Each host writes an announcement into the store, with the address on which it listens. torchrun's
c10d rendezvous is a TCPStore at its ``--rdzv-endpoint``. The controller is given this endpoint; the
hosts are given another store, which torchrun's agents share (``MASTER_ADDR``, ``MASTER_PORT``). The
endpoint's store names the shared store, under keys of the rendezvous. With the static rendezvous
both are the same store. All values that are read are text and JSON; nothing is unpickled, not even
torch's own state. This module imports torch only when it is used.
"""

import datetime
import hashlib
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.errors import UsageError

DEFAULT_PORT = 29400  # torchrun's
CONNECT_TIMEOUT = 5.0  # seconds for a connection
STORE_TIMEOUT = 30.0  # seconds for a store: its client looks up host names, which may take long
_KEY = "conformance/host/{}"
_RENDEZVOUS_PREFIX = "torch.rendezvous."
_MASTER_SUFFIX = "/MASTER_ADDR"
_DEFAULT_RUN = "none"  # the name of a torchrun without --rdzv-id


class HostsNotFound(Exception):
    """There are no hosts yet, or not all of them; ``str(error)`` is the reason."""


@dataclass(frozen=True)
class Announcement:
    """One host, as it describes itself to controllers.

    Attributes:
        id: identifies the process; torchrun may replace it by another.
        token: a controller must send it when it connects.
        addresses: the addresses under which the host may be reached.
        port: the port on which it listens.
        host_rank: torchrun's rank of the host.
        host_count: the number of hosts.
        node: torchrun's rank of the host's agent.
        node_count: the number of agents.
        local_rank: the host's rank on its node.
        hostname: the name of the machine, for people.
        pid: the process id, for people.
        store: address and port of the store of the announcement, in which ranks meet too.
    """

    id: str
    token: str
    addresses: tuple[str, ...]
    port: int
    host_rank: int
    host_count: int
    node: int
    node_count: int
    local_rank: int
    hostname: str
    pid: int
    store: tuple[str, int]

    @property
    def node_name(self) -> str:
        return f"node {self.node} ({self.hostname})"


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, ``HOST`` or ``[ADDRESS]:PORT``, as torchrun does.

    Raises:
        UsageError: the text has none of these forms.
    """
    host = text
    colon = ""
    port = ""
    if ":" in text and not text.endswith("]"):
        host, colon, port = text.rpartition(":")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise UsageError(
            f"--attach {text}: an address with colons needs brackets, e.g. [::1]:{DEFAULT_PORT}"
        )
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isdecimal() and 0 < int(port) < 65536
    if not host or "/" in host or (colon and not is_port):
        raise UsageError(f"--attach {text}: not HOST:PORT, the --rdzv-endpoint of torchrun")
    return host, int(port) if port else DEFAULT_PORT


def publish(host: Announcement) -> None:
    """Put a host's announcement into its store.

    Raises:
        RuntimeError: the store does not answer.
    """
    _connect(*host.store).set(_KEY.format(host.host_rank), json.dumps(asdict(host)))


def find_hosts(host: str, port: int) -> list[Announcement]:
    """Return the announcements of all hosts of a rendezvous, in the order of their ranks.

    Args:
        host: the address of torchrun's rendezvous endpoint, or of the store that its agents share.
        port: the port of the same.

    Raises:
        HostsNotFound: there is no store, or it has no hosts, or not all of them yet.
        UsageError: there are several rendezvous, each with hosts.
    """
    import torch.distributed as dist

    try:
        return _find_hosts(host, port)
    except dist.DistError as error:
        # torchrun closes the store when it starts all hosts anew.
        first_line = str(error).partition("\n")[0]
        raise HostsNotFound(f"the store at {host}:{port} is gone ({first_line})") from error


def _find_hosts(host: str, port: int) -> list[Announcement]:
    store = _reach(host, port)
    if store.check([_KEY.format(0)]):
        return _read_announcements(store, host)
    found: dict[tuple[str, int], list[Announcement]] = {}
    reason = f"there is a store at {host}:{port}, and no rendezvous of torchrun's in it yet"
    for address, shared_port in _shared_stores(store):
        # The shared store's own address may mean nothing on this machine. It is often on the same
        # machine as the endpoint.
        for name in dict.fromkeys((address, host)):
            try:
                shared = _reach(name, shared_port)
                if shared.check([_KEY.format(0)]):
                    found[name, shared_port] = _read_announcements(shared, name)
                else:
                    reason = (
                        f"torchrun is there ({name}:{shared_port}), "
                        "and no host of the kit's has come yet"
                    )
                break
            except HostsNotFound as error:
                reason = str(error)
    if len(found) > 1:
        choice = " or ".join(sorted(f"--attach {name}:{number}" for name, number in found))
        raise UsageError(
            f"there are hosts of several torchruns at {host}:{port}; name one: {choice}"
        )
    if not found:
        raise HostsNotFound(reason)
    return next(iter(found.values()))


def _shared_stores(store: Any) -> list[tuple[str, int]]:
    """Return the shared store of the newest round of each rendezvous of an endpoint.

    Raises:
        HostsNotFound: this torch cannot list the keys of a store, and no rendezvous has torchrun's
            default name.
    """
    can_list = hasattr(store, "list_keys")
    rounds = _newest_rounds(store.list_keys()) if can_list else _round_of_the_default_run(store)
    if not rounds and not can_list:
        raise HostsNotFound(
            "this torch cannot list the keys of a store, and the store has no rendezvous without "
            "--rdzv-id: give the address that the first host printed to --attach"
        )
    shared = []
    for run, number in rounds.items():
        prefix = f"{_RENDEZVOUS_PREFIX}{run}.{number}/"
        if store.check([f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT"]):
            address = store.get(f"{prefix}MASTER_ADDR").decode()
            shared.append((address, int(store.get(f"{prefix}MASTER_PORT"))))
    return shared


def _round_of_the_default_run(store: Any) -> dict[str, int]:
    """Return the number of the newest round of a torchrun without ``--rdzv-id``.

    Torch through 2.9 cannot list the keys of a store. torchrun numbers the rounds from 0.
    """
    number = 0
    while store.check([f"{_RENDEZVOUS_PREFIX}{_DEFAULT_RUN}.{number}{_MASTER_SUFFIX}"]):
        number += 1
    return {_DEFAULT_RUN: number - 1} if number else {}


def _newest_rounds(keys: Iterable[str]) -> dict[str, int]:
    """Return the number of the newest round of each run that has a shared store."""
    newest: dict[str, int] = {}
    for key in keys:
        if key.startswith(_RENDEZVOUS_PREFIX) and key.endswith(_MASTER_SUFFIX):
            name = key.removeprefix(_RENDEZVOUS_PREFIX).removesuffix(_MASTER_SUFFIX)
            run, _, number = name.rpartition(".")
            if number.isdecimal():
                newest[run] = max(newest.get(run, 0), int(number))
    return newest


def _read_announcements(store: Any, reached_as: str) -> list[Announcement]:
    """Read the announcements of all hosts of a store. Raises: HostsNotFound."""
    hosts: list[Announcement] = []
    expected = 1
    while len(hosts) < expected:
        key = _KEY.format(len(hosts))
        if not store.check([key]):
            raise HostsNotFound(f"{len(hosts)} of {expected} hosts have come")
        host = _parse(store.get(key), reached_as)
        hosts.append(host)
        expected = hosts[0].host_count
        # A host of an earlier round may have left an announcement.
        if host.host_count != expected:
            raise HostsNotFound(f"{len(hosts) - 1} of {expected} hosts have come")
    return hosts


def _parse(text: bytes, reached_as: str) -> Announcement:
    """Parse an announcement. Raises: HostsNotFound."""
    try:
        fields = json.loads(text)
        addresses = tuple(str(address) for address in fields["addresses"])
        if fields["node"] == 0:
            # The shared store is on the first node, and was reached under this name.
            addresses = (*addresses, reached_as)
        address, port = fields["store"]
        store = (str(address), int(port))
        return Announcement(**{**fields, "addresses": addresses, "store": store})
    except (ValueError, TypeError, KeyError) as error:
        raise HostsNotFound("a host of another version has announced itself there") from error


def _reach(host: str, port: int) -> Any:
    """Connect to a store if something listens at its address. Raises: HostsNotFound."""
    # torch's client tries many times, and each attempt leaves a trace on the terminal. So a plain
    # connection comes first.
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        reason = error.strerror or error
        raise HostsNotFound(f"nobody answers at {host}:{port} ({reason})") from error
    try:
        return _connect(host, port)
    except RuntimeError as error:
        raise HostsNotFound(f"the server at {host}:{port} is no store of torchrun's") from error


def _connect(host: str, port: int) -> Any:
    from torch.distributed import TCPStore

    timeout = datetime.timedelta(seconds=STORE_TIMEOUT)
    return TCPStore(host, port, is_master=False, timeout=timeout)


def kit_digest() -> str:
    """Return a digest of the kit's own sources.

    Hosts and controller must have the same: records are judged by the kit that made them.
    """
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix == ".py" or path.name == "golden.txt":
            file_digest = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(package)}\0{file_digest}\n".encode())
    return digest.hexdigest()


def make_announcement(
    identity: str, token: str, addresses: tuple[str, ...], port: int
) -> Announcement:
    """Return the announcement of the host in this process.

    Raises:
        KeyError: torchrun has not started this process.
    """
    return Announcement(
        id=identity,
        token=token,
        addresses=addresses,
        port=port,
        host_rank=int(os.environ["RANK"]),
        host_count=int(os.environ["WORLD_SIZE"]),
        node=int(os.environ["GROUP_RANK"]),
        node_count=int(os.environ["GROUP_WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        hostname=socket.gethostname(),
        pid=os.getpid(),
        store=(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
    )

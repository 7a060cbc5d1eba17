"""How a controller finds the hosts that torchrun started: each says in the rendezvous store where it listens.

torchrun's c10d rendezvous is a TCPStore at its ``--rdzv-endpoint``, which the controller is given and the hosts are not. Hosts are
given the store that agents share (``MASTER_ADDR``, ``MASTER_PORT``); the first names the second, by the rendezvous' own keys. With
the static rendezvous both are one. What the store says is text and JSON; nothing is unpickled, not even torch's own state.
Imports torch when it is used, not before.
"""

import datetime
import hashlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.errors import UsageError

DEFAULT_PORT = 29400  # torchrun's
PATIENCE = 5.0  # seconds for somebody to listen
STORE_PATIENCE = 30.0  # seconds for a store to answer: its client looks up names, which may take long
_KEY = "conformance/host/{}"
_RENDEZVOUS, _MASTER = "torch.rendezvous.", "/MASTER_ADDR"


class NobodyThere(Exception):
    """There are no hosts yet; ``str(error)`` says what there is instead."""


@dataclass(frozen=True)
class Announcement:
    """What a host says of itself.

    Attributes:
        id: of this process, which torchrun may replace by another.
        token: what whoever connects must know.
        addresses, port: where it listens.
        slot: torchrun's rank of it; ``slots`` is how many there are.
        node: torchrun's rank of its agent; ``nodes`` is how many there are.
        place: its rank on its node.
        hostname, pid: for people.
        store: address and port of the store that it is in, where ranks meet too.
    """

    id: str
    token: str
    addresses: tuple[str, ...]
    port: int
    slot: int
    slots: int
    node: int
    nodes: int
    place: int
    hostname: str
    pid: int
    store: tuple[str, int]

    @property
    def node_name(self) -> str:
        return f"node {self.node} ({self.hostname})"


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, ``HOST`` or ``[ADDRESS]:PORT``, as torchrun does.

    Raises:
        UsageError: it is none of these.
    """
    host, colon, port = text.rpartition(":") if not text.endswith("]") and text.count(":") != 0 else (text, "", "")
    if host.count(":") and not (host.startswith("[") and host.endswith("]")):
        raise UsageError(f"--attach {text}: an address with colons needs brackets, e.g. [::1]:{DEFAULT_PORT}")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or (colon and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise UsageError(f"--attach {text}: not HOST:PORT, which is what torchrun has as --rdzv-endpoint")
    return host, int(port) if port else DEFAULT_PORT


def announce(host: Announcement) -> None:
    """Put a host's announcement into the store that it names. Raises: RuntimeError, where it does not answer."""
    _connect(*host.store).set(_KEY.format(host.slot), json.dumps(asdict(host)))


def find(host: str, port: int) -> list[Announcement]:
    """Return the announcements of all hosts of a rendezvous, in the order of their slots.

    Args:
        host, port: torchrun's rendezvous endpoint, or the store that its agents share.

    Raises:
        NobodyThere: there is no store, or there are no hosts in it, or not all of them yet.
        UsageError: there are several rendezvous, each with hosts.
    """
    store = _reach(host, port)
    if store.check([_KEY.format(0)]):
        return _read(store, host)
    found: dict[tuple[str, int], list[Announcement]] = {}
    why = f"there is a store at {host}:{port}, and no rendezvous of torchrun's in it yet"
    for address, shared in _shared_stores(store):
        for name in dict.fromkeys((address, host)):  # its own name may mean nothing here
            try:
                there = _reach(name, shared)
                if there.check([_KEY.format(0)]):
                    found[name, shared] = _read(there, name)
                else:
                    why = f"torchrun is there ({name}:{shared}), and no host of the kit's has come yet"
                break
            except NobodyThere as error:
                why = str(error)
    if len(found) > 1:
        choice = " or ".join(sorted(f"--attach {name}:{shared}" for name, shared in found))
        raise UsageError(f"there are hosts of several torchruns at {host}:{port}; name one: {choice}")
    if not found:
        raise NobodyThere(why)
    return next(iter(found.values()))


def _shared_stores(store: Any) -> list[tuple[str, int]]:
    """Return the store of the newest round of every rendezvous that an endpoint has."""
    if not hasattr(store, "list_keys"):
        raise NobodyThere("this torch cannot list what a store holds: give the address that the first host printed to --attach")
    newest: dict[str, int] = {}
    for key in store.list_keys():
        if key.startswith(_RENDEZVOUS) and key.endswith(_MASTER):
            run, _, number = key.removeprefix(_RENDEZVOUS).removesuffix(_MASTER).rpartition(".")
            if number.isdecimal():
                newest[run] = max(newest.get(run, 0), int(number))
    shared = []
    for run, number in newest.items():
        prefix = f"{_RENDEZVOUS}{run}.{number}/"
        if store.check([f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT"]):
            shared.append((store.get(f"{prefix}MASTER_ADDR").decode(), int(store.get(f"{prefix}MASTER_PORT"))))
    return shared


def _read(store: Any, reached_as: str) -> list[Announcement]:
    hosts: list[Announcement] = []
    slots = 1
    while len(hosts) < slots:
        key = _KEY.format(len(hosts))
        if not store.check([key]):
            raise NobodyThere(f"{len(hosts)} of {slots} hosts have come")
        hosts.append(_parse(store.get(key), reached_as))
        slots = hosts[0].slots
        if hosts[-1].slots != slots:
            raise NobodyThere(f"{len(hosts) - 1} of {slots} hosts have come")
    return hosts


def _parse(text: bytes, reached_as: str) -> Announcement:
    try:
        said = json.loads(text)
        own = tuple(str(address) for address in said["addresses"])
        candidates = (*own, reached_as) if said["node"] == 0 else own
        return Announcement(**{**said, "addresses": candidates, "store": (str(said["store"][0]), int(said["store"][1]))})
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise NobodyThere("a host of another version has announced itself there") from error


def _reach(host: str, port: int) -> Any:
    """Connect to a store, once something listens there: torch's own attempts are many, and each leaves a trace on the terminal."""
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError as error:
        raise NobodyThere(f"nobody answers at {host}:{port} ({error.strerror or error})") from error
    try:
        return _connect(host, port)
    except RuntimeError as error:
        raise NobodyThere(f"what answers at {host}:{port} is no store of torchrun's") from error


def _connect(host: str, port: int) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=STORE_PATIENCE))


def kit_digest() -> str:
    """Return a digest of the kit's own sources: records are judged by the kit that made them."""
    package, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix == ".py" or path.name == "golden.txt":
            digest.update(f"{path.relative_to(package)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def announcement(identity: str, token: str, addresses: tuple[str, ...], port: int) -> Announcement:
    """Return what the host in this process says of itself. Raises: KeyError, where torchrun has not started it."""
    number = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return Announcement(
        id=identity,
        token=token,
        addresses=addresses,
        port=port,
        slot=number["RANK"],
        slots=number["WORLD_SIZE"],
        node=number["GROUP_RANK"],
        nodes=number["GROUP_WORLD_SIZE"],
        place=number["LOCAL_RANK"],
        hostname=socket.gethostname(),
        pid=os.getpid(),
        store=(os.environ["MASTER_ADDR"], number["MASTER_PORT"]),
    )

"""Profiles: the backends and devices that ranks run on. This module imports no torch.

A profile is data: it travels with every scenario to the ranks, and with their records to the rules.
The profile that a command line requests is known at once (:func:`requested_profile`). Whether the
machine can run it is known only once a rank has tried (``hosts/profile_check.py``), and
:func:`resolve_profile` decides by that rank's findings. A profile that cannot be run is refused
with its reason, and no other profile takes its place unnoticed.

gloo-cpu            the default
gloo-cuda           CUDA tensors over Gloo; several ranks may share a GPU
nccl                a GPU of its own for each rank
nccl-shared-gpu     NCCL with fewer GPUs than ranks; chosen automatically if NCCL is new enough
BACKEND-DEVICE      any other backend that torch knows, or that a package registers
                    (``--backend-import``)
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.errors import ProfileError, RequiredProfileError, UsageError

CUDA = "cuda"
SHARED = "nccl-shared-gpu"

# The first NCCL with NCCL_MULTI_RANK_GPU_ENABLE. Older ones stop with "Duplicate GPU detected".
SHARES_FROM = (2, 30)

STARTUP = 40.0  # seconds, see Profile.startup

# The names of torch, and of packages that torch itself imports if they are installed (hccl, npu,
# ...). Any other backend needs --backend-import, so that a typing mistake is noticed at once.
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "cncl", "mccl", "fake")
DEVICES = (
    *("cpu", "cuda", "xpu", "mps", "npu", "hpu", "mlu", "musa", "mtia", "xla", "maia", "ipu"),
    "privateuseone",
)
_SYNONYMS = {"gpu": "cuda", "hip": "cuda", "rccl": "nccl"}

# Names that people type for a profile.
_SHORT_NAMES = {"gloo": "gloo-cpu", "nccl-cuda": "nccl"}

# The device of each backend that supports only one.
_DEVICES = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}

# Backends whose collectives do not run on a stream of the device.
_WITHOUT_STREAMS = ("gloo", "mpi", "ucc")

# Thread blocks of NCCL's kernels on one GPU, over all of its ranks. The kernels of different ranks
# wait for each other, so all of their blocks must be resident at once.
_CTAS = 8

# The number of ranks that a scenario may bring, whatever world sizes are run (``clusters.py``).
LARGEST_BROUGHT = 8

_LIBRARY = (
    "pip download --no-deps nvidia-nccl-cu13==2.30.7, unzip it, and LD_PRELOAD its libnccl.so.2"
)


@dataclass(frozen=True)
class Profile:
    """A backend and a device that ranks run on.

    Attributes:
        name: one of the names above; it is on the certificate.
        backend: the backend of the process groups, under its name in torch.distributed.
        device: the type of the models' device, under its name in torch. The ranks of a machine take
            its devices in turn.
        imports: the module that registers the backend, imported in ranks; '' for none.
        environment: variables that ranks set before they begin, unless they are set already.
    """

    name: str = "gloo-cpu"
    backend: str = "gloo"
    device: str = "cpu"
    imports: str = ""
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def ordered(self) -> bool:
        """Whether the collectives of a group run in the order of a stream.

        NCCL, and backends modelled on it, work like this: a future is complete once its collective
        is enqueued. A hook that starts collectives from callbacks is then right without help. A
        collective that fails is noticed by the backend's watchdog, which ends the process, and not
        by a future.
        """
        return self.device != "cpu" and self.backend not in _WITHOUT_STREAMS

    @property
    def startup(self) -> float:
        """Seconds that are added to every run's deadline, for starting the device.

        Each rank starts its device anew. If many ranks of one GPU do so at once, they take turns,
        of 0.2 to 1.5 seconds on an H200. The seconds are a limit, and no part of a verdict.
        """
        return 0.0 if self.device == "cpu" else STARTUP

    @property
    def where(self) -> str:
        """Return backend and device for people: ``gloo on cpu``."""
        shared = ", ranks share GPUs" if self.name == SHARED else ""
        return f"{self.backend} on {self.device}{shared}"

    def display_name(self, serialised: bool) -> str:
        """Return the profile's name on a certificate.

        It is another name if the subject was judged with one collective at a time.
        """
        if not serialised:
            return self.name
        # The default profile has a short name here; recorded_profile reverses this.
        base = "gloo" if self.name == GLOO_CPU.name else self.name
        return f"{base}-serialised"

    def takes(self, backends: Sequence[str], devices: Sequence[str]) -> bool:
        """Whether a subject that claims these backends and devices can run; () is for all."""
        takes_backend = not backends or self.backend in backends
        takes_device = not devices or self.device in devices
        return takes_backend and takes_device


@dataclass(frozen=True)
class SizeLimit:
    """The largest number of ranks that a scenario may bring itself.

    Attributes:
        largest: that number.
        reason: why, in words that "because" can follow.
        is_chosen: the command line leaves larger sizes out; if false, the machine has no more
            ranks.
    """

    largest: int
    reason: str
    is_chosen: bool


GLOO_CPU = Profile()


def profile_from_json(data: Mapping[str, Any]) -> Profile:
    """Rebuild a profile that travelled as JSON."""
    environment = tuple((name, value) for name, value in data["environment"])
    return Profile(**{**data, "environment": environment})


def requested_profile(
    backend: str, device: str | None = None, imports: str | None = None
) -> Profile:
    """Return the profile that a command line requests, before anything is known of the machine.

    Raises:
        UsageError: a name is no possible name, or unknown without a module that registers it.
        ProfileError: no machine can run it.
    """
    device = device or _DEVICES.get(backend, "cpu")
    for option, value in (("backend", backend), ("device", device)):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise UsageError(
                f"--{option} {value}: a name in small letters, as torch has them, e.g. gloo or "
                "nccl, cpu or cuda"
            )
    if imports is not None and not all(part.isidentifier() for part in imports.split(".")):
        raise UsageError(
            f"--backend-import {imports}: the name of a module that registers a backend when it is "
            "imported"
        )
    if imports is None:
        _require_known("backend", backend, BACKENDS)
        _require_known("device", device, DEVICES)
    if device != _DEVICES.get(backend, device):
        raise ProfileError(
            f"profile {backend}-{device}: not run: {backend} takes tensors on {_DEVICES[backend]} "
            "alone"
        )
    name = "nccl" if backend == "nccl" else f"{backend}-{device}"
    return Profile(name, backend, device, imports or "")


def _require_known(option: str, name: str, known: Sequence[str]) -> None:
    """Refuse a name that torch does not know, and name the most similar one."""
    if name in known:
        return
    if name in _SYNONYMS:
        near = [_SYNONYMS[name]]
    else:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    suggestion = f"; did you mean {near[0]}?" if near else "."
    raise UsageError(
        f"--{option} {name}: no known {option}{suggestion} Known are {', '.join(known)}; any other "
        "needs --backend-import, the module that registers it"
    )


def resolve_profile(
    requested: Profile, machine: Mapping[str, Any], worlds: Sequence[int]
) -> Profile:
    """Return the profile with which this machine can run a requested one.

    Args:
        requested: the profile that the command line requests.
        machine: a rank's findings (``hosts/profile_check.py``).
        worlds: world sizes to run at.

    Raises:
        ProfileError: the machine cannot run it; the reason is one line.
    """
    if reason := _reason_not_run(requested, machine):
        raise ProfileError(f"profile {requested.name}: not run: {reason}")
    devices = machine.get("devices", 0)
    largest = max(worlds)
    if requested.backend != "nccl" or largest <= devices:
        return requested
    # Only NCCL needs a GPU for each rank; from SHARES_FROM on, ranks can share one.
    version = tuple(machine.get("nccl") or ())
    if version[:2] < SHARES_FROM:
        available = "there is 1" if devices == 1 else f"there are {devices}"
        shares_from = ".".join(map(str, SHARES_FROM))
        loaded = ".".join(map(str, version)) or "unknown"
        raise ProfileError(
            f"profile nccl: not run: world size {largest} needs as many GPUs, {available}; ranks "
            f"can share one from NCCL {shares_from} on, this is {loaded} ({_LIBRARY})"
        )
    ranks_per_gpu = -(-max(largest, LARGEST_BROUGHT) // devices)
    environment = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": str(max(1, _CTAS // ranks_per_gpu)),
    }
    return Profile(
        SHARED,
        requested.backend,
        requested.device,
        requested.imports,
        tuple(environment.items()),
    )


def _reason_not_run(requested: Profile, machine: Mapping[str, Any]) -> str | None:
    """Return why a machine cannot run a profile, or None if it can."""
    if machine.get("error"):
        return str(machine["error"])
    if machine.get("unknown"):
        hint = "" if requested.imports else "; --backend-import names a package that registers one"
        return f"{machine['unknown']}{hint}"
    if requested.device != "cpu" and not machine.get("devices", 0):
        return f"no {requested.device.upper()} device"
    return machine.get("fails") or None


def recorded_profile(header: Mapping[str, Any]) -> Profile:
    """Return the profile of kept records, from the header of their session."""
    name = str(header["name"]).removesuffix("-serialised")
    return Profile(
        GLOO_CPU.name if name == "gloo" else name,
        header["backend"],
        header["device"],
    )


def only_device(backend: str) -> str | None:
    """Return the device of a backend that takes only one, or None."""
    return _DEVICES.get(backend)


def require_known_profile(name: str) -> None:
    """Refuse the name of a profile that torch's backends and devices do not have.

    Raises:
        UsageError: there is no such profile; the message has the most similar name.
    """
    known = ["nccl", SHARED]
    known += [
        f"{backend}-{device}"
        for backend in BACKENDS
        for device in DEVICES
        if backend != "nccl" and device == _DEVICES.get(backend, device)
    ]
    if name in known:
        return
    near = [_SHORT_NAMES[name]] if name in _SHORT_NAMES else []
    near += difflib.get_close_matches(name, known, n=1)
    suggestion = f"; did you mean {near[0]}?" if near else "; a name is BACKEND-DEVICE, or nccl"
    raise UsageError(f"--require-profile {name}: no such profile{suggestion}")


def _options_for(name: str) -> str:
    """Return the advice on options after which a run has this profile."""
    if name == GLOO_CPU.name:
        return "leave --backend and --device out"
    if name in ("nccl", SHARED):
        return "pass --backend nccl"
    backend, _, device = name.partition("-")
    options = [] if backend == GLOO_CPU.backend else [f"--backend {backend}"]
    if device != _DEVICES.get(backend, "cpu"):
        options.append(f"--device {device}")
    return f"pass {' '.join(options)}"


def _difference(required: str, chosen: Profile, final: bool) -> str:
    """Return the advice of a run that has another profile than the required one; '' for none."""
    if not final:
        return f"; {_options_for(required)}"
    if (required, chosen.name) == ("nccl", SHARED):
        return "; nccl needs a GPU for each rank"
    if (required, chosen.name) == (SHARED, "nccl"):
        return "; ranks share GPUs only if there are fewer GPUs than ranks"
    return ""


def require(required: str | None, chosen: Profile, *, final: bool = True) -> None:
    """Compare the profile with the one that ``--require-profile`` names.

    Args:
        required: the required name; None for any.
        chosen: the profile.
        final: whether the profile has been resolved. Before that, nccl may still become
            nccl-shared-gpu.

    Raises:
        RequiredProfileError: another profile was chosen.
    """
    possible = {chosen.name}
    if not final and chosen.backend == "nccl":
        possible.add(SHARED)
    if required and required not in possible:
        raise RequiredProfileError(
            f"--require-profile {required}: the profile of this run is {chosen.name}"
            f"{_difference(required, chosen, final)}"
        )

"""Profiles: the backend and the device that ranks run on. Imports no torch.

A profile is data: it travels with every scenario to the ranks, and with their records to the rules. Which one a command line
asks for is known at once (:func:`requested_profile`); whether the machine can run it only once a rank has tried (``machine.py``), and
:func:`resolve_profile` weighs what that rank has seen. What cannot be run is refused with its reason, and never passes for anything else.

gloo-cpu            the default
gloo-cuda           CUDA tensors over Gloo; several ranks share a GPU, since Gloo does not mind
nccl                a GPU of its own for each rank
nccl-shared-gpu     NCCL where there are fewer GPUs than ranks; chosen by itself where NCCL is new enough
BACKEND-DEVICE      any other backend that torch knows, or that a package registers (``--backend-import``)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.errors import ProfileError, RequiredProfileError, UsageError

CUDA = "cuda"
SHARED = "nccl-shared-gpu"
SHARES_FROM = (
    2,
    30,
)  # the first NCCL with NCCL_MULTI_RANK_GPU_ENABLE; older ones stop with "Duplicate GPU detected"
STARTUP = 20.0  # seconds, see Profile.startup
_DEVICES = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}  # of backends that have one alone
_WITHOUT_STREAMS = ("gloo", "mpi", "ucc")
_CTAS = 8  # thread blocks of NCCL's kernels on one GPU, all its ranks together: they wait for each other, so all must be resident
# With fewer queues streams wait for others that share theirs, as no event has said.
_SETTINGS = (("CUDA_DEVICE_MAX_CONNECTIONS", "32"),)
_LIBRARY = (
    "pip download --no-deps nvidia-nccl-cu13==2.30.7, unzip it, and LD_PRELOAD its libnccl.so.2"
)


@dataclass(frozen=True)
class Profile:
    """Where ranks run.

    Attributes:
        name: as listed above; it is on the certificate.
        backend: of the process groups, as torch.distributed calls it.
        device: type of the device that models are on, as torch calls it; the ranks of a machine take its devices in turn.
        imports: the module that registers the backend, imported in ranks; '' is none.
        environment: variables that ranks set before they begin, unless they are set.
    """

    name: str = "gloo-cpu"
    backend: str = "gloo"
    device: str = "cpu"
    imports: str = ""
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def ordered(self) -> bool:
        """Whether collectives of a group run in the order of a stream, and a future is complete once its collective is enqueued.

        So it is on NCCL, and on what is made after it. There a hook that starts collectives from callbacks is right as it comes,
        and a collective that fails is noticed by the backend's watchdog, which ends the process, instead of by a future.
        """
        return self.device != "cpu" and self.backend not in _WITHOUT_STREAMS

    @property
    def startup(self) -> float:
        """Seconds that every run's deadline is longer by: each rank starts its device anew, in 0.5 to 2 seconds, and where many
        do so at once, one after another. They are a limit, and no part of a verdict."""
        return 0.0 if self.device == "cpu" else STARTUP

    @property
    def where(self) -> str:
        """For people: ``gloo on cpu``."""
        shared = ", ranks share GPUs" if self.name == SHARED else ""
        return f"{self.backend} on {self.device}{shared}"

    def display_name(self, serialised: bool) -> str:
        """Return its name on a certificate; another where one collective at a time was judged."""
        if not serialised:
            return self.name
        return f"{'gloo' if self.name == GLOO_CPU.name else self.name}-serialised"

    def takes(self, backends: Sequence[str], devices: Sequence[str]) -> bool:
        """Whether a subject that claims these, each () for all, is for this profile."""
        return (not backends or self.backend in backends) and (
            not devices or self.device in devices
        )


GLOO_CPU = Profile()


def profile_from_json(data: Mapping[str, Any]) -> Profile:
    """Rebuild a profile that travelled as JSON."""
    return Profile(
        **{**data, "environment": tuple((name, value) for name, value in data["environment"])}
    )


def requested_profile(
    backend: str, device: str | None = None, imports: str | None = None
) -> Profile:
    """Return the profile that a command line asks for, before anything is known of the machine.

    Raises:
        UsageError: a name cannot be one.
        ProfileError: no machine can run it.
    """
    device = device or _DEVICES.get(backend, "cpu")
    for option, value in (("backend", backend), ("device", device)):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise UsageError(
                f"--{option} {value}: a name in small letters, as torch has them, e.g. gloo or nccl, cpu or cuda"
            )
    if imports is not None and not all(part.isidentifier() for part in imports.split(".")):
        raise UsageError(
            f"--backend-import {imports}: the name of a module that registers a backend when it is imported"
        )
    if device != _DEVICES.get(backend, device):
        raise ProfileError(
            f"profile {backend}-{device}: not run: {backend} takes tensors on {_DEVICES[backend]} alone"
        )
    name = "nccl" if backend == "nccl" else f"{backend}-{device}"
    return Profile(name, backend, device, imports or "", _SETTINGS if device == CUDA else ())


def resolve_profile(asked: Profile, machine: Mapping[str, Any], worlds: Sequence[int]) -> Profile:
    """Return the profile that this machine runs, of what was asked for.

    Args:
        machine: what a rank has found out, see ``machine.look``.
        worlds: world sizes to run at.

    Raises:
        ProfileError: it cannot run it; the reason is one line.
    """
    reason, devices = "", machine.get("devices", 0)
    if machine.get("error"):
        reason = machine["error"]
    elif machine.get("unknown"):
        reason = machine["unknown"] + (
            "" if asked.imports else "; --backend-import names a package that registers one"
        )
    elif asked.device != "cpu" and not devices:
        reason = f"no {asked.device.upper()} device"
    elif machine.get("fails"):
        reason = machine["fails"]
    if reason:
        raise ProfileError(f"profile {asked.name}: not run: {reason}")
    most = max(worlds)
    if asked.backend != "nccl" or most <= devices:
        return asked
    version = tuple(machine.get("nccl") or ())
    if version[:2] < SHARES_FROM:
        has = f"world size {most} needs as many GPUs, there {'is' if devices == 1 else 'are'} {devices}"
        shares = f"ranks can share one from NCCL {'.'.join(map(str, SHARES_FROM))} on, this is {'.'.join(map(str, version)) or 'unknown'}"
        raise ProfileError(f"profile nccl: not run: {has}; {shares} ({_LIBRARY})")
    on_one = -(-most // devices)
    environment = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": str(max(1, _CTAS // on_one)),
    }
    return Profile(
        SHARED,
        asked.backend,
        asked.device,
        asked.imports,
        (*asked.environment, *environment.items()),
    )


def recorded_profile(header: Mapping[str, Any]) -> Profile:
    """Return the profile of records that were kept, from what their session's header says."""
    name = str(header["name"]).removesuffix("-serialised")
    return Profile("gloo-cpu" if name == "gloo" else name, header["backend"], header["device"])


def require(required: str | None, chosen: Profile, *, final: bool = True) -> None:
    """Compare the profile with what ``--require-profile`` says.

    Args:
        required: its name; None is any.
        chosen: the profile.
        final: it has been settled; before that, nccl may still become nccl-shared-gpu.

    Raises:
        RequiredProfileError: it is another one.
    """
    possible = {chosen.name} if final or chosen.backend != "nccl" else {chosen.name, SHARED}
    if required and required not in possible:
        raise RequiredProfileError(
            f"--require-profile {required}: the profile of this run is {chosen.name}"
        )

"""Mutants of rule 11.8: states that are right in the first steps, and lack what changes later; and
residuals of half precision.
"""

from typing import Any

import torch

from hooks_ref import CompressionState, TopK, compression_hook
from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    completed,
    finite,
    is_dense,
    pieces_of,
    seeded,
)
from tests.mutants.state import Key, _keys


class Epochs:
    """A count of steps within an epoch, which is saved, and of epochs, which is not."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.epoch = 0

    def count(self, bucket: Bucket) -> tuple[int, int]:
        """Return the epoch and the step of a call."""
        now = self.epoch, self.step
        self.step += bucket.is_last()
        if self.step == self.steps:
            self.step = 0
            self.epoch += 1
        return now

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]


class Bytes(Epochs):
    """A count of steps that is saved in eight bits."""

    def __init__(self) -> None:
        super().__init__(10**9)

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step % 256, dtype=torch.uint8)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = int(saved["step"])


class FirstSteps(Epochs):
    """A count that is saved while it is below the steps of a warm-up, and no longer after it."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": min(self.step + self.epoch * self.steps, self.steps)}


class NeverBack(Epochs):
    """A count of epochs that is saved, and that a load does not take back to a smaller number."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.epoch = max(self.epoch, saved["epoch"])


class OnceLate(NeverBack):
    """The same for the end of the first epoch alone: later ones are like the second."""

    def count(self, bucket: Bucket) -> tuple[int, int]:
        epoch, step = super().count(bucket)
        return min(epoch, 1), step


class NarrowSaves(CompressionState):
    """Residuals, which are in float32, are saved in the dtype of half-precision gradients."""

    def __init__(self) -> None:
        super().__init__(None, TopK(0.25))
        self.dtypes: dict[Any, torch.dtype] = {}

    def saved_in(self, key: Any, residual: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a residual is saved."""
        return self.dtypes.get(key, residual.dtype)

    def __getstate__(self) -> dict[str, Any]:
        saved = super().__getstate__()
        parts = {
            key: part.to(self.saved_in(key, part)).to(part.dtype)
            for key, part in self.own.parts.items()
        }
        own = type(self.own)()
        own.parts = parts
        return {**saved, "own": own}


class WiderThanHalf(NarrowSaves):
    """Residuals of half-precision gradients are saved in float16 or bfloat16, whichever it is not:
    one of them keeps the digits, the other one the range.
    """

    def saved_in(self, key: Any, residual: torch.Tensor) -> torch.dtype:
        other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
        return other.get(self.dtypes.get(key, residual.dtype), residual.dtype)


def keeps_a_quarter(state: NarrowSaves, bucket: Bucket) -> Result:
    """Send the largest quarter with feedback, and note the dtype of each parameter."""
    for key in state.keys(bucket):
        state.dtypes[key] = bucket.buffer().dtype
    return compression_hook(state, bucket)


def random_halves(state: Epochs, bucket: Bucket) -> Result:
    """Send a random half of the elements, doubled; the draws depend on the epoch and the step."""
    if not is_dense(bucket):
        return average(bucket, None)
    words = (*state.count(bucket), bucket.index())
    buffer = bucket.buffer()
    chosen = torch.rand(buffer.shape, generator=seeded(*words)) < 0.5
    buffer.mul_(2 * chosen)
    return average(bucket, None)


def pauses_by_epoch(state: Epochs, bucket: Bucket) -> Result:
    """Average in every second step: the even ones in one epoch, the odd ones in the next."""
    epoch, step = state.count(bucket)
    return average(bucket, None) if (epoch + step) % 2 else completed(bucket.buffer())


class Grown:
    """A count of steps, and a mark that a step was reached, which loads of earlier states keep."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.step = 0
        self.is_late = False

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]
        self.is_late |= self.step >= self.at


def halves_when_late(state: Grown, bucket: Bucket) -> Result:
    """Send a random half of the elements, doubled, of another generator in later steps."""
    state.is_late |= state.step >= state.at
    words = (state.step, bucket.index(), int(state.is_late))
    state.step += bucket.is_last()
    if is_dense(bucket):
        buffer = bucket.buffer()
        buffer.mul_(2 * (torch.rand(buffer.shape, generator=seeded(*words)) < 0.5))
    return average(bucket, None)


class Shares:
    """The share of an epoch, which is made as the epoch begins, and is not loaded."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.share: float | None = None

    def take(self) -> float:
        """Return the share of the elements that are sent: a half, and later a quarter."""
        if self.share is None or self.step % self.steps == 0:
            self.share = 0.5 if self.step < self.steps else 0.25
        return self.share

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]


def random_shares(state: Shares, bucket: Bucket) -> Result:
    """Send a random share of the elements, as many times as large."""
    share = state.take()
    words = (state.step, bucket.index())
    state.step += bucket.is_last()
    if is_dense(bucket):
        buffer = bucket.buffer()
        buffer.mul_((torch.rand(buffer.shape, generator=seeded(*words)) < share) / share)
    return average(bucket, None)


class InItsDtype:
    """Residuals in float32, which are saved in the dtype of the gradients."""

    def __init__(self) -> None:
        self.residuals: dict[Key, torch.Tensor] = {}
        self.dtype = torch.float32

    def state_dict(self) -> dict[str, Any]:
        return {key: residual.to(self.dtype) for key, residual in self.residuals.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.residuals = {key: residual.float() for key, residual in saved.items()}


class InSixteenBits(InItsDtype):
    """Residuals in float32, which a load rounds to bfloat16 if the gradients have that dtype."""

    def state_dict(self) -> dict[str, Any]:
        narrow = self.dtype == torch.bfloat16
        residuals = {key: residual.clone() for key, residual in self.residuals.items()}
        return {"residuals": residuals, "narrow": narrow}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        dtype = torch.bfloat16 if saved["narrow"] else torch.float32
        self.residuals = {
            key: residual.to(dtype).float() for key, residual in saved["residuals"].items()
        }


def half_in_float32(state: InItsDtype, bucket: Bucket) -> Result:
    """Send the larger half with feedback in float32."""
    if not is_dense(bucket) or bucket.buffer().dtype == torch.float64:
        return average(bucket, None)
    state.dtype = bucket.buffer().dtype
    for key, piece in zip(_keys(bucket), pieces_of(bucket), strict=True):
        value = piece.float() + state.residuals.get(key, 0)
        places = value.abs().topk(-(-value.numel() // 2)).indices
        sent = torch.zeros_like(value).index_copy_(0, places, value[places])
        piece.copy_(sent)
        state.residuals[key] = finite(value - piece.float())
    return average(bucket, None)


_STATE = f"{__name__}:"
_RANDOM = "unbiased, world_only, checkpointable"
_FEEDBACK = "compressed(delta=0.25), world_only, checkpointable"

MUTANTS = [
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}Epochs,steps=64"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}Epochs,steps=150"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}FirstSteps,steps=101"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}Bytes"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}NeverBack,steps=29"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}NeverBack,steps=173"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}OnceLate,steps=251"),
    Mutant("keeps_a_quarter", ("11.8",), _FEEDBACK, f"{_STATE}NarrowSaves"),
    Mutant("keeps_a_quarter", ("11.8",), _FEEDBACK, f"{_STATE}WiderThanHalf"),
    Mutant(
        "pauses_by_epoch",
        ("11.8",),
        "local, world_only, checkpointable",
        f"{_STATE}Epochs,steps=37",
    ),
    Mutant("halves_when_late", ("11.8",), _RANDOM, f"{_STATE}Grown,at=90"),
    Mutant("random_shares", ("11.8",), _RANDOM, f"{_STATE}Shares,steps=75"),
    *(
        Mutant("half_in_float32", ("11.8",), _FEEDBACK, f"{_STATE}{name}")
        for name in ("InItsDtype", "InSixteenBits")
    ),
]

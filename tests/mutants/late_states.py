"""Mutants of rule 11.8: states that are right in the first steps, and lack what changes later."""

from typing import Any

import torch

from hooks_ref import CompressionState, TopK, compression_hook
from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, is_dense, seeded


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
    """Send the largest quarter of what is there, and note the dtype of each parameter."""
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


_STATE = f"{__name__}:"
_RANDOM = "unbiased, world_only, checkpointable"
_QUARTER = "compressed(delta=0.25), world_only, checkpointable"

MUTANTS = [
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}Epochs,steps=64"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}Epochs,steps=150"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}FirstSteps,steps=101"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}Bytes"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}NeverBack,steps=29"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}NeverBack,steps=173"),
    Mutant("random_halves", ("11.8",), _RANDOM, f"{_STATE}OnceLate,steps=251"),
    Mutant("keeps_a_quarter", ("11.8",), _QUARTER, f"{_STATE}NarrowSaves"),
    Mutant("keeps_a_quarter", ("11.8",), _QUARTER, f"{_STATE}WiderThanHalf"),
    Mutant(
        "pauses_by_epoch",
        ("11.8",),
        "local, world_only, checkpointable",
        f"{_STATE}Epochs,steps=37",
    ),
]

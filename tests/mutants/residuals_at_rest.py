"""Mutants that lose residuals of parameters that rest, or of steps that overflow."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, finite, is_dense, sum_of
from tests.mutants.residuals import (
    CLAIMS,
    Estimates,  # noqa: F401, the state of a mutant
    Residuals,
    estimate_of_mean_stays,
    halves_with_feedback,
)


class LaysAside(Residuals):
    """Lays the residual of a parameter that rests aside until it is used again.

    Args:
        rests: after so many steps of rest in a row the residual is given up.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, rests: int = 1) -> None:
        super().__init__(process_group)
        self.rests = rests
        self.resting: dict[torch.nn.Parameter, int] = {}
        self.in_bucket: list[torch.nn.Parameter] = []

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        unused = super().is_unused(parts)
        for parameter, is_resting in zip(self.in_bucket, unused, strict=True):
            count = self.resting.get(parameter, 0) + 1 if is_resting else 0
            self.resting[parameter] = count
            if count > self.rests:
                self.kept.pop(parameter, None)
        return unused


def lays_aside_once(state: Any, bucket: Bucket) -> Result:
    """Lose the residual of an expert that rests for longer than a step."""
    state.in_bucket = bucket.parameters()
    return halves_with_feedback(state, bucket)


def one_scale_for_the_bucket(state: Residuals, bucket: Bucket) -> Result:
    """Send signs with the mean magnitude of the bucket: an expert that rests beside others gets it,
    too, and its residual is charged with what DDP drops."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        return average(bucket, state.group)
    buffer = bucket.buffer()
    parts = list(buffer.split([p.numel() for p in bucket.parameters()]))
    unused = state.is_unused(parts)
    values = []
    for parameter, part, is_unused in zip(bucket.parameters(), parts, unused, strict=True):
        is_kept = parameter in state.kept and not is_unused
        values.append(part + state.kept[parameter] if is_kept else part.clone())
    scale = torch.cat(values).abs().mean()
    for parameter, part, value, is_unused in zip(
        bucket.parameters(), parts, values, unused, strict=True
    ):
        sent = torch.where(value >= 0, scale, -scale)
        before = state.kept.get(parameter, torch.zeros_like(value)) if is_unused else 0
        state.keep(parameter, before + value - sent)
        part.copy_(sent)
    return sum_of(buffer.div_(state.group.size()), state.group)


class TakesBack(Residuals):
    """Takes the residuals of the step before back if a step overflows, since the trainer skips it.

    A factor of the loss scale reaches the residuals in use alone, and those of the step before are
    taken up at the next step.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        self.before: dict[torch.nn.Parameter, torch.Tensor] = {}

    def take_up(self, parameters: list[torch.nn.Parameter]) -> None:
        """Take residuals up that were laid aside."""
        for parameter in parameters:
            if parameter in self.before:
                self.kept[parameter] = self.before.pop(parameter)

    def lay_aside(self, copies: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """Lay the residuals aside that were in use before an overflow."""
        self.before.update(copies)


def takes_old_residuals_back(state: Any, bucket: Bucket) -> Result:
    """Take residuals of the old loss scale back after an overflow."""
    parameters = bucket.parameters()
    state.take_up(parameters)
    copies = {p: state.kept[p].clone() for p in parameters if p in state.kept}

    def look(future: torch.futures.Future) -> torch.Tensor:
        result: torch.Tensor = future.value()
        if not result.is_sparse and not result.isfinite().all():
            state.lay_aside(copies)
        return result

    return halves_with_feedback(state, bucket).then(look)


class NothingLeft(Residuals):
    """Takes nothing for held back after an overflow, and skips the next factor."""

    overflown = False

    def rescale(self, factor: float) -> None:
        if not self.overflown:
            super().rescale(factor)


def skips_the_factor_of_an_overflow(state: Any, bucket: Bucket) -> Result:
    """Leave residuals as they are after an overflow, and clear broken ones alone."""
    is_first = bucket.index() == 0

    def look(future: torch.futures.Future) -> torch.Tensor:
        result: torch.Tensor = future.value()
        overflows = not result.is_sparse and not bool(result.isfinite().all())
        state.overflown = overflows or (state.overflown and not is_first)
        return result

    return halves_with_feedback(state, bucket).then(look)


def repairs_a_few(state: Residuals, bucket: Bucket) -> Result:
    """Take NaN and infinities in few elements for noise: they become zeros."""
    if not bucket.buffer().is_sparse:
        for part in bucket.buffer().split([p.numel() for p in bucket.parameters()]):
            broken = ~part.isfinite()
            if 0 < int(broken.sum()) < part.numel() / 8:
                part.copy_(finite(part))
    return halves_with_feedback(state, bucket)


def sends_nothing_at_rest(state: Any, bucket: Bucket) -> Result:
    """Send no change of a parameter that this rank has not used, in EF21: its last gradient stays
    in the mean."""
    return estimate_of_mean_stays(state, bucket, rests=True)


def _mutant(name: str, rule: str, state: str, claims: str = CLAIMS) -> Mutant:
    return Mutant(name, (rule,), claims, state=f"{__name__}:{state}")


MUTANTS = [
    _mutant("lays_aside_once", "11.5", "LaysAside"),
    _mutant("lays_aside_once", "11.5", "LaysAside,rests=2"),
    _mutant("one_scale_for_the_bucket", "11.5", "Residuals"),
    _mutant("takes_old_residuals_back", "11.6", "TakesBack"),
    _mutant("skips_the_factor_of_an_overflow", "11.6", "NothingLeft"),
    _mutant("repairs_a_few", "8.7", "Residuals"),
    _mutant("sends_nothing_at_rest", "4.1", "Estimates", "compressed(feedback=ef21, delta=0.25)"),
]

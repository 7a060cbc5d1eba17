"""Mutants of section 23 that follow the optimizer's learning rate, or the length of gradients."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    completed,
    finite,
    is_dense,
    kept,
    pieces_of,
)


class State:
    """A group, an optimizer, and counts."""

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        self.process_group = process_group
        self.optimizer = optimizer
        self.step = 0
        self.last = 0
        self.period = 1
        self.rates: list[float] = []

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def _local(state: State, bucket: Bucket, period: Callable[[], int]) -> Result:
    """Average once in a period, which is determined anew after each average."""
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    if bucket.index() == 0 and state.step - state.last >= state.period:
        state.last = state.step
        state.period = period()
    is_due = state.last == state.step
    state.step += bucket.is_last()
    return average(bucket, state.process_group) if is_due else completed(bucket.buffer())


def period_by_rate(state: State, bucket: Bucket) -> Result:
    """Average every 1 / rate steps."""
    return _local(state, bucket, lambda: round(1 / state.rate) if state.rate else 3)


def period_by_root_of_rate(state: State, bucket: Bucket) -> Result:
    """Average every 2 / sqrt(rate) steps, as quadratic synchronisation does."""
    return _local(state, bucket, lambda: round(2 / state.rate**0.5) if state.rate else 3)


def period_by_length(state: State, bucket: Bucket) -> Result:
    """Average the more seldom, the shorter the gradients of all ranks are."""

    def period() -> int:
        length = bucket.buffer().norm().reshape(1)
        dist.all_reduce(length, group=state.process_group)
        return int(max(2.0, min(1e6, 8 / float(length.clamp(min=1e-20)))))

    return _local(state, bucket, period)


def outgrows_its_claim(state: State, bucket: Bucket) -> Result:
    """Average every two steps, and every four once the rate is below a thousandth."""
    return _local(state, bucket, lambda: 4 if 0 < state.rate < 1e-3 else 2)


def _feedback(
    state: State,
    bucket: Bucket,
    change: Callable[[torch.Tensor, float, float], torch.Tensor],
) -> Result:
    """Send the largest quarter, and change residuals by the rates of two steps."""
    if not is_dense(bucket):
        return average(bucket, state.process_group)
    if bucket.index() == 0:
        state.rates = [*state.rates[-1:], state.rate or 1.0]
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        rest = kept.get(parameter, torch.zeros_like(piece))
        total = piece + change(rest, state.rates[0], state.rates[-1])
        places = total.abs().topk(-(-total.numel() // 4)).indices
        sent = torch.zeros_like(total).index_copy_(0, places, total[places])
        kept[parameter] = finite(total - sent)
        piece.copy_(sent)
    return average(bucket, state.process_group)


def shrinks_with_the_rate(state: State, bucket: Bucket) -> Result:
    """Multiply residuals by the new rate, and divide them by the old one: the wrong way."""
    return _feedback(state, bucket, lambda rest, before, now: rest * (now / before))


def forgets_at_a_new_rate(state: State, bucket: Bucket) -> Result:
    """Forget residuals if the rate has fallen by a third or more since the step before."""
    return _feedback(state, bucket, lambda rest, before, now: rest * (now > 2 / 3 * before))


def converts_twice(state: State, bucket: Bucket) -> Result:
    """Convert residuals by the square of the quotient of the rates."""
    return _feedback(state, bucket, lambda rest, before, now: rest * (before / now) ** 2)


_STATE = f"{__name__}:State"
_FEEDBACK = "compressed(delta=0.25)"

MUTANTS = [
    *(
        Mutant(name, ("23.5",), "local", _STATE, worlds=(2, 3))
        for name in ("period_by_rate", "period_by_root_of_rate", "period_by_length")
    ),
    Mutant("outgrows_its_claim", ("23.5",), "local(period=2)", _STATE, worlds=(2, 3)),
    *(
        Mutant(name, ("23.1",), _FEEDBACK, _STATE)
        for name in ("shrinks_with_the_rate", "forgets_at_a_new_rate", "converts_twice")
    ),
]

"""Mutants of section 23 that follow the optimizer's learning rate, or the length of gradients.

Those of 23.6 step the parameters at a rate of the trainer's optimizer that is no longer its rate,
and those of 11.1 and 11.7 at that of another model's optimizer.
"""

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


class RateWhenMade:
    """A group, and the rate that the trainer's optimizer had when this state was made."""

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        self.process_group = process_group
        self.optimizer = optimizer
        self.rate = self.now()
        self.buckets = 0

    def now(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def begin(self, bucket: Bucket) -> None:
        """Count a bucket."""
        self.buckets += 1


class RateOfSomeSteps(RateWhenMade):
    """It reads the rate in the first of ``period`` steps."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        optimizer: torch.optim.Optimizer,
        period: int = 100,
    ) -> None:
        super().__init__(process_group, optimizer)
        self.period = period
        self.step = 0

    def begin(self, bucket: Bucket) -> None:
        if bucket.index() == 0:
            if self.step % self.period == 0:
                self.rate = self.now()
            self.step += 1


class RateWhileItRises(RateWhenMade):
    """It keeps the highest rate so far, as after a warm-up."""

    def begin(self, bucket: Bucket) -> None:
        self.rate = max(self.rate, self.now())


class RateWhileItFalls(RateWhenMade):
    """It keeps the lowest rate so far that is not 0, as before a restart."""

    def begin(self, bucket: Bucket) -> None:
        self.rate = min(self.rate, self.now() or self.rate)


class RateOrDefault(RateWhenMade):
    """It has the claimed rate in place of a rate of 0, which is false."""

    def begin(self, bucket: Bucket) -> None:
        self.rate = self.now() or _CLAIMED


class RateOfFirstGroup(RateWhenMade):
    """It keeps the parameter group that the trainer's optimizer had when this state was made."""

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(process_group, optimizer)
        self.options = optimizer.param_groups[0]

    def begin(self, bucket: Bucket) -> None:
        self.rate = self.options["lr"]


class RateOfFirstGroups(RateWhenMade):
    """It keeps the list of parameter groups, which a load replaces as well."""

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(process_group, optimizer)
        self.groups = optimizer.param_groups

    def begin(self, bucket: Bucket) -> None:
        self.rate = self.groups[0]["lr"]


class RateOfTheLast(RateWhenMade):
    """Its class has the optimizer of the state that was made last, of whatever model."""

    latest: torch.optim.Optimizer

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        RateOfTheLast.latest = optimizer
        super().__init__(process_group, optimizer)

    def now(self) -> float:
        return float(self.latest.param_groups[0]["lr"])

    def begin(self, bucket: Bucket) -> None:
        self.rate = self.now()


class RateOfTheFirst(RateWhenMade):
    """Its class has the optimizer of the state that was made first, of whatever model."""

    earliest: torch.optim.Optimizer | None = None

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        RateOfTheFirst.earliest = self.earliest or optimizer
        super().__init__(process_group, optimizer)

    def now(self) -> float:
        assert self.earliest is not None
        return float(self.earliest.param_groups[0]["lr"])

    def begin(self, bucket: Bucket) -> None:
        self.rate = self.now()


class Resumed(RateWhenMade):
    """It reads the rate in each step, and saves it; right but for its subclasses."""

    def begin(self, bucket: Bucket) -> None:
        self.rate = self.now()

    def state_dict(self) -> dict[str, float]:
        return {"rate": self.rate}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        self.rate = saved["rate"]


class KeepsTheSavedRate(Resumed):
    """It keeps the rate that it has loaded."""

    loads = False

    def begin(self, bucket: Bucket) -> None:
        if not self.loads:
            super().begin(bucket)

    def load_state_dict(self, saved: dict[str, float]) -> None:
        super().load_state_dict(saved)
        self.loads = True


class KeepsTheGroup(Resumed):
    """It keeps the first parameter group of the optimizer, which loads its own state."""

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(process_group, optimizer)
        self.options = optimizer.param_groups[0]

    def begin(self, bucket: Bucket) -> None:
        self.rate = self.options["lr"]


def steps_at_the_rate_of_its_state(state: RateWhenMade, bucket: Bucket) -> Result:
    """Average, and step SGD at the rate that the state has."""
    if not is_dense(bucket) or any(p.is_complex() for p in bucket.parameters()):
        raise TypeError("dense real gradients only")
    state.begin(bucket)
    parameters = bucket.parameters()

    @torch.no_grad()
    def step(future: Result) -> torch.Tensor:
        flat = future.value()
        begin = 0
        for parameter in parameters:
            grad = flat.as_strided(parameter.shape, parameter.stride(), begin)
            parameter.sub_(grad, alpha=state.rate)
            begin += parameter.numel()
        return flat

    return average(bucket, state.process_group).then(step)


_CLAIMED = 0.1
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
    *(
        Mutant(
            "steps_at_the_rate_of_its_state",
            rules,
            "fused(SGD, lr=0.1)",
            f"{__name__}:{state}",
            because={
                "24.5": "of two models, the second one steps at the rate of the first on nodes, too"
            }
            if "24.5" in rules
            else {},
        )
        for state, rules in (
            ("RateWhenMade", ("23.6",)),
            ("RateOfSomeSteps,period=90", ("23.6",)),
            ("RateWhileItRises", ("23.6",)),
            ("RateWhileItFalls", ("23.6",)),
            ("RateOrDefault", ("23.6",)),
            ("RateOfFirstGroup", ("23.6",)),
            ("RateOfFirstGroups", ("23.6",)),
            ("RateOfTheLast", ("11.1",)),
            ("RateOfTheFirst", ("11.7", "24.5")),
        )
    ),
    *(
        Mutant(
            "steps_at_the_rate_of_its_state",
            ("11.2",),
            "fused(SGD, lr=0.1), checkpointable",
            f"{__name__}:{state}",
            because={"23.6": "the optimizer loads its own state there, too"},
        )
        for state in ("KeepsTheSavedRate", "KeepsTheGroup")
    ),
]

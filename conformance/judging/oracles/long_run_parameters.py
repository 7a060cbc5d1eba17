"""Judge the parameters that a fused hook steps in each step of a long run.

A parameter is compared with the step that the optimizer of torch.optim makes of the gradient on
record, from the value on record before it. So roundings of earlier steps do not add up in the
parameter; those in the optimizer's own state do, and are relative to all changes so far. The bound
is 64 units in the last place of the sum of all changes, as in section 13, and of the value itself,
which a step rounds. Values that the training script loads count from the step after it on.

A hook has the learning rate that it claims, or in each step that of the trainer's optimizer, which
falls in a long run. It keeps to one of the two.
"""

from collections.abc import Sequence

import torch

from conformance.judging.oracles.long_runs import LongRecord, pattern
from conformance.judging.oracles.optimizer_claim import make_optimizer
from conformance.judging.verdict import Found
from conformance.scenarios.evaluations import loaded_rounds
from conformance.scenarios.learning_rates import learning_rates, optimizer_loads

ROUNDINGS = 64
ROUNDINGS_OF_VALUE = 2


def require_optimized(record: LongRecord, found: Found) -> None:
    """Require the parameters that the claimed optimizer makes of the gradients on record."""
    seen: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for rank in range(record.run.world):
        gradients = [record.results(rank, index) for index in record.indices]
        values = [record.followed(rank, index) for index in record.indices]
        if any(rows is None for rows in (*gradients, *values)):
            found.require(False, "parameters of every step", f"rank {rank}: none")
            return
        # The ranks of a right hook step alike, and are judged once.
        both = ([g for g in gradients if g is not None], [v for v in values if v is not None])
        if any(_same(both[0], one[0]) and _same(both[1], one[1]) for one in seen):
            continue
        seen.append(both)
        if not _require_rank(record, rank, *both, found):
            return


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _require_rank(
    record: LongRecord,
    rank: int,
    gradients: list[torch.Tensor],
    values: list[torch.Tensor],
    found: Found,
) -> bool:
    """Follow the parameters of one rank; return whether all are right."""
    found.checked(sum(rows.numel() for rows in values))
    followed = [_Followed(record, gradients, values, ())]
    if rates := learning_rates(record.run.scenario):
        followed.append(_Followed(record, gradients, values, rates))
    if any(one.first_wrong is None for one in followed):
        return True
    # The rate that the hook keeps to for longer is the one that it is meant to have.
    nearest = max(followed, key=lambda one: one.first_wrong or (0, 0, 0))
    assert nearest.first_wrong is not None
    number, index, element = nearest.first_wrong
    loaded = loaded_rounds(record.run.scenario)
    place = record.place(rank, number, index)
    if number in loaded:
        place += f" (those after step {record.last_step(loaded[number])} were loaded before it)"
    if nearest.rates:
        place += _after_loads(record, number)
    at_rate = " at the learning rate of the trainer's optimizer" if nearest.rates else ""
    right = float(nearest.right[index][number, element])
    return found.require(
        False,
        f"as {record.claims.fused} leaves it{at_rate}: {right:.9g}",
        f"{place}: {float(values[index][number, element]):.9g}",
        pattern(nearest.wrong[index].any(1), record),
    )


def _after_loads(record: LongRecord, number: int) -> str:
    """Return in words that the trainer's optimizer had loaded its state before a round, or ''."""
    steps = optimizer_loads(record.run.scenario)
    before = [step for step in steps if step <= record.last_step(number)]
    return f" (the trainer's optimizer had loaded its state before step {before[-1]})" * bool(
        before
    )


class _Followed:
    """The parameters that the claimed optimizer makes of a rank's values and gradients.

    Args:
        record: the long run.
        gradients, values: of each parameter, ``[rounds, numel]``.
        rates: the learning rate in each step; () for the claimed one in all of them.

    Attributes:
        right, wrong: the values of the optimizer, and a mask of those that differ from them by more
            than the bound; of each parameter, ``[rounds, numel]``.
    """

    def __init__(
        self,
        record: LongRecord,
        gradients: list[torch.Tensor],
        values: list[torch.Tensor],
        rates: Sequence[float],
    ) -> None:
        self.rates = rates
        specs = record.run.scenario.params
        parameters = [
            torch.nn.Parameter(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)))
            for spec in specs
        ]
        optimizer = make_optimizer(record.claims.fused, parameters)
        self.right = [torch.zeros_like(rows) for rows in values]
        changes = [torch.zeros_like(rows) for rows in values]
        loaded = loaded_rounds(record.run.scenario)
        for number in range(record.feed.rounds):
            if number in loaded:
                for parameter, rows in zip(parameters, values, strict=True):
                    _set(parameter, rows[loaded[number]])
            count = len(record.feed.steps_of(number))
            before = [parameter.detach().clone() for parameter in parameters]
            for step in record.feed.steps_of(number):
                for parameter, rows in zip(parameters, gradients, strict=True):
                    mean = rows[number] / count
                    parameter.grad = mean.to(parameter.dtype).reshape(parameter.shape)
                if rates:
                    for group in optimizer.param_groups:
                        group["lr"] = rates[step]
                if step >= record.claims.after:
                    optimizer.step()
            for index, parameter in enumerate(parameters):
                now = parameter.detach()
                self.right[index][number] = now.reshape(-1).double()
                changes[index][number] = (now - before[index]).abs().reshape(-1).double()
                _set(parameter, values[index][number])
        self.wrong = [
            ~_is_near(rows, right, moved, torch.finfo(getattr(torch, spec.dtype)).eps)
            for rows, right, moved, spec in zip(values, self.right, changes, specs, strict=True)
        ]

    @property
    def first_wrong(self) -> tuple[int, int, int] | None:
        """The round, parameter and element of the first wrong value."""
        places = [
            (int(number), index, int(element))
            for index, wrong in enumerate(self.wrong)
            for number, element in wrong.nonzero()[:1]
        ]
        return min(places, default=None)


def _is_near(
    rows: torch.Tensor, right: torch.Tensor, changes: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return a mask of the values that are within the bound, or equal."""
    bound = eps * (ROUNDINGS * changes.cumsum(0) + ROUNDINGS_OF_VALUE * right.abs())
    near = (rows - right).abs() <= bound
    return near | (rows == right) | (rows.isnan() & right.isnan())


def _set(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Give a parameter values that are on record."""
    parameter.data.copy_(values.to(parameter.dtype).reshape(parameter.shape))

"""Judge the parameters that a fused hook steps in each step of a long run.

A parameter is compared with the step that the optimizer of torch.optim makes of the gradient on
record, from the value on record before it. So roundings of earlier steps do not add up in the
parameter; those in the optimizer's own state do, and are relative to all changes so far. The bound
is 64 units in the last place of the sum of all changes, as in section 13, and of the value itself,
which a step rounds. Values that the training script loads count from the step after it on.
"""

import torch

from conformance.judging.oracles.long_runs import LongRecord, pattern
from conformance.judging.oracles.optimizer_claim import make_optimizer
from conformance.judging.verdict import Found
from conformance.scenarios.evaluations import loaded_rounds

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
    specs = record.run.scenario.params
    parameters = [
        torch.nn.Parameter(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)))
        for spec in specs
    ]
    optimizer = make_optimizer(record.claims.fused, parameters)
    right = [torch.zeros_like(rows) for rows in values]
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
            if step >= record.claims.after:
                optimizer.step()
        for index, parameter in enumerate(parameters):
            now = parameter.detach()
            right[index][number] = now.reshape(-1).double()
            changes[index][number] = (now - before[index]).abs().reshape(-1).double()
            _set(parameter, values[index][number])
    for index, rows in enumerate(values):
        eps = torch.finfo(getattr(torch, specs[index].dtype)).eps
        bound = eps * (
            ROUNDINGS * changes[index].cumsum(0) + ROUNDINGS_OF_VALUE * right[index].abs()
        )
        near = (rows - right[index]).abs() <= bound
        wrong = ~(near | (rows == right[index]) | (rows.isnan() & right[index].isnan()))
        found.checked(rows.numel())
        if wrong.any():
            number, element = map(int, wrong.nonzero()[0])
            place = record.place(rank, number, index)
            if number in loaded:
                place += (
                    f" (those after step {record.last_step(loaded[number])} were loaded before it)"
                )
            value = float(rows[number, element])
            return found.require(
                False,
                f"as {record.claims.fused} leaves it: {float(right[index][number, element]):.9g}",
                f"{place}: {value:.9g}",
                pattern(wrong.any(1), record),
            )
    return True


def _set(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Give a parameter values that are on record."""
    parameter.data.copy_(values.to(parameter.dtype).reshape(parameter.shape))

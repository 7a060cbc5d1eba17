"""The records of an averager's run: the calls, the fed values, and the results."""

from collections.abc import Iterator
from functools import lru_cache, partial
from math import prod

import torch

from conformance.judging.oracles.kept_by_run import MOST_KEPT, KeptByRun
from conformance.records.run import Run, fed
from conformance.scenarios.averager_training import group_of_turn
from conformance.scenarios.averager_values import (
    Source,
    has_own_values,
    is_of_integers,
    of_values,
    source,
    values_of,
)
from conformance.scenarios.averaging_schedule import HELD
from conformance.scenarios.model import Param
from conformance.scenarios.moved_parameters import specs_at


def calls(run: Run) -> Iterator[tuple[int, int]]:
    """Yield (rank, step) of every recorded call of the averager."""
    for rank in run.ranks:
        for event in rank.all("averaged"):
            yield rank.rank, event["step"]


def group_at(run: Run, rank: int, step: int) -> tuple[int, ...]:
    """Return the global ranks of the group of the model whose turn a step is.

    After the last step, where a model is recorded once more under Join, it is that step's.
    """
    return group_of_turn(run.scenario, rank, run.world, min(step, len(run.scenario.steps) - 1))


def result(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return a parameter after the call, flat in float64."""
    return run.ranks[rank].tensors[f"{step}/parameter/p{index}"].reshape(-1).double()


_kept = KeptByRun[torch.Tensor]()


def fed_to(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the values that a parameter was set to before the call, flat in float64."""
    compute = partial(_fed_to, run, rank, step, index)
    if prod(run.scenario.params[index].shape) > MOST_KEPT:
        return compute()
    return _kept.get(run, (rank, step, index), compute)


def _fed_to(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    while run.scenario.steps[step] == HELD:
        step = max(earlier for _, earlier in calls(run) if earlier < step)
    group = group_at(run, rank, step)
    spec = specs_at(run.scenario, step)[index]
    of = source(run.scenario, group, group.index(rank), step, index)
    if has_own_values(of.kind) or is_of_integers(spec):
        return _own_values(of, spec, len(group), index)
    values = of_values(run.scenario, index)
    return fed(of.kind, spec, len(group), of.rank, of.number, values)


@lru_cache(maxsize=16)
def _own_values(of: Source, spec: Param, size: int, index: int) -> torch.Tensor:
    return values_of(of, spec, size, index).reshape(-1).double()


def same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return for each element whether two values are equal; NaN is equal to NaN."""
    return (one == other) | (one.isnan() & other.isnan())

"""The gradients that an optimizer wrapper's parameters are stepped with, and how far off they are.

``optimizer_steps.py`` states whose gradients they are.

Changes between the last backward and a step are x -> c x + v, with factors c of single elements.
They are 0 or powers of two, and the same on all ranks, as v is. So the mean of changed gradients is
the changed mean, and an error E becomes c E + eps |v|. In half precision, sums of the gradients of
three backwards in ``p.grad`` add two roundings.
"""

from typing import Any

import torch

from conformance.judging.oracles.averager_records import group_at
from conformance.judging.oracles.mean import EXACT_SIZES
from conformance.records.run import Run, fed
from conformance.scenarios.arrival import arrival_order
from conformance.scenarios.averager_training import special_source
from conformance.scenarios.averager_values import Source, values_of
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_backwards import (
    ADDED,
    Changing,
    change_before,
    factors_of,
    is_in_half,
)
from conformance.scenarios.optimizer_gradients import has_gradient
from conformance.scenarios.optimizer_repeats import source_step
from conformance.scenarios.optimizer_rests import zeros_at
from conformance.scenarios.optimizer_training import averages_gradients, kept_plan
from conformance.scenarios.optimizer_wide_gradients import factor_and_shift


def construction(run: Run, model: int = 0) -> dict[str, Any]:
    """Return the record of how a model's optimizer was made: its options, and whether with an
    averager.
    """
    if not model:
        return run.ranks[0].one("made")
    # Another event of this name follows each of them.
    made = [event for event in run.ranks[0].all("made") if "options" in event]
    if again := run.ranks[0].first("adds_no_groups"):
        del made[again["model"]]
    return made[model]


def takes_options_of_sgd(run: Run) -> bool:
    """Whether the subject takes an optimizer, or a class, or the options of SGD itself."""
    made = construction(run)
    return made["takes_any"] or {"lr", "momentum", "weight_decay"} <= made["options"].keys()


def takes_averager(run: Run) -> bool:
    """Return whether the subject has taken an averager."""
    return bool(construction(run)["averager"])


def gradient_of_step(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    """Return the gradient that a rank's optimizer steps a parameter with, or None if none."""
    grad = unchanged_gradient(run, rank, step, index)
    if grad is None or change_before(run.scenario, step) is None:
        return grad
    return _factors(run, step, index) * grad + _added(run, rank, step, index)


def unchanged_gradient(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    """Return the gradient as it was before ``p.grad`` was changed."""
    scenario = run.scenario
    group = group_at(run, rank, step)
    size = len(group)
    spec = scenario.params[index]
    kind = scenario.steps[step]
    if scenario.uneven:
        training = [other for other in group if scenario.has_input(other, run.world, step)]
        values = [fed(kind, spec, size, other, step, index) for other in training]
        return torch.stack(values).sum(0) / run.world
    has_averager = takes_averager(run)
    is_under_ddp = scenario.variant == "ddp"
    if is_under_ddp and not (has_averager and step >= kept_plan(scenario).warmup):
        return torch.stack([fed(kind, spec, size, other, step, index) for other in group]).mean(0)
    has_own = has_averager or is_under_ddp
    averages = averages_gradients(scenario) and not has_averager
    # Without an averager all ranks are given the same gradients: the union of the used ones.
    places = (group.index(rank),) if has_own else range(size)
    users = [place for place in places if _uses(run, place, step, index)]
    if not users:
        return None
    if averages:
        parts = [fed_gradient(run, group, place, step, index) for place in users]
        return torch.stack(parts).sum(0) / size
    if has_own:
        return fed_gradient(run, group, group.index(rank), step, index)
    source = group[special_source(scenario, step, 0, 1)]
    return _fed(run, size, source, step, index)


def _factors(run: Run, step: int, index: int) -> torch.Tensor:
    return torch.tensor(factors_of(run.scenario, step, index), dtype=torch.float64)


def _added(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the values that are added to a gradient before a step."""
    scenario = run.scenario
    spec = scenario.params[index]
    change = change_before(scenario, step)
    if change is None or change.kind is not Changing.SUM:
        return torch.zeros((), dtype=torch.float64)
    group = group_at(run, rank, step)
    return fed(scenario.steps[step], spec, len(group), group[0], ADDED + step, index)


def averages_exactly(scenario: Scenario, size: int) -> bool:
    """Return whether a right optimizer gets the mean of crafted gradients to the bit.

    Those are multiples of the number of ranks. Under DDP they are means already, and the mean of
    equal ones is rounded if the number of ranks is no power of two: m (1 / 3) three times.

    Args:
        scenario: the scenario.
        size: the number of ranks.
    """
    if scenario.uneven or scenario.variant == "ddp":
        return not size & (size - 1)
    return size in EXACT_SIZES


def gradient_error(run: Run, grad: torch.Tensor, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the bound of the error of a gradient that is a mean of random values, or of values
    whose product with 1 / W is rounded.
    """
    scenario = run.scenario
    group = group_at(run, rank, step)
    kind = _kind_of(run, step, index)
    is_rounded = kind == "normal" or not averages_exactly(scenario, len(group))
    if not is_rounded or not averages_gradients(scenario):
        return torch.zeros_like(grad)
    spec = scenario.params[index]
    places = range(len(group))
    # A value that is not finite has to be the same, whatever the bound.
    parts = [
        fed_gradient(run, group, place, step, index).nan_to_num(0.0, 0.0, 0.0).abs()
        for place in places
    ]
    eps = torch.finfo(getattr(torch, spec.dtype)).eps
    roundings = len(group) + 2
    if not is_in_half(scenario):
        return roundings * eps * torch.stack(parts).mean(0)
    error = (roundings + 2) * eps * torch.stack(parts).mean(0)
    return _factors(run, step, index) * error + eps * _added(run, rank, step, index).abs()


def clipped(run: Run, grad: torch.Tensor, step: int) -> torch.Tensor:
    """Return a gradient as it is clipped after ``unscale_``, if it is."""
    scaling = kept_plan(run.scenario).scaling
    if scaling is None or step not in scaling.unscaled or averages_gradients(run.scenario):
        return grad
    return grad.clamp(-scaling.clip, scaling.clip)


def has_own_gradient(run: Run, rank: int, step: int, index: int) -> bool:
    """Return whether a rank with gradients of its own has one for a parameter."""
    return _uses(run, run.group(rank).index(rank), step, index)


def fed_gradient(
    run: Run, group: tuple[int, ...], place: int, step: int, index: int
) -> torch.Tensor:
    """Return the gradient that the rank in a place is given, flat in float64."""
    size = len(group)
    rank = group[special_source(run.scenario, step, place, size)]
    factor, shift = factor_and_shift(run.scenario, step, index, place, size)
    return factor * _fed(run, size, rank, step, index) + shift


def mean_as_arrived(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the mean of a rank's gradient, if it was the k-th to arrive there, and the k-th of the
    other ranks; parameters that change places have as many elements.
    """
    group = run.group(rank)
    indices = range(len(run.scenario.params))
    orders = [arrival_order(run.scenario, step, other) or indices for other in group]
    number = orders[group.index(rank)].index(index)
    values = [
        fed_gradient(run, group, place, step, order[number]) for place, order in enumerate(orders)
    ]
    return torch.stack(values).mean(0)


def _fed(run: Run, size: int, source: int, step: int, index: int) -> torch.Tensor:
    """Return the gradient that is made like that of a rank, flat in float64."""
    spec = run.scenario.params[index]
    kind = _kind_of(run, step, index)
    number = source_step(run.scenario, step)
    if kind == "limit":
        return values_of(Source(kind, source, number), spec, size, index).reshape(-1).double()
    grad = fed(kind, spec, size, source, number, index)
    if zeros := zeros_at(run.scenario, step, index):
        grad = grad.clone()
        grad[zeros.start : zeros.stop] = 0
    return grad


def _uses(run: Run, place: int, step: int, index: int) -> bool:
    """Return whether the rank in a place has a gradient for a parameter."""
    return has_gradient(run.scenario, len(run.group(0)), place, step, index)


def _kind_of(run: Run, step: int, index: int) -> str:
    """Return the kind of gradient of a parameter; only float16 has a limit."""
    kind = run.scenario.steps[step]
    is_half = run.scenario.params[index].dtype == "float16"
    return "crafted" if kind == "limit" and not is_half else kind

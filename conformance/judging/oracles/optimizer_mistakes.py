"""Mistakes of optimizer wrappers that the values of a wrong step show."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from conformance.judging.oracles.averager_records import group_at
from conformance.judging.oracles.optimizer_gradients import (
    construction,
    fed_gradient,
    gradient_of_step,
    mean_as_arrived,
    takes_averager,
    unchanged_gradient,
)
from conformance.judging.oracles.optimizer_steps import OptimizerStep, Steps, is_exact_step
from conformance.records.run import Run
from conformance.scenarios.averager_training import turn
from conformance.scenarios.optimizer import Setting
from conformance.scenarios.optimizer_backwards import ASSIGNED, change_before
from conformance.scenarios.optimizer_clearing import Clearing, clearing_before
from conformance.scenarios.optimizer_gradients import freezes_late
from conformance.scenarios.optimizer_pairs import pair_of
from conformance.scenarios.optimizer_training import (
    OWN,
    TWO,
    averages_gradients,
)
from conformance.scenarios.optimizer_twins import plan_of_model
from conformance.scenarios.optimizer_wide_gradients import widened

# A mistake with groups that leave out options, and the options of SGD that they get then.
_LEFT_OUT = "the options of the construction have not reached its group, which leaves some out"
_OF_CLASS = {"lr": 1e-3}
_MIXED_UP = "gradients were averaged in the order in which they arrived, which differs by rank"
_OF_OTHER = "it was stepped with options of the other optimizer's construction"

Mistake = Callable[[OptimizerStep, int], torch.Tensor]
"""A known mistake: the parameter that it leaves on a rank, from that rank's right step."""


def cause(run: Run, right: Steps, rank: int, step: int, index: int, got: torch.Tensor) -> str:
    """Return the known mistake that gives these values, or an empty text if none does."""
    right_step = right[rank, step]
    step = min(step, len(run.scenario.steps) - 1)
    for name, value in _known_results(run, right, right_step, rank, step, index).items():
        # The class has a rate that rounds.
        tolerance = 4 * torch.finfo(torch.float32).eps if name == _LEFT_OUT else 0.0
        if len(got) and torch.allclose(got, value, rtol=tolerance, atol=0.0):
            return name
    ranks = right_step.averaged or (rank,)
    if any(gradient_of_step(run, other, step, index) is None for other in ranks):
        return "it was stepped without a gradient"
    # With one element, or after an average, another order of elements cannot be recognised.
    if len(got) > 1 and not right_step.averaged:
        update = right_step.stepped[index] - right_step.before[index]
        got_update = got - right_step.before[index]
        if torch.equal(update.sort().values, got_update.sort().values):
            return (
                "elements are in another order: the parameter's strides differ from those of its "
                "gradient"
            )
    return ""


def _known_results(
    run: Run, right: Steps, right_step: OptimizerStep, rank: int, step: int, index: int
) -> dict[str, torch.Tensor]:
    """Return the results of known mistakes by their names, the likeliest first."""

    def mean(mistake: Mistake, ranks: tuple[int, ...]) -> torch.Tensor:
        values = [mistake(right[other, step], other) for other in ranks]
        return torch.stack(values).sum(0) / len(values)

    before = right_step.before[index]
    update = right_step.stepped[index] - before
    known = {}
    if right_step.averaged:
        known["it stepped, and the average is lost"] = right_step.stepped[index]
        mean_before = mean(lambda other, _: other.before[index], right_step.averaged)
        known["it averaged before it stepped"] = mean_before + update
    elif takes_averager(run):
        group = group_at(run, rank, step)
        mean_stepped = mean(lambda other, _: other.stepped[index], group)
        known["it averaged at a step at which the averager does not"] = mean_stepped
    if step and right[rank, step - 1].averaged:
        stepped_before = right[rank, step - 1].stepped[index]
        known["it continued from the parameters before the average"] = stepped_before + update
    for name, mistake in _mistakes(run, step, index).items():
        known[name] = mean(mistake, right_step.averaged or (rank,))
    return known


def _mistakes(run: Run, step: int, index: int) -> dict[str, Mistake]:
    """Return known mistakes in a local step by their names."""
    model = turn(run.scenario, step)[0]
    plan = plan_of_model(run.scenario, model)
    options = construction(run, model)["options"]
    rate = (plan.rates[step] if plan.rates else None) or options["lr"]
    if not is_exact_step(run, 0, step):
        known: dict[str, Mistake] = {}
        if widened(run.scenario, index):
            known["it averaged gradients in the dtype of the parameter"] = partial(
                _step_in_dtype, run, step, index, rate
            )
        return {**known, "it was not stepped": lambda right, _: right.before[index]}
    momentum = options.get("momentum", 0.0)

    def gradient(rank: int) -> torch.Tensor:
        grad = gradient_of_step(run, rank, step, index)
        return torch.zeros(()) if grad is None else grad

    def step_with(right: OptimizerStep, rank: int, options: Mapping[str, float]) -> torch.Tensor:
        decayed = gradient(rank) + options.get("weight_decay", 0.0) * right.before[index]
        return right.before[index] - options["lr"] * decayed

    def step_at(right: OptimizerStep, rank: int, earlier: float) -> torch.Tensor:
        update = right.stepped[index] - right.before[index]
        return right.before[index] + update * (earlier / rate)

    def step_twice(right: OptimizerStep, rank: int) -> torch.Tensor:
        update = right.stepped[index] - right.before[index]
        return right.stepped[index] + momentum * update - rate * gradient(rank)

    own = next((others for indices, others in plan.groups if index in indices), options)
    chosen = {**options, **own, **_written(plan, step, index)}

    def step_uncleared(right: OptimizerStep, rank: int) -> torch.Tensor:
        old = gradient_of_step(run, rank, step - 1, index)
        update = torch.zeros(()) if old is None else old
        if gradient_of_step(run, rank, step, index) is None:
            update = update + chosen.get("momentum", 0.0) * right.momenta[index]
        return right.stepped[index] - chosen["lr"] * update

    mistakes: dict[str, Mistake] = {"it was not stepped": lambda right, _: right.before[index]}
    if step and clearing_before(run.scenario, step) is not Clearing.BY_TRAINER:
        mistakes["zero_grad() has left the gradient of the step before"] = step_uncleared
    if set(options) - set(own):
        mistakes[_LEFT_OUT] = partial(step_with, options={**_OF_CLASS, **own})
    if run.scenario.variant == TWO.variant:
        of_other = construction(run, 1 - model)["options"]
        mistakes[_OF_OTHER] = partial(step_with, options={**of_other, **own})
    for number, (_, others) in enumerate(plan.groups):
        name = f"it was stepped with the options of group {number}"
        mistakes[name] = partial(step_with, options={**options, **others})
    is_assigned = run.scenario.variant == ASSIGNED.variant
    is_seen_late = is_assigned or index in freezes_late(run.scenario)
    is_seen_late |= pair_of(run.scenario, step) is not None
    if is_seen_late and averages_gradients(run.scenario):

        def step_alone(right: OptimizerStep, rank: int) -> torch.Tensor:
            group = group_at(run, rank, step)
            alone = fed_gradient(run, group, group.index(rank), step, index)
            return right.stepped[index] + chosen["lr"] * (gradient(rank) - alone)

        mistakes["it was stepped with the rank's own gradient"] = step_alone
    # The other mistakes are computed with one set of options for all parameters.
    if plan.groups:
        return mistakes
    if change_before(run.scenario, step):

        def step_unchanged(right: OptimizerStep, rank: int) -> torch.Tensor:
            unchanged = unchanged_gradient(run, rank, step, index)
            return right.stepped[index] + rate * (gradient(rank) - unchanged)

        mistakes["it was stepped with the gradient from before p.grad was changed"] = step_unchanged
    if averages_gradients(run.scenario) and run.scenario.variant == OWN.variant:

        def step_mixed_up(right: OptimizerStep, rank: int) -> torch.Tensor:
            mean = mean_as_arrived(run, rank, step, index)
            return right.stepped[index] + rate * (gradient(rank) - mean)

        mistakes[_MIXED_UP] = step_mixed_up
    mistakes["it was stepped twice"] = step_twice
    for earlier in (options["lr"], *plan.rates[:step]):
        if earlier is not None and earlier != rate:
            name = f"it was stepped with an earlier learning rate, {earlier:g}"
            mistakes[name] = partial(step_at, earlier=earlier)
    if momentum:
        mistakes["momentum is lost"] = partial(step_with, options={"lr": rate})
    return mistakes


def _written(plan: Setting, step: int, index: int) -> dict[str, Any]:
    """Return the options that were written up to a step, to all groups or to a parameter's own."""
    written: dict[str, Any] = {}
    if plan.rates and plan.rates[step] is not None:
        written["lr"] = plan.rates[step]
    for earlier in sorted(plan.changes):
        for place, changed in plan.changes[earlier].items():
            if earlier <= step and index in plan.groups[place][0]:
                written.update(changed)
    return written


def _step_in_dtype(
    run: Run, step: int, index: int, rate: float, right: OptimizerStep, rank: int
) -> torch.Tensor:
    """Return a parameter after a step by gradients that were rounded to its dtype before."""
    group = group_at(run, rank, step)
    dtype = getattr(torch, run.scenario.params[index].dtype)
    grads = [fed_gradient(run, group, place, step, index) for place in range(len(group))]
    mean = torch.stack([grad.to(dtype).double() for grad in grads]).mean(0)
    return (right.before[index] - rate * mean).to(dtype).double()

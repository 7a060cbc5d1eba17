"""Right parameters after every step of an optimizer wrapper, and how far off they may be.

The optimizer of each rank is computed in ``local_optimizer``, on all parameters, from the gradients
that the kit fed. A torch optimizer on the rank itself would be shorter, but a subject that patches
torch's optimizers would then change its own measure.

Gradients. With an averager each rank steps with gradients of its own. A subject that claims
``averages`` is given each rank's own gradients, and steps with their mean over the group; a rank
without a gradient counts as zeros, and a parameter without a gradient on any rank is not stepped.
Other subjects without an averager are given the same gradients on all ranks of a group, those of
its first rank. Under DDP a rank steps with the mean over its group; with an averager only during
the warm-up, and with its own gradients afterwards. Under Join the mean is the sum over the ranks
that still have inputs, divided by the number of all.

Averages. The averager counts its calls c = 0, 1, 2, ... If c >= warmup and period divides
c - warmup, every parameter that is in a parameter group becomes the mean over the ranks of the
process group, after the local step. Momentum is never averaged.

Bounds. In most scenarios learning rates, momenta, weight decays and fed gradients are powers of
two, zeros or few digits long, so that SGD and its averages are exact in every order of operations:
the bound is 0, and a right wrapper gives the same bits, unless it averages gradients over 7 ranks
(``EXACT_SIZES``), or means under DDP (``averages_exactly``). Otherwise the bound is that of
``local_optimizer``, twice for what a wrapper adds: the right result and the computed one are both
rounded. In half precision, whose bounds grow fast, steps without momentum after several backwards,
or by gradients of another dtype, are judged from the recorded parameters before them, which are off
by one rounding of a copy in float32.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conformance.judging.oracles.averager_records import group_at, same
from conformance.judging.oracles.local_optimizer import LocalOptimizer, Values
from conformance.judging.oracles.optimizer_gradients import (
    averages_exactly,
    clipped,
    construction,
    fed_gradient,
    gradient_error,
    gradient_of_step,
    mean_as_arrived,
    takes_averager,
    unchanged_gradient,
)
from conformance.judging.oracles.optimizer_options import Options, is_in_a_group
from conformance.judging.oracles.optimizer_writes import write
from conformance.judging.verdict import Found
from conformance.records.run import Run, fed
from conformance.scenarios.averager_training import turn
from conformance.scenarios.optimizer import START, Setting
from conformance.scenarios.optimizer_backwards import ASSIGNED, change_before, is_in_half
from conformance.scenarios.optimizer_clearing import Clearing, clearing_before
from conformance.scenarios.optimizer_gradients import first_kind, freezes_late
from conformance.scenarios.optimizer_pairs import pair_of
from conformance.scenarios.optimizer_training import (
    OWN,
    TWO,
    averages_gradients,
    is_exact,
    plan_of,
    wrapped_class,
)
from conformance.scenarios.optimizer_twins import plan_of_model
from conformance.scenarios.optimizer_wide_gradients import widened


@dataclass
class OptimizerStep:
    """One step of one rank.

    Attributes:
        before: the parameters before it.
        stepped: the parameters after the local optimizer's step.
        after: the parameters when the whole step is over.
        averaged: the global ranks that the averager averaged over; () if it did not average.
        errors: the bounds of the errors of ``after``.
        momenta: the momentum of the local optimizer.
    """

    before: Values
    stepped: Values
    after: Values
    averaged: tuple[int, ...]
    errors: Values
    momenta: Values


# Looking for causes takes longer than judging: only the first failures of a run have one.
MAX_EXPLAINED = 50

# A mistake with groups that leave out options, and the options of SGD that they get then.
_LEFT_OUT = "the options of the construction have not reached its group, which leaves some out"
_OF_CLASS = {"lr": 1e-3}
_MIXED_UP = "gradients were averaged in the order in which they arrived, which differs by rank"
_OF_OTHER = "it was stepped with options of the other optimizer's construction"

Steps = Mapping[tuple[int, int], OptimizerStep]
# A known mistake: the parameter that it leaves on a rank, from that rank's right step.
Mistake = Callable[[OptimizerStep, int], torch.Tensor]
Judged = Callable[[int, int], bool]  # of a step and a parameter


def right_steps(run: Run) -> Steps:
    """Return the right steps of all ranks, by rank and step."""
    right: dict[tuple[int, int], OptimizerStep] = {}
    for model in {turn(run.scenario, step)[0] for step in range(len(run.scenario.steps))}:
        for group in {_group_of_model(run, rank.rank, model) for rank in run.ranks}:
            right.update(_steps_of_group(run, group, model))
    # Under Join parameters are recorded once more, after the last step, when all ranks have joined.
    last = len(run.scenario.steps)
    for rank in run.ranks:
        right[rank.rank, last] = right[rank.rank, last - 1]
    return right


def require_right(run: Run, found: Found, is_judged: Judged = lambda *_: True) -> None:
    """Require right parameters after every recorded step, or those that are judged."""
    right = right_steps(run)
    for rank, step in steps(run):
        for index in range(len(run.scenario.params)):
            if is_judged(step, index):
                _require_parameter(run, found, right, rank, step, index)


def is_due(count: int, warmup: int, period: int) -> bool:
    """Return whether the averager averages in the call of this count."""
    return count >= warmup and (count - warmup) % period == 0


def steps(run: Run) -> Iterator[tuple[int, int]]:
    """Yield (rank, step) of every recorded step."""
    for rank in run.ranks:
        for event in rank.all("stepped"):
            yield rank.rank, event["step"]


def result(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return a parameter after a step, flat in float64."""
    return run.ranks[rank].tensors[f"{step}/parameter/p{index}"].reshape(-1).double()


def _group_of_model(run: Run, rank: int, model: int) -> tuple[int, ...]:
    """Return the global ranks of the group in which a rank trains a model."""
    return run.scenario.twin_group_of(rank, run.world) if model else run.group(rank)


def _local_optimizer(run: Run, rank: int, model: int) -> LocalOptimizer:
    """Return a rank's optimizer of a model before the first step."""
    group = _group_of_model(run, rank, model)
    specs = run.scenario.params
    values = [
        fed(first_kind(run.scenario), spec, len(group), group[0], START + model, index)
        for index, spec in enumerate(specs)
    ]
    dtypes = [getattr(torch, spec.dtype) for spec in specs]
    return LocalOptimizer(values, dtypes, wrapped_class(run.scenario))


def _steps_of_group(
    run: Run, group: tuple[int, ...], model: int
) -> dict[tuple[int, int], OptimizerStep]:
    """Return the right steps of a group's ranks with one of their models."""
    plan = plan_of_model(run.scenario, model)
    options = Options(plan, construction(run, model)["options"])
    of_ranks = {rank: _local_optimizer(run, rank, model) for rank in group}
    restored_before, saved_after = plan.back
    count = 0
    saved = (count, {rank: o.saved() for rank, o in of_ranks.items()}, options.saved())
    right = {}
    for step in range(len(run.scenario.steps)):
        if step in (restored_before, *plan.again):
            count = saved[0]
            for rank, state in saved[1].items():
                of_ranks[rank].restore(state)
            options.restore(saved[2])
        if plan.regrouped and run.scenario.resume.resumes and step == run.scenario.resume.saves_at:
            sources = options.regroup()
            for optimizer in of_ranks.values():
                optimizer.exchange_states(sources)
        options.begin_step(step)
        if turn(run.scenario, step)[0] != model:
            continue
        if step in plan.writes:
            write(run, group, of_ranks.values(), plan.writes[step], step)
        if step and is_in_half(run.scenario):
            for rank, optimizer in of_ranks.items():
                _begin_from_records(run, optimizer, rank, step)
        before = {rank: list(optimizer.values) for rank, optimizer in of_ranks.items()}
        for rank, optimizer in of_ranks.items():
            _step(run, optimizer, rank, step, options)
        stepped = {rank: list(optimizer.values) for rank, optimizer in of_ranks.items()}
        calls = _calls(run, group, step)
        averages = takes_averager(run) and calls > 0 and is_due(count, plan.warmup, plan.period)
        count += calls
        if averages:
            _average(run, list(of_ranks.values()), step)
        for rank, optimizer in of_ranks.items():
            right[rank, step] = OptimizerStep(
                before[rank],
                stepped[rank],
                list(optimizer.values),
                group if averages else (),
                list(optimizer.errors),
                list(optimizer.momenta),
            )
        if step == saved_after:
            saved = (count, {rank: o.saved() for rank, o in of_ranks.items()}, options.saved())
    return right


def _begin_from_records(run: Run, optimizer: LocalOptimizer, rank: int, step: int) -> None:
    """Let a step begin from the recorded parameters before it."""
    for index, dtype in enumerate(optimizer.dtypes):
        values = result(run, rank, step - 1, index)
        optimizer.values[index] = values
        optimizer.errors[index] = torch.finfo(dtype).eps * values.abs()


def overflows(run: Run, rank: int, step: int) -> bool:
    """Return whether the gradients of a rank overflow, so that its step is skipped."""
    scaling = plan_of(run.scenario).scaling
    if scaling is None or step >= len(run.scenario.steps):
        return False
    group = run.group(rank)
    scaler = run.ranks[rank].first("scaler")
    has_alone = scaler is not None and bool(scaler["alone"])
    return scaling.overflows(step, group.index(rank), len(group), has_alone)


def _calls(run: Run, group: tuple[int, ...], step: int) -> int:
    """Return how often the averager counts a step.

    A step that is skipped on all ranks may count or not: its calls are recorded.
    """
    if not all(overflows(run, rank, step) for rank in group):
        return 1
    return min(1, len(list(run.ranks[group[0]].all("asked", step=step))))


def _step(run: Run, optimizer: LocalOptimizer, rank: int, step: int, options: Options) -> None:
    """Step every parameter that is in a parameter group and has a gradient."""
    if overflows(run, rank, step):
        return
    for index in range(len(optimizer.values)):
        chosen = options.of(index, step)
        grad = gradient_of_step(run, rank, step, index)
        if chosen is not None and grad is not None:
            error = gradient_error(run, grad, rank, step, index)
            optimizer.step(index, clipped(run, grad, step), error, chosen)


def _is_exact(run: Run, rank: int, step: int) -> bool:
    """Return whether every right computation of a rank gives the same bits."""
    size = len(group_at(run, rank, step))
    is_rounded = averages_gradients(run.scenario) and not averages_exactly(run.scenario, size)
    return is_exact(run.scenario) and not is_rounded


def _average(run: Run, optimizers: list[LocalOptimizer], step: int) -> None:
    plan = plan_of_model(run.scenario, turn(run.scenario, step)[0])
    for index in range(len(run.scenario.params)):
        if is_in_a_group(plan, index, step):
            mean, error = optimizers[0].average_with(optimizers, index)
            for optimizer in optimizers:
                optimizer.values[index] = mean
                optimizer.errors[index] = error


def _require_parameter(
    run: Run, found: Found, right: Steps, rank: int, step: int, index: int
) -> None:
    place = f"rank {rank}, step {step}"
    dtype = run.scenario.params[index].dtype
    got_dtype = run.ranks[rank].tensors[f"{step}/parameter/p{index}"].dtype
    found.require(
        got_dtype == getattr(torch, dtype),
        f"a parameter of {dtype}",
        f"{place}: p{index} is {got_dtype}",
    )
    right_step = right[rank, step]
    expected = right_step.after[index]
    got = result(run, rank, step, index)
    is_right = same(got, expected)
    # A weight of infinity is lost: weight decay of 0 makes it NaN.
    was_lost = ~right_step.before[index].isfinite()
    is_right |= was_lost & ~expected.isfinite() & ~got.isfinite()
    if not _is_exact(run, rank, step):
        is_close = (got - expected).abs() <= 2 * right_step.errors[index]
        is_right |= is_close & expected.isfinite()
    wrong = (~is_right).nonzero()
    if not len(wrong):
        return
    at = int(wrong[0])
    average = ""
    if right_step.averaged:
        average = f", averaged over ranks {list(right_step.averaged)}"
    digits = 17 if dtype == "float64" else 9
    found.require(
        False,
        f"the optimizer's step{average}: {expected[at].item():.{digits}g}",
        f"{place}, p{index}, index {at}: {got[at].item():.{digits}g} "
        f"({len(wrong)} of {len(got)} elements differ)",
        _cause(run, right, rank, step, index, got) if len(found.failures) < MAX_EXPLAINED else "",
    )


def _cause(run: Run, right: Steps, rank: int, step: int, index: int, got: torch.Tensor) -> str:
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
    if not _is_exact(run, 0, step):
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


def require_steps_with_some_gradient(run: Run, found: Found) -> None:
    """Require that each element is stepped with the gradient of one rank, and not with a mean.

    The scenario has no momentum, so that a step is judged from the recorded parameters before it.
    """
    rate = construction(run)["options"]["lr"]
    for rank, step in steps(run):
        group = run.group(rank)
        for index in range(len(run.scenario.params)):
            if step == 0:
                before = _local_optimizer(run, rank, 0).values[index]
            else:
                before = result(run, rank, step - 1, index)
            grads = [fed_gradient(run, group, place, step, index) for place in range(len(group))]
            got = result(run, rank, step, index)
            fits = torch.stack([same(got, before - rate * grad) for grad in grads]).any(0)
            mean = torch.stack(grads).mean(0)
            at = (~fits).nonzero()
            averaged = bool(len(at)) and bool(same(got, before - rate * mean)[at[0]])
            place = f"rank {rank}, step {step}: p{index}"
            found.require(
                not len(at),
                "a step with the gradient of one rank; or the claim averages",
                f"{place} has been stepped with another gradient",
                "it averages gradients: claim averages" if averaged else "",
            )

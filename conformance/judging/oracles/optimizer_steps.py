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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from conformance.judging.oracles.averager_records import group_at
from conformance.judging.oracles.local_optimizer import LocalOptimizer, Values
from conformance.judging.oracles.optimizer_gradients import (
    averages_exactly,
    clipped,
    construction,
    gradient_error,
    gradient_of_step,
    takes_averager,
)
from conformance.judging.oracles.optimizer_options import Options, is_in_a_group
from conformance.judging.oracles.optimizer_writes import write
from conformance.records.run import Run, fed
from conformance.scenarios.averager_training import turn
from conformance.scenarios.optimizer import START
from conformance.scenarios.optimizer_backwards import is_in_half
from conformance.scenarios.optimizer_gradients import first_kind
from conformance.scenarios.optimizer_training import (
    averages_gradients,
    is_exact,
    kept_plan,
    wrapped_class,
)
from conformance.scenarios.optimizer_twins import plan_of_model


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


Steps = Mapping[tuple[int, int], OptimizerStep]
"""The right steps, by rank and step."""


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


def start(run: Run, rank: int, index: int) -> torch.Tensor:
    """Return a parameter of a rank's first model before the first step, flat in float64."""
    return _local_optimizer(run, rank, 0).values[index]


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
    scaling = kept_plan(run.scenario).scaling
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


def is_exact_step(run: Run, rank: int, step: int) -> bool:
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

"""Right parameters after every step of an optimizer wrapper, and how far off they may be.

The optimizer of each rank is computed here in float64, on all parameters, from the gradients that
the kit fed. A torch optimizer on the rank itself would be shorter, but a subject that patches
torch's optimizers would then change its own measure. With x a parameter, g its gradient and lr the
learning rate, a step is

    SGD     g <- g + weight_decay x;  m <- momentum m + g;  x <- x - lr m
    Adam    m <- 0.9 m + 0.1 g;  v <- 0.999 v + 0.001 g**2;
            x <- x - lr (m / (1 - 0.9**t)) / (sqrt(v / (1 - 0.999**t)) + 1e-8)  in its t-th step
            (Kingma, Ba, ICLR 2015, algorithm 1, with the defaults of torch.optim.Adam)

Gradients. With an averager each rank steps with gradients of its own. Without one all ranks of a
group are given the same gradients, those of its first rank. Under DDP a rank steps with the mean
over its group; with an averager only during the warm-up, and with its own gradients afterwards.
Under Join the mean is the sum over the ranks that still have inputs, divided by the number of all.

Averages. The averager counts its calls c = 0, 1, 2, ... If c >= warmup and period divides
c - warmup, every parameter that is in a parameter group becomes the mean over the ranks of the
process group, after the local step. Momentum is never averaged.

Bounds. Learning rates, momenta, weight decays and fed gradients are powers of two, zeros or few
digits long, so that SGD and its averages are exact in every order of operations: the bound is 0,
and a right wrapper gives the same bits. An update of Adam is lr times a quotient, to which each of
the two moments brings a few roundings: 32 epsilons of lr are generous for any way to compute the
bias correction. Adding the update rounds relative to the parameter, which may have been larger
before than it is now, by up to lr in each step. After n steps the bound is therefore

    eps n (|x| + (32 + 2 n) lr)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from conformance.judging.verdict import Found
from conformance.records.run import Run, fed
from conformance.scenarios.gradients import uses
from conformance.scenarios.optimizer import START, setting

Values = list[torch.Tensor]


@dataclass
class LocalOptimizer:
    """The optimizer of one rank as it is defined: on all parameters, without other ranks.

    No tensor is ever changed in place, so that a copy of a list is a copy of its values.
    """

    run: Run
    rank: int
    values: Values = field(default_factory=list)
    momenta: Values = field(default_factory=list)
    squares: Values = field(default_factory=list)

    def __post_init__(self) -> None:
        group = self.run.group(self.rank)
        kind = "zero_all" if self.run.scenario.variant == "dtypes" else "crafted"
        self.values = [
            fed(kind, spec, len(group), group[0], START, index)
            for index, spec in enumerate(self.run.scenario.params)
        ]
        self.momenta = [torch.zeros_like(value) for value in self.values]
        self.squares = [torch.zeros_like(value) for value in self.values]
        self._options = dict(construction(self.run)["options"])

    def step(self, number: int) -> None:
        """Step every parameter that is in a parameter group and has a gradient."""
        rates = setting(self.run.scenario).rates
        if rates and rates[number] is not None:
            self._options["lr"] = rates[number]
        for index in range(len(self.values)):
            options = _options_of_parameter(self.run, self._options, index, number)
            grad = _gradient(self.run, self.rank, number, index)
            if options is None or grad is None:
                continue
            if self.run.scenario.variant == "adam":
                self._adam(index, grad, options["lr"], number + 1)
            else:
                self._sgd(index, grad, options)

    def _sgd(self, index: int, grad: torch.Tensor, options: Mapping[str, float]) -> None:
        grad = grad + options.get("weight_decay", 0.0) * self.values[index]
        self.momenta[index] = options.get("momentum", 0.0) * self.momenta[index] + grad
        self.values[index] = self.values[index] - options["lr"] * self.momenta[index]

    def _adam(self, index: int, grad: torch.Tensor, rate: float, count: int) -> None:
        self.momenta[index] = 0.9 * self.momenta[index] + 0.1 * grad
        self.squares[index] = 0.999 * self.squares[index] + 0.001 * grad**2
        mean = self.momenta[index] / (1 - 0.9**count)
        square = self.squares[index] / (1 - 0.999**count)
        self.values[index] = self.values[index] - rate * mean / (square.sqrt() + 1e-8)


@dataclass
class OptimizerStep:
    """One step of one rank.

    Attributes:
        before: the parameters before it.
        stepped: the parameters after the local optimizer's step.
        after: the parameters when the whole step is over.
        averaged: the global ranks that the averager averaged over; () if it did not average.
    """

    before: Values
    stepped: Values
    after: Values
    averaged: tuple[int, ...]


Steps = Mapping[tuple[int, int], OptimizerStep]
# A known mistake: the parameter that it leaves on a rank, from that rank's right step.
Mistake = Callable[[OptimizerStep, int], torch.Tensor]


def right_steps(run: Run) -> Steps:
    """Return the right steps of all ranks, by rank and step."""
    right: dict[tuple[int, int], OptimizerStep] = {}
    for group in {run.group(rank.rank) for rank in run.ranks}:
        right.update(_steps_of_group(run, group))
    # Under Join parameters are recorded once more, after the last step, when all ranks have joined.
    last = len(run.scenario.steps)
    for rank in run.ranks:
        right[rank.rank, last] = right[rank.rank, last - 1]
    return right


def local_optimizer_after(run: Run, rank: int, steps: int) -> LocalOptimizer:
    """Return the optimizer of a rank after so many steps without an average."""
    optimizer = LocalOptimizer(run, rank)
    for number in range(steps):
        optimizer.step(number)
    return optimizer


def require_right(run: Run, found: Found, until: int | None = None) -> None:
    """Require right parameters after every recorded step, or after those before step ``until``."""
    right = right_steps(run)
    for rank, step in steps(run):
        if until is None or step < until:
            for index in range(len(run.scenario.params)):
                _require_parameter(run, found, right, rank, step, index)


def require_one_averager_call(run: Run, found: Found) -> None:
    """Require one call of the averager in each step, with all parameters, after the local step."""
    for rank, step in steps(run):
        place = f"rank {rank}, step {step}"
        calls = list(run.ranks[rank].all("asked", step=step))
        if len(calls) != 1:
            cause = "the averager's count runs ahead of the steps" if calls else ""
            actual = f"{place}: the averager was called {len(calls)} times"
            found.require(False, "one call of the averager", actual, cause)
            continue
        found.checked(1)
        found.require(
            calls[0]["stepped"],
            "a call of the averager after the optimizer's step",
            f"{place}: no parameter had been stepped before the call",
        )
        missing = ", ".join(f"p{index}" for index in calls[0]["missing"])
        found.require(
            not missing,
            "a call of the averager with all parameters",
            f"{place}: {missing} missing",
            "the averager was given copies" if calls[0]["others"] else "",
        )


def construction(run: Run) -> dict[str, Any]:
    """Return the record of how the subject was made: its options, and whether with an averager."""
    event = run.ranks[0].first("made")
    assert event is not None
    return event


def takes_averager(run: Run) -> bool:
    """Return whether the subject has taken an averager."""
    return bool(construction(run)["averager"])


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


def _steps_of_group(run: Run, group: tuple[int, ...]) -> dict[tuple[int, int], OptimizerStep]:
    plan = setting(run.scenario)
    optimizers = {rank: LocalOptimizer(run, rank) for rank in group}
    restored_before, saved_after = plan.back
    count = 0
    saved_count = count
    saved = {rank: (list(o.values), list(o.momenta)) for rank, o in optimizers.items()}
    right = {}
    for step in range(len(run.scenario.steps)):
        if step == restored_before:
            count = saved_count
            for rank, optimizer in optimizers.items():
                values, momenta = saved[rank]
                optimizer.values = list(values)
                optimizer.momenta = list(momenta)
        before = {rank: list(optimizer.values) for rank, optimizer in optimizers.items()}
        for optimizer in optimizers.values():
            optimizer.step(step)
        stepped = {rank: list(optimizer.values) for rank, optimizer in optimizers.items()}
        averages = takes_averager(run) and is_due(count, plan.warmup, plan.period)
        count += 1
        if averages:
            _average(run, optimizers, step)
        for rank, optimizer in optimizers.items():
            after = list(optimizer.values)
            averaged = group if averages else ()
            right[rank, step] = OptimizerStep(before[rank], stepped[rank], after, averaged)
        if step == saved_after:
            saved_count = count
            saved = {rank: (list(o.values), list(o.momenta)) for rank, o in optimizers.items()}
    return right


def _average(run: Run, optimizers: Mapping[int, LocalOptimizer], step: int) -> None:
    for index in range(len(run.scenario.params)):
        if _is_in_a_group(run, index, step):
            values = [optimizer.values[index] for optimizer in optimizers.values()]
            mean = torch.stack(values).sum(0) / len(values)
            for optimizer in optimizers.values():
                optimizer.values[index] = mean


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
    # NaN compares false with everything, so that it is wrong as well.
    wrong = (~((got - expected).abs() <= _bound(run, expected, dtype, step))).nonzero()
    if not len(wrong):
        return
    at = int(wrong[0])
    average = ""
    if right_step.averaged:
        average = f", averaged over ranks {list(right_step.averaged)}"
    found.require(
        False,
        f"the optimizer's step{average}: {expected[at].item():.9g}",
        f"{place}, p{index}, index {at}: {got[at].item():.9g} "
        f"({len(wrong)} of {len(got)} elements differ)",
        _cause(run, right, rank, step, index, got),
    )


def _bound(run: Run, value: torch.Tensor, dtype: str, step: int) -> torch.Tensor:
    if run.scenario.variant != "adam":
        return torch.zeros_like(value)
    eps = torch.finfo(getattr(torch, dtype)).eps
    rate = construction(run)["options"]["lr"]
    count = step + 1
    return eps * count * (value.abs() + (32 + 2 * count) * rate)


def _cause(run: Run, right: Steps, rank: int, step: int, index: int, got: torch.Tensor) -> str:
    """Return the known mistake that gives these values, or an empty text if none does."""
    right_step = right[rank, step]
    step = min(step, len(run.scenario.steps) - 1)
    for name, value in _known_results(run, right, right_step, rank, step, index).items():
        if len(got) and torch.equal(got, value):
            return name
    ranks = right_step.averaged or (rank,)
    if any(_gradient(run, other, step, index) is None for other in ranks):
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
        mean_before = mean(lambda other, _: other.before[index], run.group(rank))
        known["it averaged before it stepped"] = mean_before + update
    elif takes_averager(run):
        mean_stepped = mean(lambda other, _: other.stepped[index], run.group(rank))
        known["it averaged at a step at which the averager does not"] = mean_stepped
    if step and right[rank, step - 1].averaged:
        stepped_before = right[rank, step - 1].stepped[index]
        known["it continued from the parameters before the average"] = stepped_before + update
    for name, mistake in _mistakes(run, step, index).items():
        known[name] = mean(mistake, right_step.averaged or (rank,))
    return known


def _mistakes(run: Run, step: int, index: int) -> dict[str, Mistake]:
    """Return known mistakes in a local step by their names."""
    plan = setting(run.scenario)
    options = construction(run)["options"]
    rate = (plan.rates[step] if plan.rates else None) or options["lr"]
    momentum = options.get("momentum", 0.0)

    def gradient(rank: int) -> torch.Tensor:
        grad = _gradient(run, rank, step, index)
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

    mistakes: dict[str, Mistake] = {"it was not stepped": lambda right, _: right.before[index]}
    for number, (_, others) in enumerate(plan.groups):
        name = f"it was stepped with the options of group {number}"
        mistakes[name] = partial(step_with, options=others)
    # The other mistakes are computed with one set of options for all parameters.
    if plan.groups:
        return mistakes
    mistakes["it was stepped twice"] = step_twice
    for earlier in (options["lr"], *plan.rates[:step]):
        if earlier is not None and earlier != rate:
            name = f"it was stepped with an earlier learning rate, {earlier:g}"
            mistakes[name] = partial(step_at, earlier=earlier)
    if momentum:
        mistakes["momentum is lost"] = partial(step_with, options={"lr": rate})
    return mistakes


def _gradient(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    """Return the gradient that a rank's optimizer steps a parameter with, or None if none."""
    scenario = run.scenario
    group = run.group(rank)
    size = len(group)
    spec = scenario.params[index]
    kind = scenario.steps[step]
    if scenario.uneven:
        training = [other for other in group if step < scenario.inputs_of(other, run.world)]
        values = [fed(kind, spec, size, other, step, index) for other in training]
        return torch.stack(values).sum(0) / run.world
    has_averager = takes_averager(run)
    is_under_ddp = scenario.variant == "ddp"
    if is_under_ddp and not (has_averager and step >= setting(scenario).warmup):
        return torch.stack([fed(kind, spec, size, other, step, index) for other in group]).mean(0)
    has_own = has_averager or is_under_ddp
    if scenario.variant == "unused":
        # Without an averager all ranks are given the same gradients: the union of the used ones.
        places = (group.index(rank),) if has_own else range(size)
        if not any(uses(size, place, step, index) for place in places):
            return None
    return fed(kind, spec, size, rank if has_own else group[0], step, index)


def _options_of_parameter(
    run: Run, options: dict[str, Any], index: int, step: int
) -> Mapping[str, float] | None:
    """Return the options of a parameter's group, or None while it is in no group."""
    groups = setting(run.scenario).groups
    if not groups:
        return options
    if not _is_in_a_group(run, index, step):
        return None
    return next(group_options for indices, group_options in groups if index in indices)


def _is_in_a_group(run: Run, index: int, step: int) -> bool:
    plan = setting(run.scenario)
    return not plan.groups or step >= plan.added or index not in plan.groups[-1][0]

"""TODO: conformance/judging/oracles/optimizer.py."""

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
class _Local:
    """The optimizer of one rank, as it is defined: all parameters, no other rank, in float64."""

    run: Run
    rank: int
    values: Values = field(default_factory=list)
    momenta: Values = field(default_factory=list)
    squares: Values = field(default_factory=list)

    def __post_init__(self) -> None:
        run, group = self.run, self.run.group(self.rank)
        kind = "zero_all" if run.scenario.variant == "dtypes" else "crafted"
        self.values = [fed(kind, spec, len(group), group[0], START, index).clone() for index, spec in enumerate(run.scenario.params)]
        self.momenta = [torch.zeros_like(value) for value in self.values]
        self.squares = [torch.zeros_like(value) for value in self.values]
        self._options = dict(_made(run)["options"])

    def step(self, number: int) -> None:
        """Step every parameter that is in a group and has a gradient."""
        plan = setting(self.run.scenario)
        if plan.rates and plan.rates[number] is not None:
            self._options["lr"] = plan.rates[number]
        for index, value in enumerate(self.values):
            options = _options_of(self.run, self._options, index, number)
            grad = _gradient(self.run, self.rank, number, index)
            if options is None or grad is None:
                continue
            if self.run.scenario.variant == "adam":
                self._adam(index, grad, options["lr"], number + 1)
                continue
            grad = grad + options.get("weight_decay", 0.0) * value
            self.momenta[index] = options.get("momentum", 0.0) * self.momenta[index] + grad
            self.values[index] = value - options["lr"] * self.momenta[index]

    def kept(self) -> tuple[Values, Values]:
        return [value.clone() for value in self.values], [value.clone() for value in self.momenta]

    def _adam(self, index: int, grad: torch.Tensor, rate: float, count: int) -> None:
        """Kingma, Ba, Adam, ICLR 2015, algorithm 1, with the options that torch.optim.Adam has unless it is given others."""
        self.momenta[index] = 0.9 * self.momenta[index] + 0.1 * grad
        self.squares[index] = 0.999 * self.squares[index] + 0.001 * grad**2
        mean, square = self.momenta[index] / (1 - 0.9**count), self.squares[index] / (1 - 0.999**count)
        self.values[index] = self.values[index] - rate * mean / (square.sqrt() + 1e-8)


@dataclass
class _Step:
    """One step of one rank: its parameters before it, after the optimizer, and when it is over; and with which ranks averaged."""

    before: Values
    stepped: Values
    after: Values
    averaged: tuple[int, ...]


def _right(run: Run) -> dict[tuple[int, int], _Step]:
    """Return what is right, by rank and step."""
    plan, averages, right = setting(run.scenario), _averages(run), {}
    for group in {run.group(rank.rank) for rank in run.ranks}:
        ranks = {rank: _Local(run, rank) for rank in group}
        kept, count, kept_count = {rank: local.kept() for rank, local in ranks.items()}, 0, 0
        for step in range(len(run.scenario.steps)):
            if step == plan.back[0]:
                count = kept_count
                for rank, local in ranks.items():
                    local.values, local.momenta = ([value.clone() for value in values] for values in kept[rank])
            before = {rank: list(local.values) for rank, local in ranks.items()}
            for local in ranks.values():
                local.step(step)
            stepped = {rank: list(local.values) for rank, local in ranks.items()}
            due = averages and _is_due(count, plan.warmup, plan.period)
            count += 1
            for index in range(len(run.scenario.params)) if due else ():
                if not _is_in_a_group(run, index, step):
                    continue
                mean = torch.stack([stepped[rank][index] for rank in group]).sum(0) / len(group)
                for local in ranks.values():
                    local.values[index] = mean.clone()
            for rank, local in ranks.items():
                right[rank, step] = _Step(before[rank], stepped[rank], list(local.values), group if due else ())
            if step == plan.back[1]:
                kept, kept_count = {rank: local.kept() for rank, local in ranks.items()}, count
    last = len(run.scenario.steps)  # on record where ranks join: when all have
    return {**right, **{(rank.rank, last): right[rank.rank, last - 1] for rank in run.ranks}}


def _require_right(run: Run, found: Found, until: int | None = None) -> None:
    """Require what is right at every step on record, before step ``until`` if that is given."""
    right = _right(run)
    for rank, step in _steps(run):
        if until is not None and step >= until:
            continue
        now = right[rank, step]
        for index, spec in enumerate(run.scenario.params):
            got, expected = _got(run, rank, step, index), now.after[index]
            kept = run.ranks[rank].tensors[f"{step}/parameter/p{index}"].dtype
            found.require(
                kept == getattr(torch, spec.dtype), f"a parameter of {spec.dtype}", f"rank {rank}, step {step}: p{index} is {kept}"
            )
            error, bound = (got - expected).abs(), _bound(run, expected, spec.dtype, step)
            wrong = (~(error <= bound)).nonzero()
            if not len(wrong):
                continue
            at = int(wrong[0])
            average = f", averaged over ranks {list(now.averaged)}" if now.averaged else ""
            found.require(
                False,
                f"the optimizer's step{average}: {expected[at].item():.9g}",
                f"rank {rank}, step {step}, p{index}, index {at}: {got[at].item():.9g} ({len(wrong)} of {len(got)} elements differ)",
                _cause(run, right, rank, step, index, got),
            )


def _bound(run: Run, value: torch.Tensor, dtype: str, step: int) -> torch.Tensor:
    """Return how far off it may be: SGD is exact here, Adam is not.

    Each of Adam's updates is the rate times a quotient, to which both moments bring few roundings each: of the order of 32
    epsilons of the rate are generous, with a bias correction that is computed in any way. Adding it rounds relative to the value,
    which may be larger before than it is now, by a rate for each step.
    """
    if run.scenario.variant != "adam":
        return torch.zeros_like(value)
    eps, rate, steps = torch.finfo(getattr(torch, dtype)).eps, _made(run)["options"]["lr"], step + 1
    return eps * steps * (value.abs() + (32 + 2 * steps) * rate)


def _cause(run: Run, right: Mapping[tuple[int, int], _Step], rank: int, step: int, index: int, got: torch.Tensor) -> str:
    """Name the mistake that makes this of these values, where it is a known one."""
    now, group = right[rank, step], run.group(rank)
    step = min(step, len(run.scenario.steps) - 1)

    def over(stepped: Callable[[_Step, int], torch.Tensor], ranks: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([stepped(right[other, step], other) for other in ranks]).sum(0) / len(ranks)

    known = {}
    if now.averaged:
        known["it stepped, and the average is lost"] = now.stepped[index]
        known["it averaged first, and stepped then"] = over(lambda of, _: of.before[index], group) + now.stepped[index] - now.before[index]
    elif _averages(run):
        known["it averaged, where the averager does not"] = over(lambda of, _: of.stepped[index], group)
    if step and (before := right[rank, step - 1]).averaged:
        known["it went on from before the average"] = before.stepped[index] + now.stepped[index] - now.before[index]
    for name, stepped in _mistakes(run, step, index).items():
        known[name] = over(stepped, now.averaged or (rank,))
    if exact := next((name for name, value in known.items() if len(got) and torch.equal(got, value)), ""):
        return exact
    if any(_gradient(run, other, step, index) is None for other in now.averaged or (rank,)):
        return "it was stepped where it has no gradient"
    update, found = now.stepped[index] - now.before[index], got - now.before[index]
    if len(got) > 1 and not now.averaged and torch.equal(update.sort().values, found.sort().values):
        return "elements are in another order: the parameter is where it has other strides than its gradient"
    return ""


def _mistakes(run: Run, step: int, index: int) -> dict[str, Callable[[_Step, int], torch.Tensor]]:
    """Return steps that are known mistakes: what each makes of what a rank had before."""
    plan, options = setting(run.scenario), _made(run)["options"]
    rate, momentum = (plan.rates[step] if plan.rates else None) or options["lr"], options.get("momentum", 0.0)

    def grad(rank: int) -> torch.Tensor:
        found = _gradient(run, rank, step, index)
        return torch.zeros(()) if found is None else found

    def stepped_with(of: _Step, rank: int, options: Mapping[str, float]) -> torch.Tensor:
        return of.before[index] - options["lr"] * (grad(rank) + options.get("weight_decay", 0.0) * of.before[index])

    def stepped_at(of: _Step, rank: int, earlier: float) -> torch.Tensor:
        return of.before[index] + (of.stepped[index] - of.before[index]) * (earlier / rate)

    def stepped_twice(of: _Step, rank: int) -> torch.Tensor:
        return of.stepped[index] + momentum * (of.stepped[index] - of.before[index]) - rate * grad(rank)

    mistakes: dict[str, Callable[[_Step, int], torch.Tensor]] = {"it was not stepped": lambda of, _: of.before[index]}
    for number, (_, others) in enumerate(plan.groups):
        mistakes[f"stepped with the options of group {number}"] = partial(stepped_with, options=others)
    if plan.groups:
        return mistakes
    mistakes["it was stepped twice"] = stepped_twice
    for earlier in (options["lr"], *plan.rates[:step]):
        if earlier is not None and earlier != rate:
            mistakes[f"stepped with an earlier learning rate, {earlier:g}"] = partial(stepped_at, earlier=earlier)
    if momentum:
        mistakes["momentum is lost"] = partial(stepped_with, options={"lr": rate})
    return mistakes


def _require_asked(run: Run, found: Found) -> None:
    for rank, step in _steps(run):
        asked = list(run.ranks[rank].all("asked", step=step))
        where = f"rank {rank}, step {step}"
        cause = "the averager's count runs ahead of the steps" if len(asked) > 1 else ""
        if not found.require(len(asked) == 1, "the averager is asked once", f"{where}: it was asked {len(asked)} times", cause):
            continue
        found.require(asked[0]["stepped"], "asked when it has stepped", f"{where}: no parameter had been stepped yet")
        missing = ", ".join(f"p{index}" for index in asked[0]["missing"])
        found.require(
            not missing, "asked for all parameters", f"{where}: not for {missing}", "it was given copies" if asked[0]["others"] else ""
        )


def _gradient(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    """Return what a rank's optimizer steps a parameter with; None where there is nothing."""
    scenario, group, averages = run.scenario, run.group(rank), _averages(run)
    spec, kind, plan = scenario.params[index], scenario.steps[step], setting(scenario)
    if scenario.uneven:
        having = [other for other in group if step < scenario.inputs_of(other, run.world)]
        total = torch.stack([fed(kind, spec, len(group), other, step, index) for other in having]).sum(0)
        return total / run.world
    if scenario.variant == "ddp" and not (averages and step >= plan.warmup):
        return torch.stack([fed(kind, spec, len(group), other, step, index) for other in group]).mean(0)
    own = averages or scenario.variant == "ddp"
    places = (group.index(rank),) if own else range(len(group))
    if scenario.variant == "unused" and not any(uses(len(group), place, step, index) for place in places):
        return None
    return fed(kind, spec, len(group), rank if own else group[0], step, index)


def _options_of(run: Run, options: dict[str, Any], index: int, step: int) -> Mapping[str, float] | None:
    """Return the options of a parameter's group; None while it is in none."""
    groups = setting(run.scenario).groups
    if not groups:
        return options
    if not _is_in_a_group(run, index, step):
        return None
    return next(of for indices, of in groups if index in indices)


def _is_in_a_group(run: Run, index: int, step: int) -> bool:
    plan = setting(run.scenario)
    return not plan.groups or step >= plan.added or index not in plan.groups[-1][0]


def _is_due(count: int, warmup: int, period: int) -> bool:
    return count >= warmup and (count - warmup) % period == 0


def _made(run: Run) -> dict[str, Any]:
    said = run.ranks[0].first("made")
    assert said is not None
    return said


def _averages(run: Run) -> bool:
    """Whether it has taken an averager."""
    return bool(_made(run)["averager"])


def _steps(run: Run) -> Iterator[tuple[int, int]]:
    """Yield (rank, step) of every step on record."""
    for rank in run.ranks:
        for event in rank.all("stepped"):
            yield rank.rank, event["step"]


def _got(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return run.ranks[rank].tensors[f"{step}/parameter/p{index}"].reshape(-1).double()

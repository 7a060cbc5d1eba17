"""Section 15: optimizer wrappers.

What is right is computed here, in float64, from what ranks were fed. Rates, momenta and gradients are such that SGD is exact, in
whatever order it is computed: a right wrapper gives the same bits. A torch optimizer in the rank beside the subject's would be
shorter, but a subject that changes torch's would change what it is compared with.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from conformance.claims import Claims
from conformance.inputs import uses
from conformance.kinds.optimizer import (
    ADAM,
    CLOSURE,
    DDP,
    DDP_VIEWS,
    DTYPES,
    GROUPS,
    ORDERED,
    PLAIN,
    RANDOM,
    RELOADED,
    RESUMED,
    SAVED,
    SCHEDULED,
    START,
    SUBGROUPS,
    UNEVEN,
    UNUSED,
    ZEROED,
    setting,
)
from conformance.leftovers import left_behind
from conformance.rulebook import SHOULD, rule
from conformance.run import Run, fed
from conformance.verdict import Found

NO_AVERAGER = "it takes no averager"
BASIC = ("15.1", "15.2", "15.3")
Values = list[torch.Tensor]


@rule(
    "15.1",
    "Steps as the local optimizer",
    on=(PLAIN, ADAM),
    owns=(PLAIN, ADAM),
    source="torch documentation, PostLocalSGDOptimizer and ZeroRedundancyOptimizer: each step is the wrapped optimizer's",
    remedy="step(): whether it steps every parameter, once, with its own gradient; the partition of parameters, and who sends which",
)
def local_steps(run: Run, claims: Claims, found: Found) -> None:
    """Until something is averaged, each step makes of the parameters what the optimizer inside makes of them alone, on every rank.

    With an averager that is each rank's own optimizer on its own gradients, until the first average. Without one it is one
    optimizer on all parameters, on gradients that are the same on all ranks. SGD with momentum, bit for bit; Adam on random
    gradients up to the roundings of its operations.
    """
    if run.scenario.case == "adam" and not _made(run)["takes_any"]:
        found.does_not_apply("it takes no optimizer, nor a class of optimizers: it is one of its own")
        return
    averaged = [event["step"] for rank in run.ranks for event in rank.all("asked", averages=True)]
    _require_right(run, found, until=min([setting(run.scenario).warmup, *averaged]) if _averages(run) else None)


@rule(
    "15.2",
    "Asks the averager once in each step",
    on=(PLAIN,),
    needs=("15.1",),
    source="torch documentation, PostLocalSGDOptimizer; pytorch #74737, averaging too often",
    remedy="one call of average_parameters at the end of step(), whatever the number of groups and parameters",
)
def asks_once(run: Run, claims: Claims, found: Found) -> None:
    """In each step the averager is asked once, after the optimizer has stepped, with all parameters."""
    if not _averages(run):
        found.does_not_apply(NO_AVERAGER)
        return
    _require_asked(run, found)


@rule(
    "15.3",
    "Post-local SGD as it is defined",
    on=(PLAIN,),
    needs=("15.1", "15.2"),
    source="Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, algorithm 2",
    remedy="what the averager is given: the parameters themselves, and no copies; nothing is written over what it has made of them",
)
def post_local_sgd(run: Run, claims: Claims, found: Found) -> None:
    """Parameters are at each step those of local steps, with averages where the averager makes them; momentum is not averaged.

    The averager is the kit's own, so that what is wrong is the wrapper's doing.
    """
    if not _averages(run):
        found.does_not_apply(NO_AVERAGER)
        return
    _require_right(run, found)


@rule(
    "15.4",
    "Replicas hold the same bits",
    on=(RANDOM,),
    owns=(RANDOM,),
    needs=BASIC,
    source="torch documentation, ZeroRedundancyOptimizer: broadcasts, to keep all replicas in the same state",
    remedy="what a rank computes by itself: what one rank has stepped has to come from there to all",
)
def replicas(run: Run, claims: Claims, found: Found) -> None:
    """On random gradients ranks of a group hold the same bits: with an averager after each average, otherwise after each step."""
    if run.world == 1:
        found.does_not_apply("there is one rank")
    plan, averages = setting(run.scenario), _averages(run)
    for rank, step in _steps(run):
        if averages and not _is_due(step, plan.warmup, plan.period):
            continue
        first = run.group(rank)[0]
        for index in range(len(run.scenario.params)):
            same = torch.equal(_got(run, first, step, index), _got(run, rank, step, index))
            found.require(same, f"what rank {first} holds", f"rank {rank}, step {step}: p{index} differs")


@rule(
    "15.5",
    "Parameter groups",
    on=(GROUPS,),
    owns=(GROUPS,),
    needs=BASIC,
    source="torch documentation, torch.optim, Per-parameter options; Optimizer.add_param_group; pytorch #54736, #59973",
    remedy="options of a group other than the first; add_param_group: the optimizer inside, and the partition, have to hear of it",
)
def parameter_groups(run: Run, claims: Claims, found: Found) -> None:
    """Each parameter group is stepped with its own learning rate, momentum and weight decay, and one that is added by
    add_param_group from its next step on; what is in no group stays what it is."""
    _require_right(run, found)


@rule(
    "15.6",
    "A learning-rate schedule is obeyed",
    on=(SCHEDULED,),
    owns=(SCHEDULED,),
    needs=BASIC,
    source="torch documentation, torch.optim.lr_scheduler, which writes to param_groups",
    remedy="param_groups have to be the inner optimizer's own, or be copied to it before each step",
)
def scheduled(run: Run, claims: Claims, found: Found) -> None:
    """A learning rate that is written to param_groups is that of the next step, 0 too."""
    _require_right(run, found)


@rule(
    "15.7",
    "step(closure)",
    on=(CLOSURE,),
    owns=(CLOSURE,),
    needs=BASIC,
    source="torch documentation, Optimizer.step(closure)",
    remedy="pass the closure on to the optimizer inside, and return what that returns; do not wrap step in torch.no_grad()",
)
def closures(run: Run, claims: Claims, found: Found) -> None:
    """step(closure) calls the closure once, with gradients enabled, before it steps, and returns its loss; the averager is asked once."""
    for rank, step in _steps(run):
        said, where = run.ranks[rank].first("closure", step=step), f"rank {rank}, step {step}"
        if not found.require(said is not None, "a step with a closure", f"{where}: none is on record"):
            continue
        assert said is not None
        found.require(len(said["calls"]) == 1, "one call of the closure", f"{where}: it was called {len(said['calls'])} times")
        found.require(all(said["calls"]), "gradients enabled in the closure", f"{where}: torch.is_grad_enabled() was False")
        found.require(said["loss"] == step + 1, f"the closure's loss, {step + 1}", f"{where}: step returned {said['loss']}")
    if _averages(run):
        _require_asked(run, found)
    _require_right(run, found)


@rule(
    "15.8",
    "zero_grad",
    on=(ZEROED,),
    owns=(ZEROED,),
    needs=BASIC,
    source="torch documentation, Optimizer.zero_grad(set_to_none)",
    remedy="zero_grad of all parameters, not of this rank's share alone; pass set_to_none on",
)
def zero_grad(run: Run, claims: Claims, found: Found) -> None:
    """zero_grad() leaves no gradient on any parameter, or zeros; zero_grad(set_to_none=False) leaves zeros."""
    for rank in run.ranks:
        for said in rank.all("zeroed"):
            where = f"rank {rank.rank}, step {said['step']}"
            call = "zero_grad(set_to_none=False)" if said["keeps"] else "zero_grad()"
            left, none = (", ".join(f"p{index}" for index in said[name]) for name in ("left", "none"))
            found.require(not left, "no gradient, or zeros", f"{where}: {call} left those of {left}")
            found.require(not (said["keeps"] and none), "zeros", f"{where}: {call} left None for {none}")
    _require_right(run, found)


@rule(
    "15.9",
    "Parameters without a gradient",
    on=(UNUSED,),
    owns=(UNUSED,),
    needs=BASIC,
    source="torch documentation, Optimizer.zero_grad: a parameter whose gradient is None is not stepped",
    remedy="a gradient of None that is taken for zeros, for which momentum moves the parameter; collectives that skip what has none",
)
def unused(run: Run, claims: Claims, found: Found) -> None:
    """A parameter without a gradient keeps its value and its momentum in that step; the others are stepped.

    With an averager a parameter may have a gradient on some ranks only; without one it has on none.
    """
    _require_right(run, found)


@rule(
    "15.10",
    "Any group",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=BASIC,
    source="torch documentation, torch.distributed.new_group; ranks in a group are not global ranks",
    remedy="a collective without group=; a place in the group where a global rank is meant, as in broadcast(src=), or the other way round",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """On a subgroup it works with its ranks alone, whatever WORLD is."""
    _require_right(run, found)


@rule(
    "15.11",
    "Any dtype",
    on=(DTYPES,),
    owns=(DTYPES,),
    may_refuse=True,
    needs=BASIC,
    source="torch documentation, ZeroRedundancyOptimizer: requires that all parameters are of one dense type, and raises otherwise",
    remedy="one flat buffer for parameters of several dtypes; or refuse them with an error where the optimizer is made",
)
def dtypes(run: Run, claims: Claims, found: Found) -> None:
    """Parameters of float32, float64, float16 and bfloat16 in one model are stepped each in its own dtype, and one without elements
    is no obstacle; or it refuses them with an error on every rank."""
    _require_right(run, found)


@rule(
    "15.12",
    "It is done when step() returns",
    on=(ORDERED,),
    owns=(ORDERED,),
    needs=BASIC,
    source="torch documentation, async_op: a collective's result is there after wait()",
    remedy="an asynchronous collective that nobody waits for",
)
def done(run: Run, claims: Claims, found: Found) -> None:
    """When step() returns, parameters are what they are to be.

    Peers enter each step when rank 0 has left it, or waits for them: a rank that returns without waiting is found out every time.
    """
    _require_right(run, found)


@rule(
    "15.13",
    "Goes on from a checkpoint",
    on=(RESUMED, SAVED),
    owns=(RESUMED, SAVED),
    needs=BASIC,
    source="torch documentation, PostLocalSGDOptimizer.load_state_dict, consolidate_state_dict; pytorch #63340, #78988",
    remedy="state_dict() has to hold the inner optimizer's state and the averager's step; indices of parameters across ranks",
)
def checkpoint(run: Run, claims: Claims, found: Found) -> None:
    """What state_dict() holds after 13 steps lets new processes go on with load_state_dict() as if there had been no break.

    Momentum goes on, and so does the averager's count of steps: a warm-up does not begin again. What has
    consolidate_state_dict() is asked for its state in the group's first place, which all ranks load; of others each rank
    saves and loads its own.
    """
    _require_right(run, found)


@rule(
    "15.14",
    "Put back in the same process",
    on=(RELOADED,),
    owns=(RELOADED,),
    needs=(*BASIC, "15.6", "15.13"),
    source="torch documentation, Optimizer.load_state_dict and torch.optim.lr_scheduler",
    remedy="load_state_dict of the inner optimizer makes new param_groups: have the wrapper's own be those, not the ones from before",
)
def reloaded(run: Run, claims: Claims, found: Found) -> None:
    """load_state_dict() puts it back in the same process to where state_dict() was called; and a schedule that writes to
    param_groups afterwards is obeyed."""
    _require_right(run, found)


@rule(
    "15.15",
    "The consolidated state is the local optimizer's",
    on=(SAVED,),
    needs=BASIC,
    source="torch documentation, ZeroRedundancyOptimizer.consolidate_state_dict and state_dict; pytorch #54736, #60284",
    remedy="from places in a rank's share to places among all parameters; state that a rank has not sent, or that is out of date",
)
def consolidated(run: Run, claims: Claims, found: Found) -> None:
    """After consolidate_state_dict(0), state_dict() in the first place is that of a local optimizer on all parameters: for each of
    them, by its number, its momentum; and the parameter groups."""
    rank = run.ranks[0]
    said = rank.first("consolidated")
    if said is None:
        found.does_not_apply("it has no consolidate_state_dict()")
        return
    if not found.require(said["form"], "a dict with state and param_groups", "rank 0: state_dict() returned something else"):
        return
    step, options = run.scenario.saves_at - 1, _made(run)["options"]
    groups = [{"lr": options["lr"], "momentum": options.get("momentum", 0.0), "params": list(range(len(run.scenario.params)))}]
    found.require(said["groups"] == groups, f"param_groups {groups}", f"rank 0, step {step}: {said['groups']}")
    local = _Local(run, 0)
    for number in range(step + 1):
        local.step(number)
    for index, right in enumerate(local.momenta if options.get("momentum") else ()):
        got = rank.tensors.get(f"{step}/state/{index}/momentum_buffer")
        where = f"rank 0, step {step}: state[{index}]"
        if not found.require(got is not None, f"the momentum of p{index}", f"{where} has no momentum_buffer"):
            continue
        assert got is not None
        got = got.reshape(-1).double()
        same = torch.equal(got, right)
        other = next((place for place, values in enumerate(local.momenta) if torch.equal(got, values)), None)
        cause = "" if same or other is None else f"it is that of p{other}"
        found.require(same, f"the momentum of p{index}", f"{where} has another momentum_buffer", cause)


@rule(
    "15.16",
    "Together with DDP",
    on=(DDP, DDP_VIEWS),
    owns=(DDP, DDP_VIEWS),
    needs=BASIC,
    source="torch documentation, PostLocalSGDOptimizer, ZeroRedundancyOptimizer: examples with DistributedDataParallel; pytorch #73150",
    remedy="parameters that are put elsewhere, with other strides than DDP saw; gradients that are taken before DDP has averaged them",
)
def with_ddp(run: Run, claims: Claims, found: Found) -> None:
    """Under DDP, which averages gradients, it makes of each rank's parameters what the local optimizer makes of the mean gradient.

    Where there is an averager, DDP averages in its warm-up; after that ranks step with their own gradients, and it is
    averaged as 15.3 says: post-local SGD as a whole.
    """
    _require_right(run, found)


@rule(
    "15.17",
    "Ranks that have run out of inputs",
    on=(UNEVEN,),
    owns=(UNEVEN,),
    needs=(*BASIC, "15.16"),
    source="torch documentation, Distributed Training with Uneven Inputs Using the Join Context Manager; ZeroRedundancyOptimizer.join_hook",
    remedy="the join hook's main_hook: the collectives of one step, in the order of step(), and this rank's share is stepped too",
)
def uneven(run: Run, claims: Claims, found: Found) -> None:
    """What has a join_hook trains under Join together with DDP on different numbers of inputs: all ranks come to their end, and
    hold what a local optimizer makes of the mean gradients, to which ranks without an input contribute zeros."""
    if run.ranks[0].first("not_joinable"):
        found.does_not_apply("it has no join_hook")
        return
    _require_right(run, found)


@rule(
    "15.18",
    "It passes for an optimizer",
    on=(PLAIN,),
    needs=BASIC,
    level=SHOULD,
    source="torch documentation, torch.optim.Optimizer, torch.optim.lr_scheduler",
    remedy="a subclass of torch.optim.Optimizer calls super().__init__(), and then shares the groups and state of the one inside",
)
def is_an_optimizer(run: Run, claims: Claims, found: Found) -> None:
    """It is a torch.optim.Optimizer, a learning-rate scheduler takes it, and hooks that are registered to run after a step run once
    in each, when it is averaged."""
    for rank in run.ranks:
        for said in rank.all("as_optimizer"):
            for what, expected in (
                ("isinstance", "a torch.optim.Optimizer"),
                ("scheduler", "a scheduler that steps it"),
                ("hook", "a post-step hook that runs once, at the end of a step"),
            ):
                found.require(not said[what], expected, f"rank {rank.rank}: {said[what]}")


@rule(
    "15.19",
    "It leaves the process as it was",
    on=(PLAIN,),
    source="torch documentation, reproducibility; the same as 9.1, 9.3, 9.4 and 9.6 of hooks",
    remedy="a seed that is set, a global setting or a patched function that is not put back, a thread or a file that is left",
)
def leaves_no_trace(run: Run, claims: Claims, found: Found) -> None:
    """Random generators, torch's settings, functions of torch and Python, and the process's threads, children and temporary files
    are after it what they were before."""
    left_behind(run, found)


@rule(
    "15.20",
    "Smaller groups than it says are refused",
    on=(PLAIN,),
    worlds="fewer",
    claimed="min_world_size",
    source="the same as 2.11 of hooks",
    remedy="check the group's size where the optimizer is made, or in its first step, and raise on every rank",
)
def fewer(run: Run, claims: Claims, found: Found) -> None:
    """In a group of fewer ranks than it claims to take, it raises an error on every rank."""
    found.require(False, "an error on every rank", f"{run.name}: it ran to its end", "min_world_size is claimed and not checked")


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
        kind = "zero_all" if run.scenario.case == "dtypes" else "crafted"
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
            if self.run.scenario.case == "adam":
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
    if run.scenario.case != "adam":
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
    if scenario.case == "ddp" and not (averages and step >= plan.warmup):
        return torch.stack([fed(kind, spec, len(group), other, step, index) for other in group]).mean(0)
    own = averages or scenario.case == "ddp"
    places = (group.index(rank),) if own else range(len(group))
    if scenario.case == "unused" and not any(uses(len(group), place, step, index) for place in places):
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

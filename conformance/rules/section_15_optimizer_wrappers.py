"""Section 15: optimizer wrappers.

What is right is computed here, in float64, from what ranks were fed. Rates, momenta and gradients are such that SGD is exact, in
whatever order it is computed: a right wrapper gives the same bits. A torch optimizer in the rank beside the subject's would be
shorter, but a subject that changes torch's would change what it is compared with.
"""

import torch

from conformance.judging.oracles.optimizer import _averages, _got, _is_due, _Local, _made, _require_asked, _require_right, _steps
from conformance.judging.rule import SHOULD, WorldSizes, rule
from conformance.judging.side_effects import left_behind
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.optimizer import (
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
    SUBGROUPS,
    UNEVEN,
    UNUSED,
    ZEROED,
    setting,
)
from conformance.subjects.claims import Claims

NO_AVERAGER = "it takes no averager"
BASIC = ("15.1", "15.2", "15.3")


@rule(
    "15.1",
    "Steps as the local optimizer",
    on=(PLAIN, ADAM),
    owns=(PLAIN, ADAM),
    certifies_machine=True,
    source="torch documentation, PostLocalSGDOptimizer and ZeroRedundancyOptimizer: each step is the wrapped optimizer's",
    remedy="step(): whether it steps every parameter, once, with its own gradient; the partition of parameters, and who sends which",
)
def local_steps(run: Run, claims: Claims, found: Found) -> None:
    """Until something is averaged, each step makes of the parameters what the optimizer inside makes of them alone, on every rank.

    With an averager that is each rank's own optimizer on its own gradients, until the first average. Without one it is one
    optimizer on all parameters, on gradients that are the same on all ranks. SGD with momentum, bit for bit; Adam on random
    gradients up to the roundings of its operations.
    """
    if run.scenario.variant == "adam" and not _made(run)["takes_any"]:
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
    certifies_machine=True,
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
    step, options = run.scenario.resume.saves_at - 1, _made(run)["options"]
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
    worlds=WorldSizes.BELOW_MINIMUM,
    claimed="min_world_size",
    source="the same as 2.11 of hooks",
    remedy="check the group's size where the optimizer is made, or in its first step, and raise on every rank",
)
def fewer(run: Run, claims: Claims, found: Found) -> None:
    """In a group of fewer ranks than it claims to take, it raises an error on every rank."""
    found.require(False, "an error on every rank", f"{run.name}: it ran to its end", "min_world_size is claimed and not checked")

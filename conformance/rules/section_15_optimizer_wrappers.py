"""Section 15: optimizer wrappers."""

import torch

from conformance.judging.common_rules import (
    NO_CLOSURE,
    leaves_no_trace,
    refuses_fewer_ranks,
    right_however_strings_hash,
)
from conformance.judging.oracles.optimizer import note_other_names, require_right
from conformance.judging.oracles.optimizer_calls import (
    require_one_averager_call,
    require_own_entries,
    require_right_with_rates,
)
from conformance.judging.oracles.optimizer_gradients import construction, takes_averager
from conformance.judging.oracles.optimizer_in_half import (
    require_kept_in_half,
    require_right_in_half,
)
from conformance.judging.oracles.optimizer_steps import is_due, result, steps
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.closure_losses import is_same_loss, loss_of
from conformance.scenarios.hash_seeds import OPTIMIZER as HASH_SEEDS
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
    SCHEDULED,
    SUBGROUPS,
    UNEVEN,
    UNUSED,
    ZEROED,
    setting,
)
from conformance.scenarios.optimizer_closures import CLOSURE_IN_PARTS
from conformance.scenarios.optimizer_in_half import HALF
from conformance.scenarios.optimizer_states import SMALL_CHANGES, TENSOR_RATES
from conformance.subjects.claims import Claims

NO_AVERAGER = "it takes no averager"
NO_ZEROS = "zero_grad(set_to_none=False) is not judged: zero_grad() has no such parameter"
BASIC = ("15.1", "15.2", "15.3")


@rule(
    "15.1",
    "Steps as the local optimizer does",
    on=(PLAIN, ADAM),
    owns=(PLAIN, ADAM),
    certifies_machine=True,
    source="torch documentation, PostLocalSGDOptimizer and ZeroRedundancyOptimizer: each step is "
    "the wrapped optimizer's",
    remedy="step(): it steps every parameter once, with its own gradient; the partition of "
    "parameters, and the rank that sends each",
)
def local_steps(run: Run, claims: Claims, found: Found) -> None:
    """Until the first average, each step gives the parameters that the wrapped optimizer alone
    gives, on every rank.

    With an averager that is each rank's own optimizer on its own gradients. Without one it is one
    optimizer on all parameters, on gradients that are the same on all ranks, or on the mean of the
    ranks' own gradients if the subject claims ``averages``. SGD with momentum is exact to the bit.
    Adam on random gradients may differ by the roundings of its operations.
    """
    if run.scenario.variant == "adam" and not construction(run)["takes_any"]:
        found.does_not_apply("it takes neither an optimizer nor a class of optimizers")
        return
    until = len(run.scenario.steps) + 1
    if takes_averager(run):
        calls = [event for rank in run.ranks for event in rank.all("asked", averages=True)]
        until = min([setting(run.scenario).warmup, *(event["step"] for event in calls)])
    require_right(run, found, lambda step, _: step < until)


@rule(
    "15.2",
    "Calls the averager once in each step",
    on=(PLAIN,),
    needs=("15.1",),
    source="torch documentation, PostLocalSGDOptimizer; pytorch #74737, averaging too often; "
    "torch.distributed.algorithms.model_averaging.utils, get_params_to_average",
    remedy="one call of average_parameters at the end of step(), independent of the number of "
    "groups and parameters, before gradients are cleared",
)
def asks_once(run: Run, claims: Claims, found: Found) -> None:
    """In each step the averager is called once, after the optimizer's step, with all parameters and
    their gradients.

    Averagers such as torch's leave out parameters whose gradient is None.
    """
    if not takes_averager(run):
        found.does_not_apply(NO_AVERAGER)
        return
    require_one_averager_call(run, found)


@rule(
    "15.3",
    "Its result is post-local SGD",
    on=(PLAIN,),
    needs=("15.1", "15.2"),
    certifies_machine=True,
    source="Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, algorithm 2",
    remedy="the averager is given the parameters themselves, not copies; nothing overwrites its "
    "result",
)
def post_local_sgd(run: Run, claims: Claims, found: Found) -> None:
    """In each step parameters are those of local steps and of the averager's averages; momentum is
    not averaged.

    The averager is the kit's own, so that an error is the wrapper's.
    """
    if not takes_averager(run):
        found.does_not_apply(NO_AVERAGER)
        return
    require_right(run, found)


@rule(
    "15.4",
    "Replicas hold the same bits",
    on=(RANDOM,),
    owns=(RANDOM,),
    needs=BASIC,
    source="torch documentation, ZeroRedundancyOptimizer: broadcasts, to keep all replicas in the "
    "same state",
    remedy="local computation after the step: the result of one rank's step has to be sent from "
    "there to all; params that are read twice: make a list of them first",
)
def replicas(run: Run, claims: Claims, found: Found) -> None:
    """On random gradients the ranks of a group hold the same bits: with an averager after each
    average, without one after each step. Parameters are right up to roundings.

    ``params`` is an iterator that can be read once, as model.parameters() is one; a list, if that
    raises an error, or if the signature says that it is a list or a sequence.
    """
    require_right(run, found)
    if run.world == 1:
        found.does_not_apply("there is one rank")
    plan = setting(run.scenario)
    has_averager = takes_averager(run)
    for rank, step in steps(run):
        if has_averager and not is_due(step, plan.warmup, plan.period):
            continue
        first = run.group(rank)[0]
        for index in range(len(run.scenario.params)):
            found.require(
                torch.equal(result(run, first, step, index), result(run, rank, step, index)),
                f"the bits of rank {first}",
                f"rank {rank}, step {step}: p{index} differs",
            )


@rule(
    "15.5",
    "Parameter groups have their own options",
    on=(GROUPS, HALF),
    owns=(GROUPS,),
    refusable=(HALF,),
    needs=(*BASIC, "15.8"),
    source="torch documentation, torch.optim, Per-parameter options; Optimizer.add_param_group; "
    "pytorch #54736, #59973",
    remedy="options of a group other than the first; add_param_group has to update the wrapped "
    "optimizer and the partition; an iterator of parameters that is read twice; entries of a group "
    "that are no options; zero_grad(), which has to clear an added group, too; options of the "
    "construction, which count in groups that leave them out",
)
def parameter_groups(run: Run, claims: Claims, found: Found) -> None:
    """Each parameter group is stepped with its own learning rate, momentum and weight decay, a
    group from add_param_group from its next step on; parameters in no group keep their values.
    Options that a group leaves out, an added one too, are those of the construction. The
    user's own entries in a group, such as a name, stay there. The groups come in an iterator, or in
    a list as in 15.4. The group from add_param_group has its parameters as an
    iterator, as model.head.parameters() is one, which can be read once.
    Before drawn steps, zero_grad() of the optimizer clears the gradients of all groups. All of it
    holds for parameters of float16 or bfloat16, too, which is drawn, or an error on every rank
    refuses them.

    An optimizer without add_param_group() gets all groups at its construction, here and in other
    rules. The parameters of later ones have no gradients until their step.
    """
    if run.scenario.variant == HALF.variant:
        require_right_in_half(run, found, closed=False)
        return
    require_right(run, found)
    require_own_entries(run, found)


@rule(
    "15.6",
    "A learning-rate schedule takes effect",
    on=(SCHEDULED, SMALL_CHANGES, TENSOR_RATES),
    owns=(SCHEDULED, SMALL_CHANGES, TENSOR_RATES),
    needs=(*BASIC, "15.5"),
    source="torch documentation, torch.optim.lr_scheduler, which writes to param_groups, and fills "
    "learning rates in tensors, as compiled and capturable optimizers have",
    remedy="param_groups have to be the wrapped optimizer's own, or be copied to it before a step; "
    "a learning rate in a tensor may change although it is the same object; rates that are copied "
    "only if they differ by more than some number",
)
def scheduled(run: Run, claims: Claims, found: Found) -> None:
    """The next step uses the learning rate that was written to param_groups, also 0.

    Changes may be small, as schedulers make them: in one run rates change by 10**-6.5 to 10**-3 of
    themselves, and are 10**-7 to 10**-5 at last. A learning rate in a tensor stays a tensor. The
    next step uses the value with which it is filled in place, also in a group that is added. The
    rates of both runs are drawn from the session's seed.
    """
    require_right_with_rates(run, found)


@rule(
    "15.7",
    "Steps with a closure",
    on=(CLOSURE, CLOSURE_IN_PARTS, HALF),
    owns=(CLOSURE, CLOSURE_IN_PARTS),
    refusable=(CLOSURE_IN_PARTS, HALF),
    needs=(*BASIC, "15.9"),
    source="torch documentation, Optimizer.step(closure); a trainer skips a batch whose closure "
    "fails, and goes on after Ctrl-C; Lightning, accumulate_grad_batches, whose closure has the "
    "last micro-batch alone",
    remedy="pass the closure to the wrapped optimizer and return its result; do not wrap step() in "
    "torch.no_grad(); a zero_grad() before the closure, which may add to gradients that are there; "
    "ranks that do not agree on the parameters with gradients after it; put back in a finally "
    "what step() sets, as a guard against a second call; a closure that comes by keyword, which "
    "*args does not hold",
)
def closures(run: Run, claims: Claims, found: Found) -> None:
    """step(closure) calls the closure once, with gradients enabled, before it steps, and returns
    the closure's loss; the averager is called once. Calls are step(closure) and, as by Lightning,
    step(closure=closure) in turns; the first one of each rank is drawn. The second one is left out
    if the parameter has another name: it raises a TypeError in training.

    An exception of a closure comes out of step(), which has changed nothing and called no averager;
    the next step is right. It is an error, KeyboardInterrupt, SystemExit, StopIteration,
    GeneratorExit or BaseException.

    In drawn steps the loss of one rank alone is NaN, an infinity, zero, negative, large or tiny,
    with ordinary gradients, and in one step the gradients of one rank are zeros: the step is like
    any other, and the averager is called on all ranks.

    Drawn steps of a model of float16 or bfloat16, which is drawn, have a closure, too; an error on
    every rank may refuse these models.

    In one more run each rank has gradients of other parameters, as in 15.9. Before half of the
    steps, which are drawn, a backward leaves one half of the gradients; the closure clears nothing,
    and adds the other half. In two drawn steps all closures return None, as those that have no
    return, and leave gradients as ever. An error on every rank may refuse this run.

    It does not apply if step() has no parameter for a closure: a trainer gets a TypeError then. The
    steps of other rules have none either.
    """
    if any(member.first("takes_no_closure") for member in run.ranks):
        found.does_not_apply(NO_CLOSURE)
        return
    note_other_names(run, found)
    if run.scenario.variant == HALF.variant:
        require_right_in_half(run, found, closed=True)
        return
    for member in run.ranks:
        for failed in member.all("failed"):
            found.require(
                failed["same"],
                "the exception that the closure has raised",
                f"rank {member.rank}, step {failed['step']}: {failed['came']} came out",
            )
    for rank, step in steps(run):
        place = f"rank {rank}, step {step}"
        event = run.ranks[rank].first("closure", step=step)
        if event is None:
            found.require(False, "a step with a closure", f"{place}: no record of one")
            continue
        found.checked(1)
        # One entry per call of the closure: whether gradients were enabled in it.
        calls = event["calls"]
        actual = f"{place}: {len(calls)} calls of the closure"
        found.require(len(calls) == 1, "one call of the closure", actual)
        actual = f"{place}: torch.is_grad_enabled() was False"
        found.require(all(calls), "gradients enabled in the closure", actual)
        actual = f"{place}: step returned {event['loss']}"
        group = run.group(rank)
        loss = loss_of(run.scenario, step, group.index(rank), len(group))
        is_same = is_same_loss(event["loss"], loss)
        expected = (
            "None, as the closure returns" if loss is None else f"the closure's loss, {loss:g}"
        )
        found.require(is_same, expected, actual)
    if takes_averager(run):
        require_one_averager_call(run, found)
    require_right(run, found)


@rule(
    "15.8",
    "zero_grad clears all gradients",
    on=(ZEROED,),
    owns=(ZEROED,),
    needs=BASIC,
    source="torch documentation, Optimizer.zero_grad(set_to_none)",
    remedy="zero_grad has to clear all parameters, not this rank's share only, and to pass "
    "set_to_none",
)
def zero_grad(run: Run, claims: Claims, found: Found) -> None:
    """zero_grad() leaves every parameter without a gradient or with zeros;
    zero_grad(set_to_none=False) leaves zeros. This call is not judged if zero_grad() has no such
    parameter: a trainer gets a TypeError then."""
    if run.ranks[0].first("zeroed", takes_zeros=False):
        found.note(NO_ZEROS)
    for rank in run.ranks:
        for event in rank.all("zeroed"):
            place = f"rank {rank.rank}, step {event['step']}"
            call = "zero_grad(set_to_none=False)" if event["keeps"] else "zero_grad()"
            left = ", ".join(f"p{index}" for index in event["left"])
            none = ", ".join(f"p{index}" for index in event["none"])
            actual = f"{place}: {call} left the gradients of {left}"
            found.require(not left, "no gradient, or zeros", actual)
            actual = f"{place}: {call} left None for {none}"
            found.require(not (event["keeps"] and none), "zeros", actual)
    require_right(run, found)


@rule(
    "15.9",
    "Parameters without a gradient are not stepped",
    on=(UNUSED, HALF),
    owns=(UNUSED, HALF),
    refusable=(HALF,),
    needs=BASIC,
    source="torch documentation, Optimizer.zero_grad: a parameter whose gradient is None is not "
    "stepped",
    remedy="a gradient of None that is treated as zeros, so that momentum or weight decay moves "
    "the parameter, as by copies of half precision in float32; "
    "collectives that skip parameters without a gradient; a gradient of zeros that is treated as "
    "None",
)
def unused(run: Run, claims: Claims, found: Found) -> None:
    """A parameter without a gradient keeps its value and its momentum in that step; the others are
    stepped, also if their gradients are zeros on all ranks.

    In two steps those of one parameter are; the steps and the parameters are drawn from the
    session's seed. With an averager, and under the claim ``averages``, a parameter may have a
    gradient on some ranks only; otherwise it has a gradient on all ranks or on none.

    In a model of float16 or bfloat16, which is drawn, with weight decay, a parameter without a
    gradient on any rank keeps its bits; an error on every rank may refuse these models.
    """
    if run.scenario.variant == HALF.variant:
        require_kept_in_half(run, found)
        return
    require_right(run, found)


@rule(
    "15.10",
    "Any process group works",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=BASIC,
    source="torch documentation, torch.distributed.new_group; ranks in a group are not global "
    "ranks",
    remedy="a collective without group=; a rank in the group in place of a global rank, as in "
    "broadcast(src=), or the reverse",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """On a subgroup of WORLD it works with the ranks of the subgroup only."""
    if claims.has("world_only"):
        found.does_not_apply("it claims world_only, and was run on WORLD")
        return
    require_right(run, found)


@rule(
    "15.11",
    "Any dtype works, or is refused",
    on=(DTYPES,),
    owns=(DTYPES,),
    may_refuse=True,
    needs=BASIC,
    source="torch documentation, ZeroRedundancyOptimizer: requires that all parameters are of one "
    "dense type, and raises otherwise",
    remedy="one flat buffer for parameters of several dtypes; or raise an error for them when the "
    "optimizer is made",
)
def dtypes(run: Run, claims: Claims, found: Found) -> None:
    """In a model of float32, float64, float16 and bfloat16 parameters, an empty one among them,
    each is stepped in its own dtype; or an error on every rank refuses the model."""
    require_right(run, found)


@rule(
    "15.12",
    "The step is complete on return",
    on=(ORDERED,),
    owns=(ORDERED,),
    needs=BASIC,
    source="torch documentation, async_op: a collective's result is available after wait()",
    remedy="an asynchronous collective without a wait()",
)
def done(run: Run, claims: Claims, found: Found) -> None:
    """When step() returns, parameters hold the result of the step.

    Peers enter each step when rank 0 has left it or waits for them. A rank that returns without
    waiting therefore fails every time.
    """
    require_right(run, found)


@rule(
    "15.16",
    "Works together with DDP",
    on=(DDP, DDP_VIEWS),
    owns=(DDP, DDP_VIEWS),
    needs=BASIC,
    source="torch documentation, PostLocalSGDOptimizer, ZeroRedundancyOptimizer: examples with "
    "DistributedDataParallel; pytorch #73150",
    remedy="parameters that are replaced by tensors of other strides than DDP saw; gradients that "
    "are read before DDP has averaged them",
)
def with_ddp(run: Run, claims: Claims, found: Found) -> None:
    """Under DDP, which averages gradients, each rank's parameters are those of a local optimizer on
    the mean gradients.

    With an averager DDP averages during the warm-up only. Afterwards ranks step with their own
    gradients and are averaged as in 15.3, which is post-local SGD as a whole.
    """
    require_right(run, found)


@rule(
    "15.17",
    "Ranks may run out of inputs",
    on=(UNEVEN,),
    owns=(UNEVEN,),
    needs=(*BASIC, "15.16"),
    source="torch documentation, Distributed Training with Uneven Inputs Using the Join Context "
    "Manager; ZeroRedundancyOptimizer.join_hook",
    remedy="the join hook's main_hook: it issues the collectives of one step in the order of "
    "step(), and steps this rank's share as well",
)
def uneven(run: Run, claims: Claims, found: Found) -> None:
    """An optimizer with a join_hook trains with DDP under Join on uneven inputs: all ranks complete
    and hold the result of a local optimizer on the mean gradients, in which ranks without an input
    count as zeros."""
    if run.ranks[0].first("not_joinable"):
        found.does_not_apply("it has no join_hook")
        return
    require_right(run, found)


@rule(
    "15.18",
    "Can be used as a torch.optim.Optimizer",
    on=(PLAIN,),
    needs=BASIC,
    level=SHOULD,
    source="torch documentation, torch.optim.Optimizer, torch.optim.lr_scheduler",
    remedy="a subclass of torch.optim.Optimizer calls super().__init__() and shares the groups "
    "and the state of the wrapped optimizer",
)
def is_an_optimizer(run: Run, claims: Claims, found: Found) -> None:
    """It is a torch.optim.Optimizer, a learning-rate scheduler accepts it, and a registered
    post-step hook runs once in each step, after the average; so does a pre-step hook, before it."""
    requirements = {
        "isinstance": "a torch.optim.Optimizer",
        "scheduler": "a scheduler that steps it",
        "hook": "a post-step hook that runs once, at the end of a step",
        "pre_hook": "a pre-step hook that runs once",
    }
    for rank in run.ranks:
        for event in rank.all("as_optimizer"):
            for name, expected in requirements.items():
                found.require(not event[name], expected, f"rank {rank.rank}: {event[name]}")


no_trace = leaves_no_trace("15.19", on=(PLAIN,))

fewer = refuses_fewer_ranks(
    "15.20",
    on=(PLAIN,),
    remedy="check the group's size when the optimizer is made, or in its first step, and raise on "
    "every rank",
)


hash_seeds = right_however_strings_hash("15.42", local_steps, on=(HASH_SEEDS,))

"""Section 17: joins, as in training: numbers of joinables; long epochs, many epochs, interrupts."""

from conformance.judging.common_rules import ON_MORE_RANKS, keeps_no_more, right_beside_own_numbers
from conformance.judging.oracles.join import (
    NOT_A_CONTEXT,
    NOT_A_JOINABLE,
    applies_to_context,
    is_context,
    members,
    parts,
    require_agreement,
    require_gradients,
    require_keywords,
    require_no_hooks,
    require_parameters,
    require_post_hooks,
    require_raised,
    require_steps,
)
from conformance.judging.oracles.join_buffers import require_buffers
from conformance.judging.oracles.join_clipping import Clipping
from conformance.judging.oracles.join_counts import require_same_counts
from conformance.judging.oracles.join_gradients import require_gradients_of_trainers
from conformance.judging.oracles.join_numbers import require_numbers
from conformance.judging.oracles.join_states import (
    computed_states,
    require_last_state,
    require_replicas,
)
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.interrupts import INTERRUPTS
from conformance.scenarios.join_draws import breaks_off, divides_by_all
from conformance.scenarios.joinable import CROWD
from conformance.scenarios.joins_in_training import (
    COUNTS,
    EPOCHS,
    HOOKS_RAISE,
    LONG,
    LONG_EPOCH,
    MANY,
    NUMBERS,
)
from conformance.scenarios.joins_in_training import INTERRUPTS as INTERRUPTED
from conformance.scenarios.kinds_in_clusters import JOINABLE as CLUSTERS
from conformance.scenarios.kinds_in_clusters import JOINABLE_NUMBERS as CLUSTERS_OF_NUMBERS
from conformance.scenarios.probes_of_kinds import JOINABLE as PROBE
from conformance.subjects.claims import Claims

TUTORIAL = (
    "torch documentation, Distributed Training with Uneven Inputs Using the Join Context Manager"
)
GENERIC = "torch documentation, Generic Join Context Manager"
NOTHING_TO_JUDGE = (
    "after even inputs it leaves no gradients that are means or sums, and no state that ranks "
    "replicate"
)


@rule(
    "17.18",
    "Joined ranks add nothing to gradients",
    on=(NUMBERS,),
    owns=(NUMBERS,),
    needs=("17.3",),
    source=f"{TUTORIAL}; DistributedDataParallel.join, divide_by_initial_world_size; "
    "pytorch #42577, #44798",
    remedy="the main hook adds zeros, and never the rank's last gradient; the divisor is the "
    "number of all ranks, or of the training ranks with divide_by_initial_world_size=False; a step "
    "that clips gradients does so by one factor for all parameters, without joined ranks as well",
)
def gradients(run: Run, claims: Claims, found: Found) -> None:
    """A gradient of a joinable is the mean or the sum over the ranks that still have inputs, and a
    mean is divided by the number of all ranks or, with divide_by_initial_world_size=False, by the
    number of these ranks.

    The numbers of inputs are drawn, and some ranks have none. Even inputs show whether gradients
    are means or sums; the rule does not apply if they are neither, or if the joinable leaves none.
    A joinable whose join_hook does not name that argument has one of the two divisors throughout.
    Gradients may be clipped by their norm: by one factor below 1 for all parameters and on all
    ranks, which differs from step to step. That it is also there if all ranks train is judged in
    many contexts (17.26). The bound is (W + m + 2) eps times the mean of magnitudes, for m
    backwards in a step.

    Two contexts with uneven inputs have two or three joinables that the target makes, in a drawn
    order: each is judged by this rule, and by 17.19 and 17.20, as if it were alone.
    """
    if is_context(run):
        found.does_not_apply(NOT_A_JOINABLE)
        return
    require_gradients_of_trainers(run, found)


@rule(
    "17.19",
    "All ranks hold the same model after the join",
    on=(NUMBERS, COUNTS),
    owns=(COUNTS,),
    needs=("17.3",),
    source=f"{GENERIC}, JoinHook.post_hook: DDP's synchronises the final model across processes",
    remedy="a post_hook that hands out the parameters, the buffers and the optimizer's state, on "
    "every rank, and each of them in its own dtype; hooks that find their own joinable, and not "
    "another one of its class in the same context",
)
def replicas(run: Run, claims: Claims, found: Found) -> None:
    """Parameters, buffers, state_dict() and an optimizer's state are the same on all ranks after
    uneven inputs, to the bit, as far as they are after even inputs. So they are if a context has
    two or three joinables of one kind. The buffers of a DDP with
    broadcast_buffers=False may be each rank's own.

    Integers that count up in each step are raised by a drawn number between 2**28 and 2**30 in
    further contexts, as after days of training: float32 has not all integers beyond 2**24. Those of
    int64 are then raised by a drawn number between 2**33 and 2**40, as a count of tokens is: int32
    ends at 2**31. So are whole numbers in float64 that count up, to odd ones: tensors, and numbers
    among the attributes of the joinable that all ranks hold alike after uneven inputs with small
    ones. A joinable that refuses such numbers on even inputs is not judged by them.
    """
    if is_context(run):
        found.does_not_apply(NOT_A_JOINABLE)
    elif run.scenario.variant == COUNTS.variant:
        require_same_counts(run, found)
    else:
        require_replicas(run, found)


@rule(
    "17.20",
    "The model after the join is the last joiner's",
    on=(NUMBERS,),
    needs=("17.19",),
    source=f"{GENERIC}, JoinHook.post_hook, is_last_joiner; horovod #2958",
    remedy="hand out from a rank for which is_last_joiner is true: all others have missed steps",
)
def last_state(run: Run, claims: Claims, found: Found) -> None:
    """The state that all ranks hold after uneven inputs is the one that a rank with the most inputs
    held at the end of its body, to the bit.

    It does not apply to a state that the join computes, which even inputs show.
    """
    if is_context(run):
        found.does_not_apply(NOT_A_JOINABLE)
        return
    require_last_state(run, found)


@rule(
    "17.21",
    "Any number of steps is shadowed",
    on=(LONG, LONG_EPOCH),
    owns=(LONG, LONG_EPOCH),
    needs=("17.3", "17.4"),
    source=f"{TUTORIAL}; torch.distributed.algorithms.join, Join.__exit__, WARN_THRESHOLD: it "
    "warns of 1,000 shadowed steps, and goes on",
    remedy="a limit to the number of shadowed steps, or a count that an epoch leaves behind; a "
    "collective of every hundredth step, as for a log, that no shadow makes",
)
def long(run: Run, claims: Claims, found: Found) -> None:
    """A rank without inputs shadows all steps of an epoch: 100 to 300 in two epochs of the same
    joinables, and 1,001 to 1,400 in a third. A joinable that is judged has 257 to 600 inputs more
    on one rank than on the others. The numbers are drawn."""
    if is_context(run) == (run.scenario.variant == LONG_EPOCH.variant):
        found.does_not_apply(NOT_A_JOINABLE if is_context(run) else NOT_A_CONTEXT)
        return
    for member in members(run):
        require_steps(run, member, found)
        if is_context(run):
            require_post_hooks(run, member, found)


@rule(
    "17.22",
    "Interrupts leave the context at once",
    on=(INTERRUPTED,),
    owns=(INTERRUPTED,),
    needs=("17.10",),
    source="Python documentation, With Statement Context Managers, and BaseException",
    remedy="__exit__ asks whether there is an exception, not whether it is an Exception; it "
    "returns nothing",
)
def interrupts(run: Run, claims: Claims, found: Found) -> None:
    """KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit and BaseException come out of
    the body unchanged, without a wait for other ranks and without a hook; the joinables can be used
    again."""
    if not applies_to_context(run, found):
        return
    for member in members(run):
        if member.context < len(INTERRUPTS):
            require_raised(member, INTERRUPTS[member.context], found)
            require_no_hooks(member, found)
        else:
            require_steps(run, member, found)
            require_post_hooks(run, member, found)


@rule(
    "17.23",
    "Exceptions of hooks come out",
    on=(HOOKS_RAISE,),
    owns=(HOOKS_RAISE,),
    needs=("17.10",),
    source="Python documentation, With Statement Context Managers; pytorch #160602",
    remedy="an except clause around the calls of hooks: the peers of a rank whose hook has failed "
    "wait for it",
)
def hooks_raise(run: Run, claims: Claims, found: Found) -> None:
    """An exception of a main hook or of a post hook comes out of the context unchanged, and a main
    hook that has failed is followed by no post hook; the joinables can be used again."""
    if not applies_to_context(run, found):
        return
    for member in members(run):
        if member.context % 2:
            require_steps(run, member, found)
            require_post_hooks(run, member, found)
            continue
        require_raised(member, "HookFailed", found)
        if member.context == 0:
            posts = [event["joinable"] for event in member.events("post")]
            actual = f"{member}: post hooks of joinables {posts} after the exception"
            found.require(not posts, "no post hook", actual)


@rule(
    "17.24",
    "DDP trains in one context after another",
    on=(EPOCHS,),
    owns=(EPOCHS,),
    needs=("17.7", "17.12"),
    source=f"{TUTORIAL}: one context per epoch, several joinables; "
    "DistributedDataParallel.join, divide_by_initial_world_size",
    remedy="state that an epoch leaves behind: hooks, the first joinable, the number of shadowed "
    "steps, the keyword arguments",
)
def epochs(run: Run, claims: Claims, found: Found) -> None:
    """One DDP beside other joinables, in any order and in 5 to 8 contexts, has the right gradients,
    parameters and buffers in each of them, and all hooks are called as in the first.

    The orders and the numbers of inputs are drawn; in some contexts a rank has no input, and in
    some divide_by_initial_world_size is False. The bounds are those of 17.12.
    """
    if not applies_to_context(run, found):
        return
    for member in members(run):
        by_all = divides_by_all(run.scenario, member.context)
        require_steps(run, member, found)
        require_post_hooks(run, member, found)
        require_gradients(run, member, found, by_all)
        require_parameters(run, member, found, by_all)
        require_buffers(run, member, found)
    require_agreement(run, found)


kept = keeps_no_more("17.25", on=(MANY,), needs=("17.26",))


@rule(
    "17.26",
    "Many contexts are as right as the first ones",
    on=(MANY,),
    owns=(MANY,),
    needs=("17.3", "17.10", "17.20", "17.21", "17.24"),
    since="1.6",
    source=f"{TUTORIAL}: one context per epoch; {GENERIC}",
    remedy="a count of contexts or of steps that overflows; hooks, buffers or counts that each "
    "context leaves on the joinables; a count, or a rate, that is not handed out; a keyword "
    "argument of an earlier context that join_hook() keeps",
)
def many(run: Run, claims: Claims, found: Found) -> None:
    """In each of 100 to 150 contexts of the same joinables all hooks are called as in the first,
    and a joinable that is judged has the gradients, and the state afterwards, of 17.18 to 17.20.
    If its ranks hold one model at the end of the first body, they do so at the end of each body in
    which all have as many inputs, if a join came before it. Models that ranks train by gradients of
    their own, and average now and then, may differ there.

    The number of contexts, their joinables and their inputs, 0 to 4 on each rank, are drawn. One
    context of five, drawn too, ends with an exception, as in 17.10. A joinable gets
    divide_by_initial_world_size=False in about one context of four, and True in another one; a
    context without the argument divides by all ranks, whatever the one before it was given.
    """
    clipping = Clipping()
    computed = {name for part in parts(run, 10) for name in computed_states(part)}
    for part in parts(run, 10):
        if is_context(run):
            for member in members(part):
                if breaks_off(run.scenario, member.context):
                    require_raised(member, "ArithmeticError", found)
                    require_no_hooks(member, found)
                    continue
                require_steps(part, member, found)
                require_post_hooks(part, member, found)
        else:
            require_numbers(part, found, clipping=clipping, computed=computed)
    clipping.settle(found)
    if not found.checks:
        found.does_not_apply(NOTHING_TO_JUDGE)


@rule(
    "17.27",
    "Ranks shadow each other on five to eight ranks, and on any groups",
    on=CLUSTERS,
    owns=CLUSTERS,
    needs=("17.3", "17.4", "17.11"),
    since="1.6",
    source=ON_MORE_RANKS,
    remedy="a count of the ranks that have joined that is kept for four ranks; a constant distance "
    "between the ranks of a group",
)
def on_clusters(run: Run, claims: Claims, found: Found) -> None:
    """On five or seven ranks on nodes of unequal size, six or eight ranks on equal nodes, and
    groups of four and two ranks without a constant distance, ranks without inputs shadow those
    that have some. All of it is drawn."""
    for member in members(run):
        require_steps(run, member, found)
        if is_context(run):
            require_post_hooks(run, member, found)
    require_agreement(run, found)


@rule(
    "17.28",
    "Joined ranks add nothing to gradients on five to eight ranks",
    on=CLUSTERS_OF_NUMBERS,
    owns=CLUSTERS_OF_NUMBERS,
    needs=("17.18", "17.27"),
    presumes=("17.18",),
    since="1.6",
    source=ON_MORE_RANKS,
    remedy="a divisor that is counted for four ranks; a rank that hands out the state to its "
    "neighbour alone",
)
def gradients_on_clusters(run: Run, claims: Claims, found: Found) -> None:
    """On five to eight ranks a gradient of a joinable is the mean or the sum over the ranks that
    still have inputs, as by 17.18. 17.29 judges the model that they hold after the join."""
    if is_context(run):
        found.does_not_apply(NOT_A_JOINABLE)
        return
    require_gradients_of_trainers(run, found, presumed=True)


@rule(
    "17.29",
    "All of five to eight ranks hold the same model after the join",
    on=CLUSTERS_OF_NUMBERS,
    needs=("17.19", "17.28"),
    presumes=("17.19",),
    since="1.6",
    source=ON_MORE_RANKS,
    remedy="a rank that hands out the state to four ranks, or to its neighbour alone",
)
def replicas_on_clusters(run: Run, claims: Claims, found: Found) -> None:
    """On five to eight ranks the parameters, the buffers, state_dict() and an optimizer's state are
    the same on all ranks after uneven inputs, as by 17.19."""
    if is_context(run):
        found.does_not_apply(NOT_A_JOINABLE)
        return
    require_replicas(run, found)


@rule(
    "17.30",
    "Any number of joinables works",
    on=(CROWD,),
    owns=(CROWD,),
    needs=("17.3", "17.4"),
    since="1.6",
    source=f"{GENERIC}, Join: a list of joinables",
    remedy="a list of hooks for a few joinables; hooks that are called for the first of them alone",
)
def crowd(run: Run, claims: Claims, found: Found) -> None:
    """The hooks of each of 5 to 12 joinables are called, in the order of the list, and get the
    keyword arguments of the context. Their number is drawn."""
    if not applies_to_context(run, found):
        return
    for member in members(run):
        require_keywords(run, member, found)
        require_steps(run, member, found)
        require_post_hooks(run, member, found)
    require_agreement(run, found)


own_numbers = right_beside_own_numbers("17.35", (long, many), on=(PROBE,))

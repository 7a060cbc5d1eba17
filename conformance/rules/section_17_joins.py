"""Section 17: joins."""

from conformance.judging.common_rules import leaves_no_trace
from conformance.judging.oracles.join import (
    NOT_A_CONTEXT,
    NOT_A_JOINABLE,
    applies_to_context,
    is_context,
    members,
    require_agreement,
    require_gradients,
    require_keywords,
    require_no_hooks,
    require_notifications,
    require_parameters,
    require_post_hooks,
    require_silent_notifications,
    require_some_post_hook,
    require_steps,
)
from conformance.judging.oracles.join_buffers import require_buffers
from conformance.judging.oracles.join_loops import require_thrown
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.joinable import (
    AGAIN,
    DDP,
    DISABLED,
    KEYWORD,
    ORDERED,
    OUTSIDE,
    PLAIN,
    RAISES,
    SUBGROUPS,
    THROWS,
    THROWS_DDP,
    UNEVEN,
    WRONG,
    ZERO,
    lengths,
)
from conformance.subjects.claims import Claims

TUTORIAL = (
    "torch documentation, Distributed Training with Uneven Inputs Using the Join Context Manager"
)
GENERIC = "torch documentation, Generic Join Context Manager"


@rule(
    "17.1",
    "Even inputs train as without the context",
    on=(PLAIN,),
    owns=(PLAIN,),
    certifies_machine=True,
    source=TUTORIAL,
    remedy="a notify_join_context that waits for what the others have not begun; an __exit__ that "
    "leaves before it has made the last check: there is one more than there are steps",
)
def even(run: Run, claims: Claims, found: Found) -> None:
    """With equally many inputs on all ranks every step is the same as without the context, no main
    hook is called, and the context ends.

    The subject may be a joinable or a context. Ranks issue the same collectives in the same order.
    """
    if is_context(run):
        found.note("judged as a join context")
    else:
        found.note("judged as a joinable, in torch's context")
    for member in members(run):
        require_steps(run, member, found)
    require_agreement(run, found)


@rule(
    "17.2",
    "A joinable notifies the context once and first",
    on=(PLAIN,),
    needs=("17.1",),
    source=f"{GENERIC}, notify_join_context: before the collectives of each iteration",
    remedy="torch's Join.notify_join_context(self) as the first line of the function that takes a "
    "step, not in a part of it that runs twice: the kit runs joinables in torch's context",
)
def notifies(run: Run, claims: Claims, found: Found) -> None:
    """In every step a joinable calls ``Join.notify_join_context(self)`` once, before its first
    collective."""
    if is_context(run):
        found.does_not_apply(NOT_A_JOINABLE)
        return
    for member in members(run):
        require_notifications(member, found)
    if not found.checks:
        found.require(False, "steps on record", "there are none")


@rule(
    "17.3",
    "Ranks without inputs shadow the steps of others",
    on=(UNEVEN, ORDERED),
    owns=(UNEVEN, ORDERED),
    needs=("17.1", "17.2"),
    certifies_machine=True,
    source=f"{GENERIC}, JoinHook.main_hook; Join: hooks are iterated over in the given order",
    remedy="a context: before each shadowed step check whether any rank trains, wait for the "
    "answer, then call all main hooks in the order of the list, also of joinables that are equal, "
    "which a dict would hold once; a joinable: its main hook has to "
    "issue the collectives of a step, on tensors of the same size and dtype",
)
def shadowed(run: Run, claims: Claims, found: Found) -> None:
    """A rank that has run out of inputs calls the main hooks of all joinables, in the order of the
    list, once for each step that another rank still takes; a joinable's main hook issues the
    collectives of its step.

    Inputs differ by one or by a lot, and a rank may have none. Each joinable of the kit has an
    allreduce that shows which ranks took part, in which role, and through which joinable, and all
    of one class are equal, as objects may be that are compared by their settings. In one
    scenario peers enter a context when rank 0 has left it or waits for them. A context that does
    not wait for their answer therefore fails every time.
    """
    for member in members(run):
        require_steps(run, member, found)
    if is_context(run) or run.scenario.name != ORDERED.name:
        require_agreement(run, found)
    else:
        found.does_not_apply(NOT_A_CONTEXT)


@rule(
    "17.4",
    "Post hooks run once and know the last joiners",
    on=(PLAIN, UNEVEN),
    needs=("17.3",),
    source=f"{GENERIC}, JoinHook.post_hook; horovod #2958: join() that named a wrong last rank",
    remedy="a rank is among the last if it has shadowed no step; all post hooks are then called, "
    "on every rank",
)
def post_hooks(run: Run, claims: Claims, found: Found) -> None:
    """When all ranks have joined, every rank calls the post hook of each joinable once, in the
    order of the list; is_last_joiner is true on the ranks with the most inputs, and on no other.

    DDP broadcasts its parameters from one of these ranks.
    """
    if not applies_to_context(run, found):
        return
    for member in members(run):
        require_post_hooks(run, member, found)


@rule(
    "17.5",
    "Keyword arguments reach every join_hook",
    on=(KEYWORD,),
    owns=(KEYWORD,),
    needs=("17.3",),
    source=f"{GENERIC}, Joinable.join_hook: all joinables are forwarded the same kwargs",
    remedy="a context: join_hook(**kwargs) for each joinable; a joinable: join_hook(self, "
    "**kwargs), which picks its own arguments",
)
def keywords(run: Run, claims: Claims, found: Found) -> None:
    """The context passes its keyword arguments to the join_hook of every joinable, and a joinable
    accepts those that are meant for others."""
    for member in members(run):
        require_keywords(run, member, found)
        require_steps(run, member, found)


@rule(
    "17.6",
    "The first joinable notifies for all",
    on=(UNEVEN,),
    needs=("17.3",),
    source=f"{GENERIC}, notify_join_context: vacuous but for the first joinable",
    remedy="the _join_config of joinables: is_first_joinable is true for the first joinable only",
)
def first(run: Run, claims: Claims, found: Found) -> None:
    """notify_join_context issues collectives for the first joinable of the list, and none for the
    others."""
    if not applies_to_context(run, found):
        return
    for member in members(run):
        require_silent_notifications(run, member, found)


@rule(
    "17.7",
    "Joinables can enter another context",
    on=(AGAIN,),
    owns=(AGAIN,),
    needs=("17.3", "17.4"),
    source=f"{TUTORIAL}: one context per epoch",
    remedy="state of the previous context that joinables or the class still hold: the first "
    "joinable, joined ranks, the number of shadowed steps",
)
def again(run: Run, claims: Claims, found: Found) -> None:
    """The same joinables in another context, in another order or with one less, are shadowed as in
    the first; a joinable is right beside others, whether it is first or not."""
    for member in members(run):
        require_steps(run, member, found)
        if is_context(run):
            require_some_post_hook(member, found)
    require_agreement(run, found)


@rule(
    "17.8",
    "A disabled context does nothing",
    on=(DISABLED,),
    owns=(DISABLED,),
    needs=("17.1",),
    source=f"{GENERIC}, enable: disables the context manager's functionality",
    remedy="a collective or a hook that does not depend on whether the context is enabled",
)
def disabled(run: Run, claims: Claims, found: Found) -> None:
    """With enable=False a step has the same collectives as without the context, and no hook is
    called."""
    if not applies_to_context(run, found):
        return
    for member in members(run):
        require_steps(run, member, found)
        own = len(list(member.events("summed")))
        issued = len(list(member.events("collective")))
        expected = f"{own} collectives, those of the joinables"
        found.require(issued == own, expected, f"{member}: {issued} collectives")
        require_no_hooks(member, found)


@rule(
    "17.9",
    "All ranks raise on early termination if requested",
    on=(THROWS, THROWS_DDP),
    owns=(THROWS, THROWS_DDP),
    needs=("17.3",),
    source=f"{GENERIC}, throw_on_early_termination; test_ddp_uneven_inputs_stop_iteration_sync_bn",
    remedy="the rank that runs out has to notify training ranks before it raises; they check "
    "before each step",
)
def throws(run: Run, claims: Claims, found: Found) -> None:
    """With throw_on_early_termination=True all ranks raise as soon as one has run out of inputs
    before others, training ranks before their next step; with equally many inputs none raises.

    This includes DDP with a collective in its forward that no rank shadows, as in SyncBatchNorm,
    which needs CUDA.
    """
    if run.scenario.name == THROWS_DDP.name and not applies_to_context(run, found):
        return
    for member in members(run):
        require_thrown(member, found)


@rule(
    "17.10",
    "Exceptions leave the context at once",
    on=(RAISES,),
    owns=(RAISES,),
    needs=("17.1",),
    source="test_ddp_uneven_input_exception; Python documentation, With Statement Context Managers",
    remedy="__exit__ returns nothing and calls nothing if it is given an exception: peers may "
    "never come to shadow",
)
def exceptions(run: Run, claims: Claims, found: Found) -> None:
    """An exception that is raised in the body comes out unchanged, without a wait for other ranks
    and without a hook; the joinables can be used again."""
    if not applies_to_context(run, found):
        return
    for member in members(run):
        # The body raises in the first context only.
        if member.context:
            require_steps(run, member, found)
            continue
        event = next(member.events("came_out"), None) or {"error": "", "same": False}
        error = event["error"] or "nothing came out: it was swallowed"
        same = bool(event["same"])
        found.require(same, "the exception that was raised", f"{member}: {error}")
        require_no_hooks(member, found)


@rule(
    "17.11",
    "Any process group works",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=("17.3", "17.4"),
    source="torch documentation, torch.distributed.new_group; ranks in a group are not global "
    "ranks",
    remedy="a collective without group=; a joinable whose join_process_group is not the group "
    "that it uses",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """On a subgroup the ranks of that group shadow each other, independent of other groups."""
    for member in members(run):
        require_steps(run, member, found)
        if is_context(run):
            require_some_post_hook(member, found)
        for event in member.events("collective"):
            found.require(
                set(event["group"]) <= set(member.group),
                f"collectives of ranks {member.group} only",
                f"{member}: {event['what']} on ranks {event['group']}",
                "join_process_group is WORLD, or a group= is missing",
            )
    require_agreement(run, found)


@rule(
    "17.12",
    "DDP trains on uneven inputs",
    on=(DDP,),
    owns=(DDP,),
    needs=("17.3", "17.4", "17.5"),
    source=f"{TUTORIAL}; DistributedDataParallel.join, divide_by_initial_world_size; "
    "pytorch #42577, #44798",
    remedy="the values that joined ranks add to the allreduce of DDP's notification, by whose sum "
    "DDP divides; the rank that is taken for the last",
)
def ddp(run: Run, claims: Claims, found: Found) -> None:
    """A gradient of DDP is the sum over the ranks with inputs, divided by the number of all ranks
    or, with divide_by_initial_world_size=False, by the number of these; afterwards all ranks hold
    the parameters and buffers of a rank that joined last.

    A count in int64 and a mask of bools are among the buffers; each forward changes them by numbers
    that are drawn for each rank.

    With a communication hook torch's DDP leaves the division to the hook in both cases.
    """
    if not applies_to_context(run, found):
        return
    for member in members(run):
        # The scenario repeats its contexts with divide_by_initial_world_size=False.
        by_all = member.context < len(lengths(run.scenario, member.group)) // 2
        require_gradients(run, member, found, by_all)
        require_parameters(run, member, found, by_all)
        require_buffers(run, member, found)


@rule(
    "17.13",
    "ZeroRedundancyOptimizer trains on uneven inputs",
    on=(ZERO,),
    owns=(ZERO,),
    needs=("17.6", "17.12"),
    source="test_zero_join_cpu; torch documentation, Join([model, optim])",
    remedy="the order of main hooks if joinables are of several classes; a joinable that is left "
    "out",
)
def zero(run: Run, claims: Claims, found: Found) -> None:
    """With DDP, a joinable that sets a joined rank's gradients, and ZeroRedundancyOptimizer in one
    context, parameters on all ranks are those of a local optimizer on the same mean gradients.

    DDP leaves a joined rank with the gradients of its own last step, and ZeroRedundancyOptimizer
    would update its share by them. As in upstream's test, a joinable between the two sets the
    right ones.
    """
    if not applies_to_context(run, found):
        return
    for member in members(run):
        require_parameters(run, member, found, by_all=True)


@rule(
    "17.14",
    "Wrong arguments are refused",
    on=(WRONG,),
    owns=(WRONG,),
    needs=("17.1",),
    source=f"{GENERIC}: at least one joinable, all on one process group",
    remedy="check the list in the constructor",
)
def wrong(run: Run, claims: Claims, found: Found) -> None:
    """An empty list, joinables on different process groups, and objects that are no joinables raise
    an exception."""
    if not applies_to_context(run, found):
        return
    for rank in run.ranks:
        for event in rank.all("given"):
            came_out = rank.first("came_out", step=event["step"])
            has_raised = bool(came_out and came_out["error"])
            actual = f"rank {rank.rank}: {event['what']}: the context was entered and left"
            found.require(has_raised, "an exception", actual)


no_trace = leaves_no_trace(
    "17.15",
    on=(PLAIN,),
    remedy="warnings.simplefilter() without warnings.catch_warnings(); a seed, a setting or a "
    "patched function that is not put back",
)


@rule(
    "17.16",
    "Steps outside cost the same as before",
    on=(OUTSIDE,),
    owns=(OUTSIDE,),
    needs=("17.1",),
    level=SHOULD,
    source=f"{GENERIC}, _JoinConfig: disabled if the caller is not in a join context manager",
    remedy="restore the _join_config of joinables when the context ends, by an exception as well",
)
def outside(run: Run, claims: Claims, found: Found) -> None:
    """A step after the context issues as many collectives as a step before it.

    Joinables that stay enabled notify a context that has ended. Every later step then has one more
    allreduce, of DDP two or three, and a step on one rank only, such as an evaluation, waits for
    ranks that never come.
    """
    if not applies_to_context(run, found):
        return
    for rank in run.ranks:
        before: dict[str, int] = {}
        count = 0
        for event in rank.events:
            if event["event"] == "collective":
                count += 1
            elif event["event"] == "outside" and event["at"] == "begin":
                count = 0
            elif event["event"] == "outside":
                usual = before.setdefault(event["name"], count)
                actual = f"rank {rank.rank}, a step of {event['name']} {event['when']}: {count}"
                expected = f"{usual} collectives, as before"
                found.require(count == usual, expected, actual, "its joinables stay enabled")


@rule(
    "17.17",
    "Shadowing ranks do not notify",
    on=(UNEVEN,),
    needs=("17.3",),
    level=SHOULD,
    source="torch.distributed.optim.ZeroRedundancyOptimizer, whose main hook is its step(), which "
    "notifies",
    remedy="disable the joinables (their _join_config) before the first main hook is called",
)
def silent(run: Run, claims: Claims, found: Found) -> None:
    """While a rank shadows, its first joinable is not marked as the first of an enabled context.

    A main hook that takes a step would otherwise notify as if this rank still trained, and
    collectives of ranks no longer match: a ZeroRedundancyOptimizer that is alone or first in
    torch's context hangs.
    """
    if not applies_to_context(run, found):
        return
    for member in members(run):
        for event in member.events("main"):
            number = event["joinable"]
            actual = f"{member}: joinable {number} is enabled and first in its main hook"
            found.require(not event["would_notify"], "a joinable that does not notify", actual)
    if not found.checks:
        found.lacks_evidence("no rank shadows another")

"""Section 17: joins."""

import torch

from conformance.judging.oracles.join import (
    Event,
    _agreed,
    _came_out,
    _contexts,
    _divided,
    _gradient,
    _is_context,
    _is_last,
    _last,
    _said_alike,
    _same,
    _steps,
    _trained,
)
from conformance.judging.rule import SHOULD, rule
from conformance.judging.side_effects import left_behind
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.joinable import (
    AGAIN,
    DDP,
    DISABLED,
    KEYWORD,
    KEYWORDS,
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
    order,
)
from conformance.subjects.claims import Claims

OF_A_CONTEXT = "it is a joinable: this speaks of the context"
OF_A_JOINABLE = "it is a join context: this speaks of joinables"
TUTORIAL = "torch documentation, Distributed Training with Uneven Inputs Using the Join Context Manager"
GENERIC = "torch documentation, Generic Join Context Manager"


@rule(
    "17.1",
    "Even inputs",
    on=(PLAIN,),
    owns=(PLAIN,),
    certifies_machine=True,
    source=TUTORIAL,
    remedy="notify_join_context, which need not wait; __exit__, which asks once more than there are steps",
)
def even(run: Run, claims: Claims, found: Found) -> None:
    """With as many inputs on all ranks, every step is what it is without the context, no main hook is called, and the context
    ends.

    Whether it is a joinable or a context, ranks issue the same collectives in the same order.
    """
    found.note("judged as a join context" if _is_context(run) else "judged as a joinable, in torch's context")
    for at in _contexts(run):
        _steps(run, at, found)
    _agreed(run, found)


@rule(
    "17.2",
    "A joinable says that it trains, once and first",
    on=(PLAIN,),
    needs=("17.1",),
    source=f"{GENERIC}, notify_join_context: before the collectives of each iteration",
    remedy="Join.notify_join_context(self) as the first line of what takes a step; not in a part of it that runs twice",
)
def notifies(run: Run, claims: Claims, found: Found) -> None:
    """In every step a joinable calls ``Join.notify_join_context(self)`` once, before its first collective."""
    if _is_context(run):
        found.does_not_apply(OF_A_JOINABLE)
        return
    for at in _contexts(run):
        steps: list[list[Event]] = []
        for event in at.all("takes", "says", "collective", "leaving"):
            if event["event"] in ("takes", "leaving"):
                steps.append([])
            elif steps:
                steps[-1].append(event)
        for number, events in enumerate(steps[:-1]):
            said = [event for event in events if event["event"] == "says" and event["own"]]
            what = f"{at}, step {number}: {len(said)} times"
            if found.require(len(said) == 1, "one call of notify_join_context with itself", what):
                before = [event["what"] for event in events[: events.index(said[0])] if event["event"] == "collective"]
                found.require(not before, "no collective before it", f"{at}, step {number}: {', '.join(before)} before it")
    if not found.checks:
        found.require(False, "steps on record", "there are none")


@rule(
    "17.3",
    "The steps of others are shadowed",
    on=(UNEVEN, ORDERED),
    owns=(UNEVEN, ORDERED),
    needs=("17.1", "17.2"),
    certifies_machine=True,
    source=f"{GENERIC}, JoinHook.main_hook; Join: hooks are iterated over in the given order",
    remedy="a context: ask before each shadowed step whether anybody trains, wait for the answer, then call all main hooks in the "
    "order of the list; a joinable: its main hook has to issue what a step does, on tensors of the same size and dtype",
)
def shadowed(run: Run, claims: Claims, found: Found) -> None:
    """A rank that has run out of inputs calls the main hooks of all joinables, in the order of the list, once for each step that
    another rank still takes. A joinable's main hook issues the collectives of its step.

    Inputs differ by one, or by a lot, and a rank has none. Each joinable of the kit has an allreduce that says which ranks took
    part in it as what, and by which joinable. Once, peers enter a context when rank 0 has left it or waits for them: one that
    does not wait for their answer is found out every time.
    """
    for at in _contexts(run):
        _steps(run, at, found)
    if _is_context(run) or run.scenario.name != ORDERED.name:
        _agreed(run, found)
    else:
        found.does_not_apply(OF_A_CONTEXT)


@rule(
    "17.4",
    "Post hooks, and who is last",
    on=(PLAIN, UNEVEN),
    needs=("17.3",),
    source=f"{GENERIC}, JoinHook.post_hook; horovod #2958: join() that named a wrong last rank",
    remedy="a rank is among the last if it has shadowed no step; all post hooks are called then, on every rank",
)
def post_hooks(run: Run, claims: Claims, found: Found) -> None:
    """When all ranks have joined, every rank calls the post hook of each joinable once, in the order of the list; is_last_joiner
    is true on the ranks that had the most inputs, and on no other.

    DDP broadcasts its parameters from one of these.
    """
    if not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for at in _contexts(run):
        events = list(at.all("summed", "main", "post"))
        posts = [event for event in events if event["event"] == "post"]
        called, wanted = [event["joinable"] for event in posts], [*order(run.scenario, at.number)]
        found.require(called == wanted, f"post hooks of joinables {wanted}, in this order", f"{at}: post hooks of joinables {called}")
        found.require(events[len(events) - len(posts) :] == posts, "post hooks after the last step", f"{at}: one before it")
        for event in posts:
            cause = "is_last_joiner is the same on all ranks" if len(set(at.inputs)) > 1 and _said_alike(run, at.number) else ""
            _is_last(at, event, found, cause)


@rule(
    "17.5",
    "Keyword arguments",
    on=(KEYWORD,),
    owns=(KEYWORD,),
    needs=("17.3",),
    source=f"{GENERIC}, Joinable.join_hook: all joinables are forwarded the same kwargs",
    remedy="a context: join_hook(**kwargs) for each joinable; a joinable: join_hook(self, **kwargs), and take its own out of them",
)
def keywords(run: Run, claims: Claims, found: Found) -> None:
    """Keyword arguments of the context are handed on to the join_hook of every joinable, and a joinable takes some that are meant
    for others."""
    for at in _contexts(run):
        asked = {event["joinable"]: event["kwargs"] for event in at.all("asked")}
        for joinable in order(run.scenario, at.number) if _is_context(run) else (0,):
            got = asked.get(joinable)
            if found.require(got is not None, "a call of join_hook", f"{at}: join_hook of joinable {joinable} was not called"):
                assert got is not None
                for name, value in KEYWORDS.items():
                    said = f"{name}={got[name]}" if name in got else f"no {name}"
                    what = f"{at}: join_hook of joinable {joinable} got {said}"
                    found.require(got.get(name) == repr(value), f"{name}={value!r}", what)
        _steps(run, at, found)


@rule(
    "17.6",
    "One joinable speaks for all",
    on=(UNEVEN,),
    needs=("17.3",),
    source=f"{GENERIC}, notify_join_context: vacuous but for the first joinable",
    remedy="what a joinable is told (its _join_config): is_first_joinable is true for the first one alone",
)
def first(run: Run, claims: Claims, found: Found) -> None:
    """notify_join_context issues collectives for the first joinable of the list, and none for the others."""
    if not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for at in _contexts(run):
        notifying, said = -1, 0
        for event in at.all("notifies", "collective", "notified"):
            if event["event"] == "notified":
                is_first = notifying == order(run.scenario, at.number)[0]
                found.require(is_first or not said, "no collective", f"{at}: {said} in the notification of joinable {notifying}")
            notifying, said = event.get("joinable", notifying), said + 1 if event["event"] == "collective" else 0


@rule(
    "17.7",
    "A context can be entered again",
    on=(AGAIN,),
    owns=(AGAIN,),
    needs=("17.3", "17.4"),
    source=f"{TUTORIAL}: one context per epoch",
    remedy="what joinables or the class still hold of the context before: who was first, who had joined, how many steps were shadowed",
)
def again(run: Run, claims: Claims, found: Found) -> None:
    """The same joinables in another context, in another order or with one less, are shadowed as in the first; a joinable is right
    beside others, first or not."""
    for at in _contexts(run):
        _steps(run, at, found)
        if _is_context(run):
            _last(at, found)
    _agreed(run, found)


@rule(
    "17.8",
    "enable=False",
    on=(DISABLED,),
    owns=(DISABLED,),
    needs=("17.1",),
    source=f"{GENERIC}, enable: disables the context manager's functionality",
    remedy="a collective or a hook that does not ask whether the context is enabled",
)
def disabled(run: Run, claims: Claims, found: Found) -> None:
    """With enable=False a step has the collectives that it has without the context and no more, and no hook is called."""
    if not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for at in _contexts(run):
        _steps(run, at, found)
        own, issued = len(list(at.all("summed"))), len(list(at.all("collective")))
        found.require(issued == own, f"{own} collectives, those of the joinables", f"{at}: {issued} collectives")
        hooks = [f"{event['event']}_hook of joinable {event['joinable']}" for event in at.all("main", "post")]
        found.require(not hooks, "no hook", f"{at}: {', '.join(hooks)}")


@rule(
    "17.9",
    "throw_on_early_termination",
    on=(THROWS, THROWS_DDP),
    owns=(THROWS, THROWS_DDP),
    needs=("17.3",),
    source=f"{GENERIC}, throw_on_early_termination; test_ddp_uneven_inputs_stop_iteration_sync_bn",
    remedy="the rank that runs out has to tell those that train, before it raises itself; they ask before each step",
)
def throws(run: Run, claims: Claims, found: Found) -> None:
    """With throw_on_early_termination=True all ranks raise as soon as one has run out of inputs before others: those that train,
    before their next step. With as many inputs on all, none raises.

    DDP too, with a collective in its forward that nobody shadows, as SyncBatchNorm has, which needs CUDA.
    """
    if run.scenario.name == THROWS_DDP.name and not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for at in _contexts(run):
        least, error = min(at.inputs), _came_out(at)
        took = len(list(at.all("took")))
        if at.most > least:
            found.require(bool(error), "an exception on every rank", f"{at}: it left the context without one")
        else:
            found.require(not error, "no exception", f"{at}: {error}")
        found.require(took == least, f"{least} steps", f"{at}: {took} steps")


@rule(
    "17.10",
    "Exceptions come out at once",
    on=(RAISES,),
    owns=(RAISES,),
    needs=("17.1",),
    source="test_ddp_uneven_input_exception; Python documentation, With Statement Context Managers",
    remedy="__exit__ returns nothing and calls nothing where it is given an exception: peers may never come to shadow",
)
def exceptions(run: Run, claims: Claims, found: Found) -> None:
    """An exception that is raised in the body comes out as it is, without waiting for other ranks and without a hook being called;
    the joinables can be used again."""
    if not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for at in _contexts(run):
        if at.number:
            _steps(run, at, found)
            continue
        event = next(at.all("came_out"), None)
        came = event["error"] if event and event["error"] else "nothing came out: it was swallowed"
        found.require(bool(event and event["same"]), "the exception that was raised", f"{at}: {came}")
        hooks = [f"{event['event']}_hook of joinable {event['joinable']}" for event in at.all("main", "post")]
        found.require(not hooks, "no hook", f"{at}: {', '.join(hooks)}")


@rule(
    "17.11",
    "Any group",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=("17.3", "17.4"),
    source="torch documentation, torch.distributed.new_group; ranks in a group are not global ranks",
    remedy="a collective without group=; a joinable whose join_process_group is not the group that it works on",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """On a subgroup, whoever trains there is shadowed by the ranks of that group, whatever other groups do."""
    for at in _contexts(run):
        _steps(run, at, found)
        if _is_context(run):
            _last(at, found)
        for event in at.all("collective"):
            others = sorted({*event["group"]} - {*at.group})
            what = f"{at}: {event['what']} on ranks {event['group']}"
            found.require(not others, f"collectives of ranks {at.group} alone", what, "join_process_group is WORLD, or a group= is missing")
    _agreed(run, found)


@rule(
    "17.12",
    "DDP as it is",
    on=(DDP,),
    owns=(DDP,),
    needs=("17.3", "17.4", "17.5"),
    source=f"{TUTORIAL}; DistributedDataParallel.join, divide_by_initial_world_size; pytorch #42577, #44798",
    remedy="what joined ranks add to the allreduce of DDP's notification, by whose sum it divides; which rank is said to be last",
)
def ddp(run: Run, claims: Claims, found: Found) -> None:
    """DDP's gradients are the sum over the ranks that have inputs, divided by the number of all ranks, or with
    divide_by_initial_world_size=False by the number of those; afterwards all ranks hold the parameters and buffers of one that
    came last.

    With a communication hook torch's DDP leaves the division to the hook, whatever divide_by_initial_world_size says.
    """
    if not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for at in _contexts(run):
        by_all = at.number < len(lengths(run.scenario, at.group)) // 2
        for step in range(at.own):
            for index in range(len(run.scenario.params)):
                right, bound = _gradient(run, at, step, index, by_all)
                where = f"{at}, step {step}, gradient of p{index}"
                got = at.rank.tensors.get(f"{at.number}/{step}/grad/p{index}")
                unknown = "" if by_all else "DDP divides by the sum of what all ranks say where it notifies: joined ranks have to say 0"
                _same(found, got, right, bound, where, _divided(run, at, step, index), unknown)
        _trained(run, at, found, by_all)
        buffer = at.rank.tensors.get(f"{at.number}/buffer")
        _same(found, buffer, torch.tensor([float(at.most)]).double(), 0.0, f"{at}, the buffer that counts steps")


@rule(
    "17.13",
    "ZeroRedundancyOptimizer as it is",
    on=(ZERO,),
    owns=(ZERO,),
    needs=("17.6", "17.12"),
    source="test_zero_join_cpu; torch documentation, Join([model, optim])",
    remedy="the order of main hooks, where joinables are of several classes; one of them that is left out",
)
def zero(run: Run, claims: Claims, found: Found) -> None:
    """With DDP, what sets a joined rank's gradients, and ZeroRedundancyOptimizer in one context, parameters are what a local
    optimizer makes of the same mean gradients, on all ranks.

    DDP leaves a joined rank with the gradients of its own last step, by which ZeroRedundancyOptimizer would update its share:
    as upstream's test, this one gives it the right ones by a joinable between the two.
    """
    if not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for at in _contexts(run):
        _trained(run, at, found, by_all=True)


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
    """No joinables, joinables on different process groups, and an object that is no joinable are refused with an exception."""
    if not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for rank in run.ranks:
        for event in rank.all("given"):
            came_out = rank.first("came_out", step=event["step"])
            said = bool(came_out and came_out["error"])
            found.require(said, "an exception", f"rank {rank.rank}: {event['what']}: the context was entered and left")


@rule(
    "17.15",
    "It leaves the process as it was",
    on=(PLAIN,),
    source="torch documentation, reproducibility; the same as 9.1, 9.3, 9.4 and 9.6 of hooks",
    remedy="warnings.simplefilter() without warnings.catch_warnings(); a seed, a setting or a patched function that is not put back",
)
def leaves_no_trace(run: Run, claims: Claims, found: Found) -> None:
    """Random generators, torch's settings, functions of torch and Python, and the process's threads, children and temporary files
    are after it what they were before."""
    left_behind(run, found)


@rule(
    "17.16",
    "Steps outside cost what they did before",
    on=(OUTSIDE,),
    owns=(OUTSIDE,),
    needs=("17.1",),
    level=SHOULD,
    source=f"{GENERIC}, _JoinConfig: disabled if the caller is not in a join context manager",
    remedy="put back what joinables were told (their _join_config) when the context is left, by an exception too",
)
def outside(run: Run, claims: Claims, found: Found) -> None:
    """A step after the context has been left issues as many collectives as one before it was entered.

    Joinables that are left enabled notify a context that is no longer there: every later step has an allreduce more, of DDP two or
    three, and a step on one rank alone, such as an evaluation, waits for ranks that never come.
    """
    if not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for rank in run.ranks:
        before: dict[str, int] = {}
        count = 0
        for event in rank.events:
            count += event["event"] == "collective"
            if event["event"] == "outside" and event["at"] == "begin":
                count = 0
            elif event["event"] == "outside":
                usual = before.setdefault(event["name"], count)
                what = f"rank {rank.rank}, a step of {event['name']} {event['when']}: {count}"
                found.require(count == usual, f"{usual} collectives, as before", what, "its joinables are left enabled")


@rule(
    "17.17",
    "Who shadows notifies nobody",
    on=(UNEVEN,),
    needs=("17.3",),
    level=SHOULD,
    source="torch.distributed.optim.ZeroRedundancyOptimizer, whose main hook is its step(), which notifies",
    remedy="disable the joinables (their _join_config) before the first main hook is called",
)
def silent(run: Run, claims: Claims, found: Found) -> None:
    """While a rank shadows, its first joinable is not told that it is the first of an enabled context.

    A main hook that takes a step notifies then as if this rank still trained, and nothing fits any more: a
    ZeroRedundancyOptimizer that is alone in torch's context, or first, hangs.
    """
    if not _is_context(run):
        found.does_not_apply(OF_A_CONTEXT)
        return
    for at in _contexts(run):
        for event in at.all("main"):
            what = f"{at}: joinable {event['joinable']} is enabled and first in its main hook"
            found.require(not event["would_notify"], "it would not notify", what)
    if not found.checks:
        found.does_not_apply("no rank shadows any")

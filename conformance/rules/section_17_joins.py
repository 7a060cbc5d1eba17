"""Section 17: joins."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from conformance.claims import Claims
from conformance.fingerprint import disagreement
from conformance.kinds.joinable import (
    AGAIN,
    DDP,
    DISABLED,
    JOINABLES,
    KEYWORD,
    KEYWORDS,
    LEARNING_RATE,
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
from conformance.leftovers import left_behind
from conformance.record import RankRecord
from conformance.rulebook import SHOULD, rule
from conformance.run import Run, fed
from conformance.verdict import Found

Event = dict[str, Any]
OF_A_CONTEXT = "it is a joinable: this speaks of the context"
OF_A_JOINABLE = "it is a join context: this speaks of joinables"
TUTORIAL = "torch documentation, Distributed Training with Uneven Inputs Using the Join Context Manager"
GENERIC = "torch documentation, Generic Join Context Manager"


@dataclass(frozen=True)
class At:
    """One rank in one context.

    Attributes:
        rank: its record.
        number: of the context.
        inputs: how many each place of its group has.
        group: the global ranks of the group, by their place.
    """

    rank: RankRecord
    number: int
    inputs: tuple[int, ...]
    group: tuple[int, ...]

    @property
    def own(self) -> int:
        """How many inputs this rank has."""
        return self.inputs[self.group.index(self.rank.rank)]

    @property
    def most(self) -> int:
        return max(self.inputs)

    def all(self, *names: str) -> Iterator[Event]:
        """Yield the context's events of these names, in order."""
        return (event for event in self.rank.events if event["step"] == self.number and event["event"] in names)

    def trains(self, at: int) -> list[int]:
        """Return the ranks that have an input for a step."""
        return [rank for rank, length in zip(self.group, self.inputs, strict=True) if length > at]

    def __str__(self) -> str:
        return f"rank {self.rank.rank}, context {self.number} with inputs {self.inputs}"


@rule(
    "17.1",
    "Even inputs",
    on=(PLAIN,),
    owns=(PLAIN,),
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


def _is_context(run: Run) -> bool:
    """Whether the subject is a context; a run that is judged has come to its end, so that every rank says so."""
    said = {(rank.first("subject") or {}).get("is_context") for rank in run.ranks}
    if len(said) > 1 or None in said:
        raise ValueError(f"ranks do not say what the subject is: {said}")
    return bool(said.pop())


def _contexts(run: Run) -> Iterator[At]:
    """Yield every rank in every context, in the order of the contexts."""
    for number in sorted({event["step"] for rank in run.ranks for event in rank.all("step")}):
        for rank in run.ranks:
            group = run.group(rank.rank)
            planned = lengths(run.scenario, group)
            yield At(rank, number, planned[number], group)


def _steps(run: Run, at: At, found: Found) -> None:
    """Require that in each step of the kit's joinables all ranks of the group take part, each as what it should.

    Beside a joinable that is judged there is one of them, or none.
    """
    joinables = order(run.scenario, at.number) if _is_context(run) else (0,)
    if _is_context(run) or list(at.all("summed")):
        mains, wanted = [event["joinable"] for event in at.all("main")], [*joinables] * (at.most - at.own)
        cause = "main hooks are called in another order than the list's" if sorted(mains) == sorted(wanted) else ""
        found.require(mains == wanted, f"main hooks of joinables {wanted}", f"{at}: main hooks of joinables {mains}", cause)
        for joinable in joinables:
            sums = [event["sums"] for event in at.all("summed") if event["joinable"] == joinable]
            found.require(len(sums) == at.most, f"{at.most} collectives of joinable {joinable}", f"{at}: {len(sums)}")
            for step, got in enumerate(sums[: at.most]):
                trains = at.trains(step)
                rest = [rank for rank in at.group if rank not in trains]
                right = [0] * (2 * JOINABLES)
                right[joinable], right[JOINABLES + joinable] = (_bits(at, ranks) for ranks in (trains, rest))
                expected = f"joinable {joinable} stepped by ranks {trains}, shadowed by ranks {rest}"
                met = {slot % JOINABLES for slot, bits in enumerate(got) if bits}
                cause = (
                    "ranks meet in collectives of different joinables: main hooks in another order than the list's" if len(met) > 1 else ""
                )
                found.require(got == right, expected, f"{at}, step {step}: {_in_words(at, got)}", cause)


def _last(at: At, found: Found) -> None:
    """Require a right post hook of some joinable; 17.4 asks for those of all."""
    posts = list(at.all("post"))
    found.require(bool(posts), "post hooks", f"{at}: none")
    for event in posts:
        _is_last(at, event, found)


def _is_last(at: At, post: Event, found: Found, cause: str = "") -> None:
    right = at.own == at.most
    wrong = f"{at}: is_last_joiner={post['last']} for joinable {post['joinable']}"
    found.require(post["last"] == right, f"is_last_joiner={right}", wrong, cause)


def _bits(at: At, ranks: list[int]) -> int:
    return sum(1 << at.group.index(rank) for rank in ranks)


def _in_words(at: At, sums: list[int]) -> str:
    said = []
    for slot, bits in enumerate(sums):
        ranks = [rank for place, rank in enumerate(at.group) if bits >> place & 1]
        if ranks:
            said.append(f"joinable {slot % JOINABLES} {'shadowed' if slot >= JOINABLES else 'stepped'} by ranks {ranks}")
    return ", ".join(said) or "by no rank"


def _agreed(run: Run, found: Found) -> None:
    differs = disagreement(run)
    found.require(not differs, "the same collectives on all ranks", differs)


def _said_alike(run: Run, number: int) -> bool:
    return len({event["last"] for rank in run.ranks for event in rank.all("post", step=number)}) == 1


def _came_out(at: At) -> str:
    event = next(at.all("came_out"), None)
    return event["error"] if event else "it never came out"


def _gradient(run: Run, at: At, step: int, index: int, by_all: bool) -> tuple[torch.Tensor, float]:
    """Return the right gradient of a step, and how far from it roundings may take one.

    Sums of crafted values are exact, and so are their quotients by 1, 2, and the number that they are multiples of. Any other
    quotient is a product with a rounded reciprocal, on each rank before the sum: two roundings each.
    """
    total, trains, size = _sum(run, at, step, index), at.trains(step), len(at.group)
    divisor = size if by_all else len(trains)
    exact = size <= 4 and (divisor == size or divisor <= 2)
    largest = max(_fed(run, at, rank, step, index).abs().max().item() for rank in trains)
    return total / divisor, 0.0 if exact else (size + 2) * torch.finfo(torch.float32).eps * largest


def _sum(run: Run, at: At, step: int, index: int) -> torch.Tensor:
    return torch.stack([_fed(run, at, rank, step, index) for rank in at.trains(step)]).sum(0)


def _fed(run: Run, at: At, rank: int, step: int, index: int) -> torch.Tensor:
    return fed("crafted", run.scenario.params[index], len(at.group), rank, step, index)


def _trained(run: Run, at: At, found: Found, by_all: bool) -> None:
    """Require that parameters are what all steps make of them, on a rank that has taken them all or joined before."""
    for index in range(len(run.scenario.params)):
        steps = [_gradient(run, at, step, index, by_all) for step in range(at.most)]
        right = -LEARNING_RATE * torch.stack([gradient for gradient, _ in steps]).sum(0)
        bound = sum(bound for _, bound in steps)
        bound += bound and len(steps) * torch.finfo(torch.float32).eps * right.abs().max().item()
        got, name = at.rank.tensors.get(f"{at.number}/parameter/p{index}"), f"{at}, parameter p{index} afterwards"
        joined = "this rank joined early: it holds what it had then" if at.own < at.most else ""
        _same(found, got, right, bound, name, {joined: _stale(run, at, index, by_all)} if joined else {})


def _stale(run: Run, at: At, index: int, by_all: bool) -> torch.Tensor:
    steps = [_gradient(run, at, step, index, by_all)[0] for step in range(at.own)]
    return -LEARNING_RATE * torch.stack(steps).sum(0) if steps else torch.zeros_like(_sum(run, at, 0, index))


def _divided(run: Run, at: At, step: int, index: int) -> dict[str, torch.Tensor]:
    total = _sum(run, at, step, index)
    return {
        f"divided by {len(at.group)}, the number of all ranks": total / len(at.group),
        f"divided by {len(at.trains(step))}, the number of ranks that train": total / len(at.trains(step)),
        "the sum, not divided": total,
    }


def _same(
    found: Found,
    got: torch.Tensor | None,
    right: torch.Tensor,
    bound: float,
    where: str,
    known: dict[str, torch.Tensor] | None = None,
    unknown: str = "",
) -> None:
    """Require values; ``known`` are those that known mistakes make, by their names; ``unknown`` is the cause of any others."""
    if not found.require(got is not None, "a record", f"{where}: none"):
        return
    assert got is not None
    values = got.reshape(-1).double()
    off = ((values - right).abs() > bound).nonzero()
    cause = next((name for name, value in (known or {}).items() if torch.allclose(values, value, rtol=1e-6, atol=0.0)), unknown)
    at = int(off[0]) if len(off) else 0
    found.require(not len(off), f"{right[at].item():.9g}", f"{where}, index {at}: {values[at].item():.9g}", cause)

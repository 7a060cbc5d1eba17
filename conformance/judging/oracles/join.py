"""Right steps, gradients and parameters of ranks that run out of inputs in a join context.

Steps. Every step of a joinable of the kit has an allreduce of a vector of 2 J integers, where J is
the number of joinables. The rank at place p of its group adds 2**p to slot j if it steps joinable
j, and to slot J + j if its main hook shadows that step. The sum shows which ranks took part, in
which role, and whether they met in collectives of different joinables. In step s the ranks with
more than s inputs train and all others shadow, until the rank with the most inputs has run out.

Gradients under DDP. In step s let T be the ranks that still train, of the W ranks of the group, and
x_q the gradient of rank q. The right gradient is

    sum_{q in T} x_q / D        with D = W if divide_by_initial_world_size, and otherwise D = |T|

After n steps of SGD from zeros the parameters are -lr times the sum of these gradients.

Bounds. The x_q are crafted: their sums are exact, and so are quotients by 1, by 2, and by W, which
all values are multiples of. Any other quotient is a product with a rounded reciprocal, which each
rank may compute before the sum: two roundings for each x_q beside those of the sum. The bound is
then (W + 2) eps max_q |x_q|. The bound of a parameter is the sum of the bounds of its gradients
and, if that is not 0, n eps max |right| for the n updates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from conformance.judging.collective_order import disagreement
from conformance.judging.verdict import Found
from conformance.records.rank_record import IncompleteRecord, RankRecord
from conformance.records.run import Run, fed
from conformance.scenarios.joinable import (
    KEYWORDS,
    LEARNING_RATE,
    group_in_context,
    inputs_in_context,
    order,
)

Event = dict[str, Any]

NOT_A_CONTEXT = "it is a joinable: this rule applies to contexts"
NOT_A_JOINABLE = "it is a join context: this rule applies to joinables"
_WRONG_ORDER = "main hooks are called in another order than the list's"


@dataclass(frozen=True)
class Member:
    """One rank in one context.

    Attributes:
        rank: its record.
        context: the number of the context.
        inputs: the number of inputs of each rank, by its place in the group.
        group: the global ranks of the group, by their place.
    """

    rank: RankRecord
    context: int
    inputs: tuple[int, ...]
    group: tuple[int, ...]

    @property
    def own_inputs(self) -> int:
        return self.inputs[self.group.index(self.rank.rank)]

    @property
    def most_inputs(self) -> int:
        return max(self.inputs)

    def events(self, *names: str) -> Iterator[Event]:
        """Yield the context's events of these names, in order."""
        for event in self.rank.events:
            if event["step"] == self.context and event["event"] in names:
                yield event

    def training(self, step: int) -> list[int]:
        """Return the ranks that have an input for a step."""
        lengths_of_ranks = zip(self.group, self.inputs, strict=True)
        return [rank for rank, length in lengths_of_ranks if length > step]

    def __str__(self) -> str:
        return f"rank {self.rank.rank}, context {self.context} with inputs {self.inputs}"


def is_context(run: Run) -> bool:
    """Return whether the subject is a context, and not a joinable.

    Raises:
        IncompleteRecord: a rank has not recorded it, or ranks disagree.
    """
    recorded = [rank.one("subject")["is_context"] for rank in run.ranks]
    if len(set(recorded)) > 1:
        contexts = [rank.rank for rank, it in zip(run.ranks, recorded, strict=True) if it]
        raise IncompleteRecord(
            "a subject of one kind on all ranks",
            f"it is a context on ranks {contexts} alone, and a joinable on the others",
        )
    return bool(recorded[0])


def applies_to_context(run: Run, found: Found) -> bool:
    """Return whether the subject is a context; if not, the rule does not apply."""
    if not is_context(run):
        found.does_not_apply(NOT_A_CONTEXT)
        return False
    return True


def members(run: Run) -> Iterator[Member]:
    """Yield every rank in every context, in the order of the contexts."""
    for context in sorted({event["step"] for rank in run.ranks for event in rank.all("step")}):
        for rank in run.ranks:
            group = group_in_context(run.scenario, rank.rank, run.world, context)
            if rank.rank in group:
                inputs = inputs_in_context(run.scenario, group, run.world, context)
                yield Member(rank, context, inputs, group)


def contexts_of(run: Run) -> list[int]:
    """Return the numbers of the contexts that the members of the run have entered."""
    return sorted({member.context for member in members(run)})


def members_of(run: Run, context: int) -> Iterator[Member]:
    """Yield every rank of one context."""
    return (member for member in members(run) if member.context == context)


def parts(run: Run, count: int) -> Iterator[Run]:
    """Yield the records of ``count`` contexts at a time, and those of the first beside them.

    Rules look through all events for those of a context: many small records are read sooner.
    """
    steps = [event["step"] for rank in run.ranks for event in rank.all("step")]
    last = max(steps, default=0)
    by_context: list[dict[int, list[Event]]] = []
    for rank in run.ranks:
        events: dict[int, list[Event]] = {}
        for event in rank.events:
            # The kind of subject is recorded before the first context.
            events.setdefault(max(event["step"], 0), []).append(event)
        by_context.append(events)
    for begin in range(1, last + 1, count):
        chosen = [0, *range(begin, min(begin + count, last + 1))]
        ranks = [
            replace(rank, events=[event for at in chosen for event in events.get(at, ())])
            for rank, events in zip(run.ranks, by_context, strict=True)
        ]
        yield replace(run, ranks=ranks)


def joinables(run: Run, member: Member) -> tuple[int, ...]:
    """Return the kit's joinables in a context, in the order of the list.

    The list of a context that is judged holds joinables of the kit only. The list of a joinable
    that is judged holds one of the kit beside it, or none.
    """
    if not is_context(run):
        return (0,)
    return order(run.scenario, run.world, member.context)


def require_steps(run: Run, member: Member, found: Found) -> None:
    """Require that all ranks take part in each step of the kit's joinables, in their right
    roles."""
    if not is_context(run) and not list(member.events("summed")):
        return
    wanted = [*joinables(run, member)] * (member.most_inputs - member.own_inputs)
    called = [event["joinable"] for event in member.events("main")]
    found.require(
        called == wanted,
        f"main hooks of joinables {wanted}",
        f"{member}: main hooks of joinables {called}",
        _WRONG_ORDER if sorted(called) == sorted(wanted) else "",
    )
    for joinable in joinables(run, member):
        _require_sums(member, joinable, found)


def require_notifications(member: Member, found: Found) -> None:
    """Require one notification by the joinable itself in each step, before any collective."""
    # The events of each step, and at the end those that follow the last step.
    steps: list[list[Event]] = []
    for event in member.events("takes", "says", "collective", "leaving"):
        if event["event"] in ("takes", "leaving"):
            steps.append([])
        elif steps:
            steps[-1].append(event)
    for number, events in enumerate(steps[:-1]):
        own = [at for at, event in enumerate(events) if event["event"] == "says" and event["own"]]
        expected = "one call of notify_join_context with itself"
        actual = f"{member}, step {number}: {len(own)} calls"
        if not found.require(len(own) == 1, expected, actual):
            continue
        before = [event for event in events[: own[0]] if event["event"] == "collective"]
        names = ", ".join(event["what"] for event in before)
        actual = f"{member}, step {number}: {names} before the notification"
        found.require(not before, "no collective before the notification", actual)


def require_silent_notifications(run: Run, member: Member, found: Found) -> None:
    """Require that only notifications of the first joinable issue collectives."""
    first = joinables(run, member)[0]
    notifying = -1
    # Only collectives directly before the end of a notification are its own: every other event
    # resets the count.
    collectives = 0
    for event in member.events("notifies", "collective", "notified"):
        if event["event"] == "notified":
            found.require(
                notifying == first or not collectives,
                "no collective",
                f"{member}: {collectives} in the notification of joinable {notifying}",
            )
        notifying = event.get("joinable", notifying)
        collectives = collectives + 1 if event["event"] == "collective" else 0


def require_post_hooks(run: Run, member: Member, found: Found) -> None:
    """Require all post hooks in the order of the list, after the last step, with a right
    argument."""
    events = list(member.events("summed", "main", "post"))
    posts = [event for event in events if event["event"] == "post"]
    called = [event["joinable"] for event in posts]
    wanted = [*joinables(run, member)]
    found.require(
        called == wanted,
        f"post hooks of joinables {wanted}, in this order",
        f"{member}: post hooks of joinables {called}",
    )
    are_last = events[len(events) - len(posts) :] == posts
    found.require(are_last, "post hooks after the last step", f"{member}: one before it")
    values = {e["last"] for rank in run.ranks for e in rank.all("post", step=member.context)}
    is_same = len(values) == 1 and len(set(member.inputs)) > 1
    cause = (
        "every post hook got the same is_last_joiner, although the ranks have different numbers of "
        "inputs"
        if is_same
        else ""
    )
    for event in posts:
        _require_last_joiner(member, event, found, cause)


def require_some_post_hook(member: Member, found: Found) -> None:
    """Require a post hook with a right argument; 17.4 requires those of all joinables."""
    posts = list(member.events("post"))
    found.require(bool(posts), "post hooks", f"{member}: none")
    for event in posts:
        _require_last_joiner(member, event, found)


def require_no_hooks(member: Member, found: Found) -> None:
    """Require that neither a main hook nor a post hook was called."""
    events = member.events("main", "post")
    hooks = [f"{event['event']}_hook of joinable {event['joinable']}" for event in events]
    found.require(not hooks, "no hook", f"{member}: {', '.join(hooks)}")


def require_keywords(run: Run, member: Member, found: Found) -> None:
    """Require that every join_hook got the keyword arguments of the context."""
    calls = {event["joinable"]: event["kwargs"] for event in member.events("asked")}
    for joinable in joinables(run, member):
        hook = f"{member}: join_hook of joinable {joinable}"
        got = calls.get(joinable)
        if got is None:
            found.require(False, "a call of join_hook", f"{hook} was not called")
            continue
        found.checked(1)
        for name, value in KEYWORDS.items():
            text = f"{name}={got[name]}" if name in got else f"no {name}"
            found.require(got.get(name) == repr(value), f"{name}={value!r}", f"{hook} got {text}")


def require_agreement(run: Run, found: Found) -> None:
    """Require the same collectives in the same order on all ranks."""
    differs = disagreement(run)
    found.require(differs is None, "the same collectives on all ranks", differs or "")


def raised(member: Member) -> str:
    """Return the error that came out of the context; empty if the context ended without one."""
    event = next(member.events("came_out"), None)
    return event["error"] if event else "it never came out"


def require_raised(member: Member, name: str, found: Found) -> None:
    """Require that the exception of the body or of a hook came out as it was.

    Args:
        name: of its type.
    """
    event = next(member.events("came_out"), None) or {"error": "", "same": False}
    error = event["error"] or "nothing came out: it was swallowed"
    found.require(bool(event["same"]), f"the {name} that was raised", f"{member}: {error}")


def right_gradient(
    run: Run, member: Member, step: int, index: int, by_all: bool
) -> tuple[torch.Tensor, float]:
    """Return the right gradient of a step, and its bound.

    With ``by_all`` DDP divides by the number of all ranks, otherwise by that of the training ranks.
    """
    size = len(member.group)
    training = member.training(step)
    divisor = size if by_all else len(training)
    right = _sum(run, member, step, index) / divisor
    # Crafted values are multiples of the group size; sums of few of them round nowhere.
    if size <= 4 and (divisor == size or divisor <= 2):
        return right, 0.0
    largest = max(_fed(run, member, rank, step, index).abs().max().item() for rank in training)
    return right, (size + 2) * torch.finfo(torch.float32).eps * largest


def require_gradients(run: Run, member: Member, found: Found, by_all: bool) -> None:
    """Require the right gradients of DDP after every step of this rank."""
    unknown_cause = ""
    if not by_all:
        unknown_cause = (
            "DDP divides by the sum over all ranks in its notification: joined ranks have to add 0"
        )
    for step in range(member.own_inputs):
        total_ranks = len(member.group)
        training_ranks = len(member.training(step))
        for index in range(len(run.scenario.params)):
            right, bound = right_gradient(run, member, step, index, by_all)
            total = _sum(run, member, step, index)
            known = {
                f"divided by {total_ranks}, the number of all ranks": total / total_ranks,
                f"divided by {training_ranks}, the number of training ranks": (
                    total / training_ranks
                ),
                "the sum, not divided": total,
            }
            got = member.rank.tensors.get(f"{member.context}/{step}/grad/p{index}")
            place = f"{member}, step {step}, gradient of p{index}"
            _require_values(found, got, right, bound, place, known, unknown_cause)


def require_parameters(run: Run, member: Member, found: Found, by_all: bool) -> None:
    """Require the parameters after all steps of the context, also on ranks that joined early."""
    for index in range(len(run.scenario.params)):
        gradients = []
        bound = 0.0
        for step in range(member.most_inputs):
            gradient, bound_of_step = right_gradient(run, member, step, index, by_all)
            gradients.append(gradient)
            bound += bound_of_step
        right = -LEARNING_RATE * torch.stack(gradients).sum(0)
        if bound:
            bound += len(gradients) * torch.finfo(torch.float32).eps * right.abs().max().item()
        known = {}
        if member.own_inputs < member.most_inputs:
            own = torch.stack([torch.zeros_like(right), *gradients[: member.own_inputs]]).sum(0)
            known["this rank joined early, and kept its own parameters"] = -LEARNING_RATE * own
        got = member.rank.tensors.get(f"{member.context}/parameter/p{index}")
        place = f"{member}, parameter p{index} afterwards"
        _require_values(found, got, right, bound, place, known)


def require_step_count(member: Member, found: Found) -> None:
    """Require that DDP's buffer, which counts steps, holds their number on every rank."""
    buffer = member.rank.tensors.get(f"{member.context}/buffer")
    right = torch.tensor([float(member.most_inputs)]).double()
    _require_values(found, buffer, right, 0.0, f"{member}, the buffer that counts steps")


def _require_sums(member: Member, joinable: int, found: Found) -> None:
    """Require the sums of one joinable's collective in every step."""
    events = member.events("summed")
    sums = [event["sums"] for event in events if event["joinable"] == joinable]
    most = member.most_inputs
    expected = f"{most} collectives of joinable {joinable}"
    found.require(len(sums) == most, expected, f"{member}: {len(sums)}")
    for step, got in enumerate(sums[:most]):
        training = member.training(step)
        shadowing = [rank for rank in member.group if rank not in training]
        right = [0] * len(got)
        count = len(got) // 2
        right[joinable] = _bits(member, training)
        right[count + joinable] = _bits(member, shadowing)
        met = {slot % count for slot, bits in enumerate(got) if bits}
        cause = ""
        if len(met) > 1:
            cause = (
                "ranks meet in collectives of different joinables: main hooks are called in "
                "another order than the list's"
            )
        found.require(
            got == right,
            f"joinable {joinable} stepped by ranks {training}, shadowed by ranks {shadowing}",
            f"{member}, step {step}: {_describe_sums(member, got)}",
            cause,
        )


def _require_last_joiner(member: Member, post: Event, found: Found, cause: str = "") -> None:
    right = member.own_inputs == member.most_inputs
    actual = f"{member}: is_last_joiner={post['last']} for joinable {post['joinable']}"
    found.require(post["last"] == right, f"is_last_joiner={right}", actual, cause)


def _bits(member: Member, ranks: list[int]) -> int:
    return sum(1 << member.group.index(rank) for rank in ranks)


def _describe_sums(member: Member, sums: list[int]) -> str:
    parts = []
    count = len(sums) // 2
    for slot, bits in enumerate(sums):
        ranks = [rank for place, rank in enumerate(member.group) if bits >> place & 1]
        if ranks:
            role = "shadowed" if slot >= count else "stepped"
            parts.append(f"joinable {slot % count} {role} by ranks {ranks}")
    return ", ".join(parts) or "by no rank"


def _sum(run: Run, member: Member, step: int, index: int) -> torch.Tensor:
    gradients = [_fed(run, member, rank, step, index) for rank in member.training(step)]
    return torch.stack(gradients).sum(0)


def _fed(run: Run, member: Member, rank: int, step: int, index: int) -> torch.Tensor:
    return fed("crafted", run.scenario.params[index], len(member.group), rank, step, index)


def _require_values(
    found: Found,
    got: torch.Tensor | None,
    right: torch.Tensor,
    bound: float,
    place: str,
    known: Mapping[str, torch.Tensor] | None = None,
    unknown_cause: str = "",
) -> None:
    """Require values up to a bound.

    ``known`` holds the results of known mistakes by their names; ``unknown_cause`` explains others.
    """
    if got is None:
        found.require(False, "a record", f"{place}: none")
        return
    found.checked(1)
    values = got.reshape(-1).double()
    # Written so that NaN is wrong: every comparison with it is false.
    wrong = (~((values - right).abs() <= bound)).nonzero()
    if not len(wrong):
        found.checked(1)
        return
    cause = unknown_cause
    for name, value in (known or {}).items():
        if torch.allclose(values, value, rtol=1e-6, atol=0.0):
            cause = name
            break
    at = int(wrong[0])
    actual = f"{place}, index {at}: {values[at].item():.9g}"
    found.require(False, f"{right[at].item():.9g}", actual, cause)

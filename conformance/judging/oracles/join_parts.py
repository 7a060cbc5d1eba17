"""A joinable that trains the same steps in one context and in two, and values that are out of date.

Out of date. A rank that has joined holds values that it no longer updates: those that its steps
change, and its shadows leave as they are. The ranks that train do not know these values, so the
same training has to come out if the rank holds the values of a step earlier. The driver runs a
context with uneven inputs three times, each time with a new joinable: twice as it is, and once with
gradients, and tensors that all ranks hold alike after a join, that go back by a step after the
first shadow. The state of the rank that trains is compared at the end of its body, to the bit, as
far as the first two runs leave the same bits. Other tensors of one rank alone, such as a sum of its
own inputs, may belong to a result of all ranks, and stay as they are.

Two contexts. Even inputs train as without a context, so that N steps in one context are the same as
n steps in one and N - n in the next one: they are the same numbers in the same order, and are
compared to the bit. The driver traces each step: the parameters at its first gradient, the
gradients that autograd computes, the parameters after the step. The first difference decides:

    parameters at the first gradient    the joinable has lost an update, or has made another one
    gradients of autograd               inputs or a loss that follow contexts: no question
    parameters after the step           another update from the same gradients

A join may compute a state, and hand out a part: such as parameters that change in the join, or any
tensor that ranks do not hold alike at the end of an even body. Rates, and the seeds of random
generators, may follow the number of contexts. None of this is judged: hyperparameters of optimizers
show rates, and numbers among the attributes of the joinable show counts, if no optimizer has its
parameters or if it changes gradients after autograd. One rate is none of a number of contexts: if
it changes in each step of the single context, and stays where it was at the join in all steps of
the second context, then the schedule has lost its optimizer. This is required after uneven inputs,
too.
"""

from conformance.judging.oracles.join import Event, Member, members
from conformance.judging.oracles.join_numbers import state_of
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.join_part_draws import (
    FIRST_PART,
    SECOND_PART,
    WHOLE,
    WHOLE_AGAIN,
    part_contexts,
    uneven_contexts,
)

ONE_OBJECT = "the target is one object, and makes no other one"
NOTHING_OUTDATED = (
    "a rank that has joined leaves no gradient as it is, and no other tensor that all ranks hold "
    "alike after a join"
)
NO_PARAMETERS = "it trains no parameters, or its numbers are others each time"
FOLLOWS_CONTEXTS = "inputs, a rate or its state follow the number of contexts, or the join"


def require_nothing_outdated(run: Run, found: Found) -> None:
    """Require that ranks that train depend on nothing that a joined rank no longer updates."""
    if _is_one_object(run, found):
        return
    for uneven in uneven_contexts(run.scenario):
        plain, again, outdated = (
            _of(run, context) for context in (uneven.plain, uneven.again, uneven.outdated)
        )
        names = [
            name for event in outdated[uneven.early].events("outdated") for name in event["names"]
        ]
        if not names:
            continue
        late = 1 - uneven.early
        right = state_of(plain[late], "leaving")
        repeated = state_of(again[late], "leaving")
        got = state_of(outdated[late], "leaving")
        compared = [name for name, value in right.items() if repeated.get(name) == value]
        other = [name for name in compared if got.get(name) != right[name]]
        # Values that the ranks have in common come first: one of them may be sent as it is.
        names.sort(key=lambda name: (name not in other, name.startswith("gradient")))
        found.checked(len(compared) - len(other))
        for name in other:
            more = ", ..." if len(names) > 3 else ""
            found.require(
                False,
                f"{name} as if rank {outdated[uneven.early].rank.rank} had joined with other "
                "values in the tensors that its shadows leave as they are",
                f"{outdated[late]}: {name} depends on them",
                f"one of these is sent, or used in a shadow: {', '.join(names[:3])}{more}",
            )
    if not found.checks:
        found.does_not_apply(NOTHING_OUTDATED)


def require_same_in_parts(run: Run, found: Found) -> None:
    """Require that two contexts train as one, and that a schedule goes on after a join."""
    if _is_one_object(run, found):
        return
    lasting, parameters = Found(), Found()
    _require_lasting_schedules(run, lasting)
    if not lasting.failures:
        _require_parameters(run, parameters)
    for trial in (lasting, parameters):
        found.checked(trial.checks)
        found.failures += trial.failures
    if not found.checks:
        found.does_not_apply(parameters.not_applicable or NO_PARAMETERS)


def _require_parameters(run: Run, found: Found) -> None:
    whole, again, parts = (_traced(run, context) for context in (WHOLE, WHOLE_AGAIN, SECOND_PART))
    # The first part shows the same numbers, unless they are others each time.
    first = _traced(run, FIRST_PART)
    if not _are_alike(whole, again) or not _are_alike(whole, first):
        return
    reason = _reason_to_differ(run)
    for at in sorted(parts[0]):
        here = [(whole[rank][at], parts[rank][at]) for rank in range(run.world)]
        differs_before = [
            rank
            for rank, (one, other) in enumerate(here)
            if None not in (one["before"], other["before"]) and one["before"] != other["before"]
        ]
        if not differs_before and any(one["local"] != other["local"] for one, other in here):
            break
        differs_after = [
            rank for rank, (one, other) in enumerate(here) if one["after"] != other["after"]
        ]
        if not differs_before and not differs_after:
            found.checked(sum(len(one["after"]) for one, _ in here))
            continue
        if reason or any(_may_differ(one, other) for one, other in here):
            break
        rank = (differs_before or differs_after)[0]
        place = "when its first gradient arrives" if differs_before else "afterwards"
        begin = part_contexts(run.scenario)[SECOND_PART].begin
        found.require(
            False,
            f"the parameters of {len(whole[0])} steps in one context",
            f"rank {rank}, step {at}, in a second context that begins with step {begin}: other "
            f"parameters {place}",
            "an update that is pending, momentum or another state is lost between contexts",
        )
        break
    if not found.checks:
        found.does_not_apply(FOLLOWS_CONTEXTS)


def _reason_to_differ(run: Run) -> bool:
    """Whether a join has changed parameters, generators, or tensors that are not alike on ranks."""
    held = [
        (_held(first, "leaving"), _held(second, "begun"))
        for first, second in zip(_of(run, FIRST_PART), _of(run, SECOND_PART), strict=True)
    ]
    digests = [(leaving["digests"], begun["digests"]) for leaving, begun in held]
    changed = {
        name
        for leaving, begun in digests
        for name in {**leaving, **begun}
        if leaving.get(name) != begun.get(name)
    }
    parted = {name for name in changed if len({leaving.get(name) for leaving, _ in digests}) > 1}
    return bool(parted) or any(
        leaving[field] != begun[field]
        for leaving, begun in held
        for field in ("parameters", "generators")
    )


def _may_differ(one: Event, other: Event) -> bool:
    """Whether a step has another rate, or may have one that cannot be seen."""
    if one["settings"] != other["settings"]:
        return True
    is_hidden = not (one["is_seen"] and other["is_seen"]) or (
        one["local"] == other["local"] and one["mean"] != other["mean"]
    )
    return is_hidden and one["numbers"] != other["numbers"]


def _require_lasting_schedules(run: Run, found: Found) -> None:
    """Require that rates that change in each step change in a context after a join, too."""
    whole = _traced(run, WHOLE)
    contexts = [(FIRST_PART, SECOND_PART, [0, 1])]
    # A rank that joins early has taken other steps than the single context has at that place.
    contexts += [(one.plain, one.rest, [1 - one.early]) for one in uneven_contexts(run.scenario)]
    for first, second, ranks in contexts:
        for rank in ranks:
            before, after = _traced(run, first)[rank], _traced(run, second)[rank]
            if not before or not after or not whole[rank]:
                continue
            last = max(before)
            for name, value in before[last]["settings"].items():
                rates = [whole[rank][at]["settings"].get(name) for at in (last, *sorted(after))]
                if rates[0] != value or len(set(rates)) < len(rates):
                    continue
                later = {event["settings"].get(name) for event in after.values()}
                found.require(
                    later != {value},
                    f"{name} that goes on changing in each step, as in one context",
                    f"rank {rank}, context {second}: {name} stays {value}, as at the join before",
                    "a schedule writes to a group that load_state_dict() has replaced",
                )


def _is_one_object(run: Run, found: Found) -> bool:
    is_one = any(list(rank.all("one_object")) for rank in run.ranks)
    if is_one:
        found.does_not_apply(ONE_OBJECT)
    return is_one


def _of(run: Run, context: int) -> list[Member]:
    """Return the ranks in a context, by their place in the group."""
    return [member for member in members(run) if member.context == context]


def _traced(run: Run, context: int) -> list[dict[int, Event]]:
    """Return the traces of a context's steps by their number, for each rank."""
    planned = part_contexts(run.scenario)[context]
    return [
        {
            at: rank.one("traced", step=context, at=at)
            for at in range(planned.begin, planned.begin + inputs)
        }
        for rank, inputs in zip(run.ranks, planned.inputs, strict=True)
    ]


def _held(member: Member, when: str) -> Event:
    return member.rank.one("held", step=member.context, when=when)


def _are_alike(whole: list[dict[int, Event]], other: list[dict[int, Event]]) -> bool:
    """Whether steps have left the same numbers, of one parameter or more."""
    fields = ("before", "local", "after")
    return all(
        event["after"] and all(event[field] == steps[at][field] for field in fields)
        for steps, others in zip(whole, other, strict=True)
        for at, event in others.items()
    )

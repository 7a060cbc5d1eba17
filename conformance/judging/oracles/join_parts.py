"""A joinable that trains the same steps in one context and in several.

Even inputs train as without a context, so that N steps in one context are the same as n steps in
one and N - n in the next one: they are the same numbers in the same order, and are compared to the
bit. They are also the same if an exception has ended a context, or one was disabled: such a context
has no join, and ranks go on with what they hold. throw_on_early_termination stops all ranks before
the same step, also those that have inputs left: what ranks hold alike after each step, they hold
alike after that and the steps that follow. A context in which no rank has an input changes no state
either. The driver traces each step: the parameters at its first gradient, the gradients that
autograd computes, the parameters after the step. The first difference decides:

    parameters at the first gradient    the joinable has lost an update, or has made another one
    gradients of autograd               inputs or a loss that follow contexts: no question
    parameters after the step           another update from the same gradients

A join may compute a state, and hand out a part: such as parameters that change in the join, or any
tensor that ranks do not hold alike at the end of an even body. Rates, and the seeds of random
generators, may follow the number of contexts. None of this is judged: hyperparameters of optimizers
show rates, and numbers among the attributes of the joinable show counts, if no optimizer has its
parameters or if it changes gradients after autograd. ``join_schedules.py`` has what a schedule may
not do.
"""

from itertools import pairwise

from conformance.judging.oracles.join import Event, Member, members, raised
from conformance.judging.oracles.join_schedules import Traces, require_lasting_schedules, traced
from conformance.judging.oracles.join_states import state_of
from conformance.judging.verdict import Failure, Found
from conformance.records.run import Run
from conformance.scenarios.join_loop_draws import DISABLED, ENDS, RAISES, THROWS
from conformance.scenarios.join_part_draws import (
    EMPTIED,
    FIRST_PART,
    INTERRUPTED,
    NOT_EMPTIED,
    SCHEDULE,
    SECOND_PART,
    THROWN,
    WHOLE,
    WHOLE_AGAIN,
    Uneven,
    part_contexts,
    uneven_contexts,
)

ONE_OBJECT = "the target is one object, and makes no other one"
_NUMBERS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_ENDINGS = {
    RAISES: "one that an exception has ended",
    DISABLED: "a disabled one",
    ENDS: "one without inputs",
    THROWS: "one that throw_on_early_termination has ended",
}
LOST = "an update that is pending, momentum or another state is lost between contexts"
EMPTY_LEFT = (
    "a context in which no rank has an input clears a state, or hands out one that no rank has had"
)
LEFT = (
    "a shadowed step leaves a gradient, and the first step of the next context adds to it: clear "
    "gradients in shadowed steps, too, or before each step"
)
NOT_SAVED = (
    "state_dict() lacks a part of the state, such as momentum or a count, or load_state_dict() "
    "leaves it out"
)
STOPPED = "a step that notify_join_context() has stopped is counted, or begun, on some ranks"
NO_PARAMETERS = "it trains no parameters, or its numbers are others each time"
FOLLOWS_CONTEXTS = "inputs, a rate or its state follow the number of contexts, or the join"


def require_same_in_parts(run: Run, found: Found) -> None:
    """Require that several contexts train as one, and that a schedule goes on after a join."""
    if is_one_object(run, found):
        return
    lasting, parameters, thrown, emptied, left = Found(), Found(), Found(), Found(), Found()
    resumed = Found()
    require_lasting_schedules(run, lasting)
    if not lasting.failures:
        _require_parameters(run, parameters)
    if not lasting.failures and not parameters.failures:
        _require_same_state_after_throws(run, thrown)
        _require_same_state_after_empty_context(run, emptied)
        _require_nothing_left_in_gradients(run, left)
        _require_same_after_load(run, resumed)
    for trial in (lasting, parameters, thrown):
        found.checked(trial.checks)
        found.failures += trial.failures
    # What has no parameters, or follows contexts, is judged by the rest only if it fails.
    found.failures += emptied.failures + left.failures + resumed.failures
    if not found.checks:
        found.does_not_apply(parameters.not_applicable or NO_PARAMETERS)


def _require_parameters(run: Run, found: Found) -> None:
    whole, again, first = (traced(run, context) for context in (WHOLE, WHOLE_AGAIN, FIRST_PART))
    # The first part shows the same numbers, unless they are others each time.
    if not _are_alike(whole, again) or not _are_alike(whole, first):
        return
    _require_same_steps(run, whole, (FIRST_PART, SECOND_PART), found)
    if not found.failures:
        _require_same_steps(run, whole, INTERRUPTED, found)
    if not found.failures:
        _require_same_steps(run, whole, EMPTIED, found)
    if not found.failures and _have_thrown(run):
        _require_same_steps(run, whole, THROWN[:2], found)
    if not found.checks:
        found.does_not_apply(FOLLOWS_CONTEXTS)


def _require_same_state_after_throws(run: Run, found: Found) -> None:
    """Require the same state on all ranks at the end of even bodies that follow one in which
    throw_on_early_termination has stopped all ranks, as far as ranks hold it alike after each step
    of contexts that nothing has ended.
    """
    if not _have_thrown(run):
        return
    names: set[str] | None = None
    for context in (WHOLE, SCHEDULE):
        followed = [rank.one("followed", step=context)["digests"] for rank in run.ranks]
        alike = {name for name in followed[0] if len({of.get(name) for of in followed}) == 1}
        names = alike if names is None else names & alike
    for before, context in ((THROWN[0], THROWN[1]), (THROWN[3], THROWN[4])):
        group = of_context(run, context)
        for name in sorted(names or ()):
            held = {m.rank.rank: state_of(m, "leaving").get(name, "none") for m in group}
            right = held[group[0].rank.rank]
            differing = [rank for rank, digest in held.items() if digest != right]
            planned = part_contexts(run.scenario, run.world)[before]
            found.require(
                not differing,
                f"the same {name} on all ranks after even inputs, as if no context had thrown",
                f"{group[0]}, after context {before}, which has thrown with inputs "
                f"{planned.inputs}: {name} differs on ranks {differing}",
                STOPPED,
            )


def _require_same_state_after_empty_context(run: Run, found: Found) -> None:
    """Require that a context in which no rank has an input leaves the state of modules and
    optimizers as it is, as far as ranks hold it alike, and other joins leave it.

    A join may change a state now and then, as in every second context. So the joins of two other
    contexts, after as many steps and as many joins, show what they change.
    """
    # A scenario that brings its own number of ranks has no such contexts.
    if run.scenario.size:
        return
    before, empty, after = EMPTIED[:3]
    changed = _changed_values(run, before, after)
    for pair in pairwise(NOT_EMPTIED):
        changed -= _changed_values(run, *pair)
    held = [_held(member, "leaving")["digests"] for member in of_context(run, before)]
    first = of_context(run, empty)[0]
    for name in sorted(state_of(first, "leaving").keys() & held[0].keys()):
        is_alike = len({of.get(name) for of in held}) == 1
        found.require(
            not is_alike or name not in changed,
            f"{name} as before a context without inputs on any rank",
            f"{first}: it has changed {name}, and other joins do not",
            EMPTY_LEFT,
        )


def _require_nothing_left_in_gradients(run: Run, found: Found) -> None:
    """Require that a context trains the same whether or not ranks that joined early in the one
    before have cleared their gradients since.

    A joinable may keep a gradient for its next step: one is judged if its steps leave none.
    """
    if not all(event["is_cleared"] for steps in traced(run, WHOLE) for event in steps.values()):
        return
    for one in uneven_contexts(run.scenario, run.world):
        _require_same_rest(run, one, found)


def _require_same_rest(run: Run, uneven: Uneven, found: Found) -> None:
    rest = uneven.rest
    again = uneven.rest_again
    # The rank that joined last has made its own last step, and holds the gradients that it leaves.
    if rest is None or not _held(of_context(run, rest)[uneven.late], "begun")["is_cleared"]:
        return
    early = [
        member.rank.rank
        for place, member in enumerate(of_context(run, rest))
        if place != uneven.late and not _held(member, "begun")["is_cleared"]
    ]
    found.failures += _differences(
        run,
        uneven,
        again,
        "the same parameters if gradients are cleared between two contexts, as they are after each "
        "step",
        f"if the kit clears the gradients that ranks {early} held after the join",
        LEFT,
    )


def _require_same_after_load(run: Run, found: Found) -> None:
    """Require that a joinable which has loaded the state of another one, after a join of uneven
    inputs, trains as that one does.
    """
    for one in uneven_contexts(run.scenario, run.world):
        loads = [event for rank in run.ranks for event in rank.all("resumed")]
        loads = [event for event in loads if event["context"] == one.resumed]
        is_loaded = len(loads) == run.world and all(event["is_loaded"] for event in loads)
        if is_loaded and not _has_other_generators(run, one):
            found.failures += _differences(
                run,
                one,
                one.resumed,
                "the same parameters after each step of a new joinable that has loaded the state",
                "in the new one, which each rank has given its own state_dict()",
                NOT_SAVED,
            )


def _has_other_generators(run: Run, uneven: Uneven) -> bool:
    """Whether a generator of a joinable's own draws other numbers after the load, as noise may."""
    if uneven.rest is None or uneven.resumed is None:
        return False
    return any(
        _held(member, "begun")["generators"] != _held(loaded, "begun")["generators"]
        for member, loaded in zip(
            of_context(run, uneven.rest), of_context(run, uneven.resumed), strict=True
        )
    )


def _differences(
    run: Run, uneven: Uneven, other: int | None, expected: str, when: str, cause: str
) -> list[Failure]:
    """Return the first difference between the context after one with uneven inputs, and another
    context with the same steps.
    """
    found = Found()
    if uneven.rest is None or other is None:
        return []
    if not _are_alike(traced(run, uneven.plain), traced(run, uneven.again)):
        return []
    for at, here in _pairs(run, traced(run, other), uneven.rest):
        # What a schedule follows belongs to the state that is loaded.
        if other != uneven.resumed and any(_may_differ(one, two) for one, two in here):
            return []
        fields = ["before"]
        if all(one["local"] == two["local"] for one, two in here):
            fields.append("after")
        differing = [
            rank
            for rank, (one, two) in enumerate(here)
            if any(None not in (one[key], two[key]) and one[key] != two[key] for key in fields)
        ]
        if not differing and len(fields) == 1:
            return []
        inputs = part_contexts(run.scenario, run.world)[uneven.plain].inputs
        found.require(
            not differing,
            expected,
            f"step {at}, after a context with inputs {inputs}: other parameters on ranks "
            f"{differing} {when}",
            cause,
        )
        if differing:
            break
    return found.failures


def _changed_values(run: Run, first_context: int, second_context: int) -> set[str]:
    """Return the tensors that change between two contexts, on any rank, by name."""
    changed: set[str] = set()
    for first, second in zip(
        of_context(run, first_context), of_context(run, second_context), strict=True
    ):
        leaving = _held(first, "leaving")["digests"]
        begun = _held(second, "begun")["digests"]
        changed |= {name for name in leaving | begun if leaving.get(name) != begun.get(name)}
    return changed


def _have_thrown(run: Run) -> bool:
    """Whether an exception has ended the contexts that throw, on all ranks; 17.9 judges this."""
    throwing = (THROWN[0], THROWN[2], THROWN[3])
    # A scenario that brings its own number of ranks has no such contexts.
    return not run.scenario.size and all(
        raised(member) for context in throwing for member in of_context(run, context)
    )


def _require_same_steps(run: Run, whole: Traces, row: tuple[int, ...], found: Found) -> None:
    """Require the steps of a single context in all contexts of a row but the first, up to one that
    may have other numbers.
    """
    for place, context in enumerate(row[1:], 1):
        reason = _reason_to_differ(run, row[: place + 1])
        for at, here in _pairs(run, whole, context):
            differs_before = [
                rank
                for rank, (one, other) in enumerate(here)
                if None not in (one["before"], other["before"]) and one["before"] != other["before"]
            ]
            if not differs_before and any(one["local"] != other["local"] for one, other in here):
                return
            differs_after = [
                rank for rank, (one, other) in enumerate(here) if one["after"] != other["after"]
            ]
            if not differs_before and not differs_after:
                found.checked(sum(len(one["after"]) for one, _ in here))
                continue
            if reason or any(_may_differ(one, other) for one, other in here):
                return
            rank = (differs_before or differs_after)[0]
            moment = "when its first gradient arrives" if differs_before else "afterwards"
            found.require(
                False,
                f"the parameters of {len(whole[0])} steps in one context",
                f"rank {rank}, step {at}, {_described(run, row, place)}: other parameters {moment}",
                STOPPED if row[0] == THROWN[0] else LOST,
            )
            return


def _pairs(run: Run, whole: Traces, context: int) -> list[tuple[int, list[tuple[Event, Event]]]]:
    """Return each step of a context with the step of the single context, for all ranks."""
    parts = traced(run, context)
    return [
        (at, [(whole[rank][at], parts[rank][at]) for rank in range(run.world)])
        for at in sorted(parts[0])
    ]


def _described(run: Run, row: tuple[int, ...], place: int) -> str:
    contexts = [part_contexts(run.scenario, run.world)[context] for context in row[: place + 1]]
    text = f"in a {_NUMBERS[place - 1]} context that begins with step {contexts[-1].begin}"
    endings = [
        _ENDINGS[one.ending] for one in contexts[:-1] if one.ending != ENDS or not max(one.inputs)
    ]
    return f"{text}, after {' and '.join(dict.fromkeys(endings))}" if endings else text


def _reason_to_differ(run: Run, row: tuple[int, ...]) -> bool:
    """Whether parameters, generators, or tensors that are not alike on ranks, have changed between
    two contexts of a row.
    """
    contexts = part_contexts(run.scenario, run.world)
    with_steps = [context for context in row if max(contexts[context].inputs)]
    return any(_has_changed(run, *pair) for pair in pairwise(with_steps))


def _has_changed(run: Run, first_context: int, second_context: int) -> bool:
    held = [
        (_held(first, "leaving"), _held(second, "begun"))
        for first, second in zip(
            of_context(run, first_context), of_context(run, second_context), strict=True
        )
    ]
    changed = _changed_values(run, first_context, second_context)
    digests = [leaving["digests"] for leaving, _ in held]
    parted = {name for name in changed if len({of.get(name) for of in digests}) > 1}
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


def is_one_object(run: Run, found: Found) -> bool:
    """Whether the target makes one joinable alone; the rule does not apply then."""
    is_one = any(list(rank.all("one_object")) for rank in run.ranks)
    if is_one:
        found.does_not_apply(ONE_OBJECT)
    return is_one


def of_context(run: Run, context: int) -> list[Member]:
    """Return the ranks in a context, by their place in the group."""
    return [member for member in members(run) if member.context == context]


def _held(member: Member, when: str) -> Event:
    return member.rank.one("held", step=member.context, when=when)


def _are_alike(whole: Traces, other: Traces) -> bool:
    """Whether steps have left the same numbers, of one parameter or more."""
    fields = ("before", "local", "after")
    return all(
        event["after"] and all(event[field] == steps[at][field] for field in fields)
        for steps, others in zip(whole, other, strict=True)
        for at, event in others.items()
    )

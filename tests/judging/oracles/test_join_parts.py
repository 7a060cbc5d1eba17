"""Joinables in one context and in two, on runs written by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import expecttest
import pytest

from conformance.judging.oracles import join_outdated, join_parts
from conformance.judging.verdict import Found
from conformance.records.rank_record import Event, RankRecord
from conformance.records.run import Run
from conformance.scenarios.join_loop_draws import DISABLED, ENDS, RAISES, THROWS
from conformance.scenarios.join_part_draws import (
    EMPTIED,
    INTERRUPTED,
    NOT_EMPTIED,
    SCHEDULE,
    SCHEDULE_AFTER_JOINS,
    SECOND_PART,
    THROWN,
    WHOLE,
    long_contexts,
    part_contexts,
    uneven_contexts,
)
from conformance.scenarios.joins_in_parts import IN_PARTS, TWO_JOINED
from conformance.scenarios.model import Scenario
from tests.made_runs import event, read_failures

CONTEXTS = part_contexts(IN_PARTS, 2)
UNEVEN = uneven_contexts(IN_PARTS, 2)

# Contexts after another one of the same joinable.
LATER = (SECOND_PART, *INTERRUPTED[1:], THROWN[1], *EMPTIED[1:], *NOT_EMPTIED[1:])


def run(scenario: Scenario = IN_PARTS) -> Run:
    """Return a run whose parameter has the same digest on all ranks in the same step."""
    world = scenario.size or 2
    ranks = [RankRecord(rank, list(_events(scenario, rank)), exit=0) for rank in range(world)]
    return Run(scenario, world, ranks)


def _events(scenario: Scenario, rank: int) -> Any:
    world = scenario.size or 2
    yield Event(event("subject", -1, is_context=False))
    for number, context in enumerate(part_contexts(scenario, world)):
        yield Event(event("step", number, kind="context"))
        if number in (WHOLE, SCHEDULE):
            followed = {"p": "alike", "own": f"of rank {rank}"}
            yield Event(event("followed", number, digests=followed))
        if context.ending == THROWS:
            yield Event(event("came_out", number, error="RuntimeError: exhausted", same=False))
        if context.is_schedule:
            rates = {"lr": "0.1"}
            yield Event(event("rates", number, at=context.begin, settings=rates))
            continue
        for at in range(context.begin, context.begin + context.taken(rank) * (not context.is_long)):
            yield Event(
                event(
                    "traced",
                    number,
                    at=at,
                    before=[f"begun {at}"],
                    local={"0": f"gradient {at}"},
                    mean=[f"mean {at}"],
                    after=[f"stepped {at}"],
                    settings={"lr": "0.1"},
                    is_seen=True,
                    is_cleared=True,
                    is_held=False,
                    numbers={"epoch": "1"},
                )
            )
        for when in ("begun", "leaving") if context.inputs[rank] else ():
            held = {"parameters": ["held"], "digests": {"p": "held", "own": f"of rank {rank}"}}
            held |= {"floats": {"typical": "0.5"}, "is_cleared": True}
            yield Event(event("held", number, when=when, generators={}, **held))
        state = event("state_of_joinable", number, when="leaving", divides=False)
        yield Event(state | {"digests": {"p": "held", "q": "held"}})
        uneven = (*uneven_contexts(scenario, world), *long_contexts(scenario, world))
        if any(one.outdated == number and one.late != rank for one in uneven):
            names = ["gradient of p", "r", "p", "typical", "s (2 of 6 elements)"]
            yield Event(event("outdated", number, names=names))


def changed(
    name: str, contexts: tuple[int, ...], change: Callable[[dict[str, Any]], object], rank: int = 1
) -> Run:
    """Return the run with changed events of some contexts on a rank."""
    made = run()
    for one in made.ranks[rank].events:
        if one["event"] == name and one["step"] in contexts:
            change(one)
    return made


def in_second(**fields: Any) -> Run:
    """Return the run with other fields in the steps of the second context, and of later ones."""
    return changed("traced", LATER, lambda one: one.update(fields))


def interrupted(**fields: Any) -> Run:
    """Return the run with other fields in the last of the contexts with an exception."""
    return changed("traced", INTERRUPTED[-1:], lambda one: one.update(fields))


def changed_after_no_inputs(*others: int) -> Run:
    """Return the run in which a context without inputs, and those before others, change a value."""
    made = run()
    for rank in made.ranks:
        for one in rank.all("held", when="begun"):
            if one["step"] in (EMPTIED[2], *others):
                one["digests"] = {**one["digests"], "p": "cleared"}
    return made


def without_parameters() -> Run:
    """Return the run with an optimizer that has its parameters until the join."""
    made = run()
    for rank in made.ranks:
        for one in rank.all("traced"):
            one["is_held"] = one["step"] != SECOND_PART
    return made


def with_stairs(last: str, *stuck: int) -> Run:
    """Return the run with a rate that changes after 40 steps, but in some contexts.

    Args:
        last: the rate from then on.
        stuck: the contexts.
    """
    made = run()
    for rank in made.ranks:
        for one in list(rank.all("rates")):
            if one["step"] not in stuck:
                rank.events.append(Event(one | {"at": one["at"] + 40, "settings": {"lr": last}}))
    return made


def with_rates(*stuck: int) -> Run:
    """Return the run with a rate that changes in each step, but in some contexts."""
    made = run()
    for rank in made.ranks:
        for one in rank.all("traced"):
            begin = CONTEXTS[one["step"]].begin
            at = begin - 1 if one["step"] in stuck else one["at"]
            one["settings"] = {"lr": f"0.{at}"}
    return made


def after_a_throw(name: str) -> Run:
    """Return the run with another value of a part of the state after two ranks have stopped."""
    return changed(
        "state_of_joinable", THROWN[-1:], lambda one: one["digests"].update({name: "other"})
    )


def without_followed(made: Run) -> Run:
    """Return the run without a state that ranks hold alike after each step."""
    for rank in made.ranks:
        for one in rank.all("followed"):
            one["digests"] = {}
    return made


def outdated(made: Run) -> Found:
    found = Found()
    join_outdated.require_nothing_outdated(made, found)
    return found


def in_parts(made: Run) -> Found:
    found = Found()
    join_parts.require_same_in_parts(made, found)
    return found


def left_in_gradients(**fields: Any) -> Run:
    """Return the run with a gradient after a join, and other fields in the steps that follow."""
    one = UNEVEN[1]
    made = changed("traced", (one.rest,), lambda traced: traced.update(fields))
    early = made.ranks[1 - one.late]
    early.one("held", step=one.rest, when="begun")["is_cleared"] = False
    return made


def resumed(is_loaded: bool = True, **fields: Any) -> Run:
    """Return the run with a state that is loaded, and other fields in the steps that follow."""
    context = UNEVEN[1].resumed
    made = changed("traced", (context,), lambda traced: traced.update(fields))
    for rank in made.ranks:
        loaded = event("resumed", WHOLE, context=context, is_loaded=is_loaded)
        rank.events.append(Event(loaded))
    return made


def test_a_state_may_not_be_taken_and_inputs_go_on_otherwise() -> None:
    assert not in_parts(resumed()).failures
    assert in_parts(resumed(before=["other"], local={"0": "other"})).failures
    for made in (resumed(False, after=["x"]), resumed(after=["x"], local={"0": "of other inputs"})):
        assert not in_parts(made).failures


def test_a_joinable_may_keep_gradients_for_its_next_step() -> None:
    made = left_in_gradients(after=["other"])
    assert in_parts(made).failures
    made.ranks[0].one("traced", step=WHOLE, at=1)["is_cleared"] = False
    assert not in_parts(made).failures


@pytest.mark.parametrize(
    "made",
    [
        left_in_gradients(after=["other"], local={"0": "of other inputs"}),
        left_in_gradients(after=["other"], settings={"lr": "0.2"}),
    ],
)
def test_a_context_may_have_other_inputs_and_rates_than_the_same_one_before(made: Run) -> None:
    assert not in_parts(made).failures


def test_the_same_numbers_are_right() -> None:
    for found in (
        outdated(run()),
        outdated(run(TWO_JOINED)),
        in_parts(run()),
        in_parts(with_rates()),
        in_parts(with_stairs("0.2")),
    ):
        assert found.checks
        assert not found.failures


def test_numbers_that_are_others_each_time_are_not_judged() -> None:
    change = {"digests": {"p": "other", "q": "held"}}
    repeated = changed(
        "state_of_joinable",
        (UNEVEN[0].again, UNEVEN[0].outdated),
        lambda one: one.update(change),
        UNEVEN[0].late,
    )
    assert not outdated(repeated).failures
    at_random = changed("traced", (WHOLE,), lambda one: one.update(after=["random"]))
    assert in_parts(without_followed(at_random)).not_applicable == (
        "it trains no parameters, or its numbers are others each time"
    )


FOLLOWS = "inputs, a rate or its state follow the number of contexts, or the join"


@pytest.mark.parametrize(
    "made",
    [
        in_second(local={"0": "of other inputs"}, after=["other"]),
        in_second(settings={"lr": "0.2"}, after=["other"]),
        in_second(is_seen=False, numbers={"epoch": "2"}, after=["other"]),
        in_second(mean=["clipped otherwise"], numbers={"epoch": "2"}, after=["other"]),
    ],
)
def test_inputs_and_rates_may_follow_contexts(made: Run) -> None:
    found = in_parts(without_followed(made))
    assert not found.failures
    assert found.not_applicable == FOLLOWS


@pytest.mark.parametrize(
    "held",
    [
        {"parameters": ["a mean of models"], "digests": {}},
        {"parameters": ["held"], "digests": {"p": "held", "own": "of rank 0"}},
        {"generators": {"noise": "seeded"}},
    ],
)
def test_a_join_may_compute_a_state_and_hand_out_a_part(held: dict[str, Any]) -> None:
    made = in_second(after=["other"])
    for one in made.ranks[1].all("held", when="begun"):
        if one["step"] in LATER:
            one.update(held)
    assert in_parts(without_followed(made)).not_applicable == FOLLOWS


def test_reasons_not_to_judge() -> None:
    one_object = run()
    one_object.ranks[0].events.append(Event(event("one_object", 0)))
    up_to_date = run()
    for rank in up_to_date.ranks:
        for one in rank.all("outdated"):
            one["names"] = []
    reasons = [
        outdated(one_object).not_applicable,
        in_parts(one_object).not_applicable,
        outdated(up_to_date).not_applicable,
    ]
    assert reasons == [
        "the target is one object, and makes no other one",
        "the target is one object, and makes no other one",
        "a rank that has joined leaves no gradient as it is, and no other value that all ranks "
        "hold alike after a join",
    ]


def test_failures_are_described() -> None:
    depends = changed(
        "state_of_joinable",
        (UNEVEN[0].outdated,),
        lambda one: one.update(digests={"p": "other", "q": "held"}),
        UNEVEN[0].late,
    )
    number = changed(
        "held",
        (UNEVEN[0].outdated,),
        lambda one: one.update(floats={"typical": "0.6"}),
        UNEVEN[0].late,
    )
    failures = [
        *outdated(depends).failures,
        *outdated(number).failures,
        *in_parts(in_second(after=["other"])).failures,
        *in_parts(in_second(before=["other"])).failures,
        *in_parts(with_rates(SECOND_PART)).failures[:1],
        *in_parts(with_rates(UNEVEN[1].rest)).failures,
        *in_parts(with_stairs("0.2", SCHEDULE_AFTER_JOINS)).failures[:1],
        *in_parts(interrupted(after=["other"])).failures,
        *in_parts(without_parameters()).failures[:1],
        *in_parts(after_a_throw("p")).failures,
        *in_parts(changed("traced", THROWN[1:2], lambda one: one.update(after=["x"]))).failures,
        *in_parts(changed("traced", EMPTIED[4:], lambda one: one.update(after=["x"]))).failures,
        *in_parts(changed_after_no_inputs()).failures,
        *in_parts(left_in_gradients(after=["other"])).failures,
        *in_parts(resumed(after=["other"])).failures,
    ]
    expecttest.assert_expected_inline(
        read_failures(failures),
        """\
Expected: p with the same value, whatever is in the state of rank 0 that shadowed steps do
    not update
Actual: rank 1, context 31 with inputs (2, 7): p changed when the kit put older values
    into that state of rank 0
Likely cause: a joined rank sends one of these values, or computes with it in a shadowed
    step: typical, s (2 of 6 elements), p, ...
Expected: typical with the same value, whatever is in the state of rank 0 that shadowed
    steps do not update
Actual: rank 1, context 31 with inputs (2, 7): typical changed when the kit put older
    values into that state of rank 0
Likely cause: a joined rank sends one of these values, or computes with it in a shadowed
    step: typical, s (2 of 6 elements), r, ...
Expected: the parameters of 10 steps in one context
Actual: rank 1, step 7, in a second context that begins with step 7: other parameters
    afterwards
Likely cause: an update that is pending, momentum or another state is lost between
    contexts
Expected: the parameters of 10 steps in one context
Actual: rank 1, step 7, in a second context that begins with step 7: other parameters when
    its first gradient arrives
Likely cause: an update that is pending, momentum or another state is lost between
    contexts
Expected: lr that goes on changing in each step, as in one context
Actual: rank 0, context 4: lr stays 0.6, as at the join before
Likely cause: a schedule writes to a group that load_state_dict() has replaced
Expected: lr that goes on changing in each step, as in one context
Actual: rank 0, context 33: lr stays 0.7, as at the join before
Likely cause: a schedule writes to a group that load_state_dict() has replaced
Expected: lr that changes in 133 steps of a context, as in those of the first one
Actual: rank 0, context 12: lr stays 0.1, as at the join before
Likely cause: a schedule writes to a group that load_state_dict() has replaced
Expected: the parameters of 10 steps in one context
Actual: rank 1, step 3, in a fourth context that begins with step 3, after one that an
    exception has ended and a disabled one: other parameters afterwards
Likely cause: an update that is pending, momentum or another state is lost between
    contexts
Expected: parameters with gradients in the groups of an optimizer, as in one context
Actual: rank 0, context 4, step 7: no optimizer has some of them
Likely cause: a join has replaced a model, or its parameters, and the optimizer goes on to
    step the old ones
Expected: the same p on all ranks after even inputs, as if no context had thrown
Actual: rank 0, context 17 with inputs (129, 129), after context 16, which has thrown with
    inputs (1, 5): p differs on ranks [1]
Likely cause: a step that notify_join_context() has stopped is counted, or begun, on some
    ranks
Expected: the parameters of 10 steps in one context
Actual: rank 1, step 2, in a second context that begins with step 2, after one that
    throw_on_early_termination has ended: other parameters afterwards
Likely cause: a step that notify_join_context() has stopped is counted, or begun, on some
    ranks
Expected: the parameters of 10 steps in one context
Actual: rank 1, step 4, in a fifth context that begins with step 4, after one without
    inputs: other parameters afterwards
Likely cause: an update that is pending, momentum or another state is lost between
    contexts
Expected: p as before a context without inputs on any rank
Actual: rank 0, context 19 with inputs (0, 0): it has changed p, and other joins do not
Likely cause: a context in which no rank has an input clears a state, or hands out one
    that no rank has had
Expected: the same parameters if gradients are cleared between two contexts, as they are
    after each step
Actual: step 8, after a context with inputs (8, 3): other parameters on ranks [1] if the
    kit clears the gradients that ranks [1] held after the join
Likely cause: a shadowed step leaves a gradient, and the first step of the next context
    adds to it: clear gradients in shadowed steps, too, or before each step
Expected: the same parameters after each step of a new joinable that has loaded the state
Actual: step 8, after a context with inputs (8, 3): other parameters on ranks [1] in the
    new one, which each rank has given its own state_dict()
Likely cause: state_dict() lacks a part of the state, such as momentum or a count, or
    load_state_dict() leaves it out""",
    )


def test_a_rate_that_is_another_one_may_be_that_of_a_context() -> None:
    made = with_rates(SECOND_PART)
    for rank in made.ranks:
        for one in rank.all("traced", step=SECOND_PART):
            one["settings"] = {"lr": "0.01"}
    assert not in_parts(made).failures


def test_a_step_of_a_staircase_may_be_further_away_than_a_context_is_long() -> None:
    made = run()
    for rank in made.ranks:
        last = {"settings": {"lr": "0.2"}, "at": 3}
        rank.events += [Event(one | last) for one in rank.all("rates") if one["step"] == SCHEDULE]
    assert not in_parts(made).failures


def test_ranks_may_part_after_an_early_end_as_they_do_without_one() -> None:
    assert not in_parts(after_a_throw("q")).failures
    did_not_throw = after_a_throw("p")
    for one in did_not_throw.ranks[0].all("came_out"):
        one["error"] = ""
    assert not in_parts(did_not_throw).failures


def test_other_joins_may_change_what_a_context_without_inputs_changes() -> None:
    assert in_parts(changed_after_no_inputs()).failures
    for context in NOT_EMPTIED[1:]:
        assert not in_parts(changed_after_no_inputs(context)).failures


def test_contexts_without_inputs_are_drawn() -> None:
    for seed in range(40):
        contexts = part_contexts(replace(IN_PARTS, session_seed=seed), 2)
        row = [contexts[number] for number in EMPTIED]
        assert [one.inputs[0] > 0 for one in row] == [True, False, True, False, True]
        for last in (row[4], contexts[NOT_EMPTIED[2]]):
            assert last.begin + last.inputs[0] == contexts[WHOLE].inputs[0]
        assert [one.is_new for one in row] == [True, False, False, False, False]
        assert contexts[NOT_EMPTIED[0]].inputs == row[0].inputs


def test_contexts_that_throw_are_drawn() -> None:
    for seed in range(40):
        contexts = part_contexts(replace(IN_PARTS, session_seed=seed), 2)
        row = [contexts[number] for number in THROWN]
        assert [one.ending for one in row] == [THROWS, ENDS, THROWS, THROWS, ENDS]
        first, *others = (one.inputs.index(min(one.inputs)) for one in row if one.ending == THROWS)
        assert {*others} == {1 - first}
        assert row[1].begin + row[1].inputs[0] <= contexts[WHOLE].inputs[0]
        assert row[4].begin + row[4].inputs[0] == contexts[SCHEDULE].inputs[0]


def test_contexts_with_an_exception_are_drawn() -> None:
    for seed in range(40):
        contexts = part_contexts(replace(IN_PARTS, session_seed=seed), 2)
        row = [contexts[number] for number in INTERRUPTED]
        assert {one.ending for one in row[1:3]} == {RAISES, DISABLED}
        assert row[0].ending == row[3].ending == ENDS
        assert row[3].begin + row[3].inputs[0] == contexts[WHOLE].inputs[0]
        for one in uneven_contexts(replace(IN_PARTS, session_seed=seed), 2):
            inputs = contexts[one.plain].inputs
            assert inputs[one.late] - inputs[1 - one.late] >= 4

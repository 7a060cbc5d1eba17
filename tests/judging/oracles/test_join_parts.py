"""Joinables in one context and in two, on runs written by hand."""

from collections.abc import Callable
from typing import Any

import expecttest
import pytest

from conformance.judging.oracles import join_parts
from conformance.judging.verdict import Found
from conformance.records.rank_record import Event, RankRecord
from conformance.records.run import Run
from conformance.scenarios.join_part_draws import (
    SECOND_PART,
    WHOLE,
    part_contexts,
    uneven_contexts,
)
from conformance.scenarios.joins_in_parts import IN_PARTS
from tests.made_runs import event, read_failures

CONTEXTS = part_contexts(IN_PARTS)
EARLY = uneven_contexts(IN_PARTS)


def run() -> Run:
    """Return a run of two ranks, whose parameter has the same digest in the same step."""
    ranks = [RankRecord(rank, list(_events(rank)), exit=0) for rank in (0, 1)]
    return Run(IN_PARTS, 2, ranks)


def _events(rank: int) -> Any:
    yield Event(event("subject", -1, is_context=False))
    for number, context in enumerate(CONTEXTS):
        yield Event(event("step", number, kind="context"))
        for at in range(context.begin, context.begin + context.inputs[rank]):
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
                    numbers={"epoch": "1"},
                )
            )
        for when in ("begun", "leaving"):
            held = {"parameters": ["held"], "digests": {"p": "held", "own": f"of rank {rank}"}}
            yield Event(event("held", number, when=when, generators={}, **held))
        state = event("state_of_joinable", number, when="leaving", divides=False)
        yield Event(state | {"digests": {"p": "held", "q": "held"}})
        if any(one.outdated == number and one.early == rank for one in EARLY):
            yield Event(event("outdated", number, names=["p", "gradient of p", "r", "s"]))


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
    """Return the run with other fields in the steps of the second context."""
    return changed("traced", (SECOND_PART,), lambda one: one.update(fields))


def with_rates(*stuck: int) -> Run:
    """Return the run with a rate that changes in each step, but in some contexts."""
    made = run()
    for rank in made.ranks:
        for one in rank.all("traced"):
            begin = CONTEXTS[one["step"]].begin
            at = begin - 1 if one["step"] in stuck else one["at"]
            one["settings"] = {"lr": f"0.{at}"}
    return made


def outdated(made: Run) -> Found:
    found = Found()
    join_parts.require_nothing_outdated(made, found)
    return found


def in_parts(made: Run) -> Found:
    found = Found()
    join_parts.require_same_in_parts(made, found)
    return found


def test_the_same_numbers_are_right() -> None:
    for found in (outdated(run()), in_parts(run()), in_parts(with_rates())):
        assert found.checks
        assert not found.failures


def test_numbers_that_are_others_each_time_are_not_judged() -> None:
    late = 1 - EARLY[0].early
    change = {"digests": {"p": "other", "q": "held"}}
    repeated = changed(
        "state_of_joinable",
        (EARLY[0].again, EARLY[0].outdated),
        lambda one: one.update(change),
        late,
    )
    assert not outdated(repeated).failures
    at_random = changed("traced", (WHOLE,), lambda one: one.update(after=["random"]))
    assert in_parts(at_random).not_applicable == (
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
    found = in_parts(made)
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
    for one in made.ranks[1].all("held", step=SECOND_PART, when="begun"):
        one.update(held)
    assert in_parts(made).not_applicable == FOLLOWS


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
        "a rank that has joined leaves no gradient as it is, and no other tensor that all ranks "
        "hold alike after a join",
    ]


def test_failures_are_described() -> None:
    depends = changed(
        "state_of_joinable",
        (EARLY[0].outdated,),
        lambda one: one.update(digests={"p": "other", "q": "held"}),
        1 - EARLY[0].early,
    )
    failures = [
        *outdated(depends).failures,
        *in_parts(in_second(after=["other"])).failures,
        *in_parts(in_second(before=["other"])).failures,
        *in_parts(with_rates(SECOND_PART)).failures[:1],
        *in_parts(with_rates(EARLY[1].rest)).failures,
    ]
    expecttest.assert_expected_inline(
        read_failures(failures),
        """\
Expected: p as if rank 0 had joined with other values in the tensors that its shadows
    leave as they are
Actual: rank 1, context 8 with inputs (3, 6): p depends on them
Likely cause: one of these is sent, or used in a shadow: p, r, s, ...
Expected: the parameters of 8 steps in one context
Actual: rank 1, step 2, in a second context that begins with step 2: other parameters
    afterwards
Likely cause: an update that is pending, momentum or another state is lost between
    contexts
Expected: the parameters of 8 steps in one context
Actual: rank 1, step 2, in a second context that begins with step 2: other parameters when
    its first gradient arrives
Likely cause: an update that is pending, momentum or another state is lost between
    contexts
Expected: lr that goes on changing in each step, as in one context
Actual: rank 0, context 4: lr stays 0.1, as at the join before
Likely cause: a schedule writes to a group that load_state_dict() has replaced
Expected: lr that goes on changing in each step, as in one context
Actual: rank 0, context 10: lr stays 0.3, as at the join before
Likely cause: a schedule writes to a group that load_state_dict() has replaced""",
    )


def test_a_rate_that_is_another_one_may_be_that_of_a_context() -> None:
    made = with_rates(SECOND_PART)
    for rank in made.ranks:
        for one in rank.all("traced", step=SECOND_PART):
            one["settings"] = {"lr": "0.01"}
    assert not in_parts(made).failures

"""The messages on contexts and joinables, on records written by hand."""

from dataclasses import replace
from functools import partial
from typing import Any

import expecttest
import pytest
import torch

from conformance.judging.oracles import join, join_gradients, join_loops, join_numbers, join_states
from conformance.judging.oracles.join_buffers import require_buffers
from conformance.judging.verdict import Found
from conformance.records.rank_record import Event, IncompleteRecord, RankRecord
from conformance.records.run import Run
from conformance.scenarios.joinable import DISABLED, OUTSIDE, RAISES, SUBGROUPS, THROWS, UNEVEN
from conformance.scenarios.model import Param, Scenario
from tests.made_runs import event, read_failures, refused


def run(*events: dict[str, Any], is_context: bool = True) -> Run:
    """Return a run of two ranks with the same events in the first context."""
    subject = event("subject", -1, is_context=is_context)
    step = event("step", 0, kind="context")
    records = [
        RankRecord(rank, [Event(one) for one in (subject, step, *events)], exit=0)
        for rank in (0, 1)
    ]
    return Run(UNEVEN, 2, records)


def test_hooks_and_their_arguments_are_described() -> None:
    records = run(
        event("main", 0, joinable=7),
        event("post", 0, joinable=7, last=True),
        event("main", 0, joinable=7),
    )
    found = Found()
    member = next(join.members(records))
    join.require_steps(records, member, found)
    join.require_post_hooks(records, member, found)
    join.require_no_hooks(member, found)
    join.require_keywords(records, member, found)
    join.require_some_post_hook(next(join.members(run())), found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: main hooks of joinables []
Actual: rank 0, context 0 with inputs (3, 2): main hooks of joinables [7, 7]
Expected: 3 collectives of joinable 0
Actual: rank 0, context 0 with inputs (3, 2): 0
Expected: 3 collectives of joinable 1
Actual: rank 0, context 0 with inputs (3, 2): 0
Expected: 3 collectives of joinable 2
Actual: rank 0, context 0 with inputs (3, 2): 0
Expected: post hooks of joinables [0, 1, 2], in this order
Actual: rank 0, context 0 with inputs (3, 2): post hooks of joinables [7]
Expected: post hooks after the last step
Actual: rank 0, context 0 with inputs (3, 2): one before it
Expected: no hook
Actual: rank 0, context 0 with inputs (3, 2): main_hook of joinable 7, post_hook of
    joinable 7, main_hook of joinable 7
Expected: a call of join_hook
Actual: rank 0, context 0 with inputs (3, 2): join_hook of joinable 0 was not called
Expected: a call of join_hook
Actual: rank 0, context 0 with inputs (3, 2): join_hook of joinable 1 was not called
Expected: a call of join_hook
Actual: rank 0, context 0 with inputs (3, 2): join_hook of joinable 2 was not called
Expected: post hooks
Actual: rank 0, context 0 with inputs (3, 2): none""",
    )


def test_notifications_are_described() -> None:
    collective = event("collective", 0, what="allreduce SUM 4 float32")
    records = run(
        event("takes", 0),
        collective,
        event("says", 0, own=True),
        event("takes", 0),
        event("leaving", 0),
        event("notifies", 0, joinable=7),
        collective,
        event("notified", 0),
        is_context=False,
    )
    found = Found()
    member = next(join.members(records))
    join.require_notifications(member, found)
    join.require_silent_notifications(records, member, found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: no collective before the notification
Actual: rank 0, context 0 with inputs (3, 2), step 0: allreduce SUM 4 float32 before the
    notification
Expected: one call of notify_join_context with itself
Actual: rank 0, context 0 with inputs (3, 2), step 1: 0 calls
Expected: no collective
Actual: rank 0, context 0 with inputs (3, 2): 1 in the notification of joinable 7""",
    )


def test_ranks_with_other_kinds_of_subjects_are_described() -> None:
    records = run()
    records.ranks[1].events[0] = event("subject", -1, is_context=False)
    with pytest.raises(IncompleteRecord) as caught:
        join.is_context(records)
    assert caught.value.expected == "a subject of one kind on all ranks"
    assert caught.value.actual == (
        "it is a context on ranks [0] alone, and a joinable on the others"
    )


def of_rule(number: str, scenario: Scenario, *events: dict[str, Any], **fields: Any) -> str:
    """Return the failures of a rule on two ranks with the same events."""
    records = run(*events, **fields)
    records.scenario = scenario
    return refused(number, records)


def test_contexts_are_described() -> None:
    what = "allreduce SUM 4 float32"
    place = {"named": "0", "call": 0, "inside": True}
    issued = event("collective", 0, what=what, group=[0, 1, 2, 3], **place)
    swallowed = event("came_out", 0, error="", same=False)
    steps = [
        event("outside", 0, name="DDP", when="before the context", at="begin"),
        event("outside", 0, name="DDP", when="before the context", at="end"),
        event("outside", 0, name="DDP", when="after the context", at="begin"),
        event("collective", 0, what="allreduce SUM 4 float32"),
        event("outside", 0, name="DDP", when="after the context", at="end"),
    ]
    expecttest.assert_expected_inline(
        "\n".join(
            (
                of_rule("17.2", UNEVEN, is_context=False),
                of_rule("17.8", DISABLED, issued),
                of_rule("17.9", THROWS, event("came_out", 0, error="Ended: no", same=False)),
                of_rule("17.9", replace(THROWS, variant="uneven"), swallowed),
                of_rule("17.10", RAISES, swallowed),
                of_rule("17.11", SUBGROUPS, issued),
                of_rule("17.16", OUTSIDE, *steps),
                of_rule("17.17", UNEVEN, event("main", 0, joinable=1, would_notify=True)),
                of_rule("17.23", UNEVEN, swallowed, event("post", 0, joinable=1, last=True)),
            )
        ),
        """\
Expected: steps on record
Actual: there are none
Expected: 2 collectives of joinable 0
Actual: rank 0, context 0 with inputs (2, 2): 0
Expected: 0 collectives, those of the joinables
Actual: rank 0, context 0 with inputs (2, 2): 1 collectives
Expected: no exception
Actual: rank 0, context 0 with inputs (2, 2): Ended: no
Expected: 2 steps
Actual: rank 0, context 0 with inputs (2, 2): 0 steps
Expected: an exception on every rank
Actual: rank 0, context 0 with inputs (3, 2): it left the context without one
Expected: 2 steps
Actual: rank 0, context 0 with inputs (3, 2): 0 steps
Expected: the exception that was raised
Actual: rank 0, context 0 with inputs (1, 1): nothing came out: it was swallowed
Expected: 4 collectives of joinable 0
Actual: rank 0, context 0 with inputs (4, 3): 0
Expected: post hooks
Actual: rank 0, context 0 with inputs (4, 3): none
Expected: collectives of ranks (0, 2) only
Actual: rank 0, context 0 with inputs (4, 3): allreduce SUM 4 float32 on ranks [0, 1, 2,
    3]
Likely cause: join_process_group is WORLD, or a group= is missing
Expected: 0 collectives, as before
Actual: rank 0, a step of DDP after the context: 1
Likely cause: its joinables stay enabled
Expected: a joinable that does not notify
Actual: rank 0, context 0 with inputs (3, 2): joinable 1 is enabled and first in its main
    hook
Expected: the HookFailed that was raised
Actual: rank 0, context 0 with inputs (3, 2): nothing came out: it was swallowed
Expected: no post hook
Actual: rank 0, context 0 with inputs (3, 2): post hooks of joinables [1] after the
    exception""",
    )


def test_numbers_are_described() -> None:
    summed = event("summed", 0, joinable=1, sums=[1, 0, 2, 0, 0, 0])
    records = run(summed, event("summed", 0, joinable=0, sums=[0] * 6))
    records.scenario = replace(UNEVEN, params=(Param((5,)),))
    for rank in records.ranks:
        rank.tensors = {"0/buffer": torch.zeros(1), "0/buffer/seen": torch.tensor(7)}
        rank.tensors["0/buffer/mask"] = torch.tensor([False, True])
        rank.tensors["0/0/grad/p0"] = torch.ones(5)
    found = Found()
    member = next(join.members(records))
    join.require_steps(records, member, found)
    require_buffers(records, member, found)
    join.require_gradients(records, member, found, by_all=False)
    join.require_parameters(records, member, found, by_all=True)
    join.require_raised(member, "HookFailed", found)
    different = run(event("collective", 0, what="allreduce 1 float32", group=[0, 1], named="0"))
    for rank in different.ranks:
        rank.one("collective")["what"] = f"allreduce {rank.rank + 1} float32"
        rank.one("collective").update(call=0, inside=True)
    join.require_agreement(different, found)
    expecttest.assert_expected_inline(
        read_failures(found.failures[:10] + found.failures[-4:]),
        """\
Expected: 3 collectives of joinable 0
Actual: rank 0, context 0 with inputs (3, 2): 1
Expected: joinable 0 stepped by ranks [0, 1], shadowed by ranks []
Actual: rank 0, context 0 with inputs (3, 2), step 0: by no rank
Expected: 3 collectives of joinable 1
Actual: rank 0, context 0 with inputs (3, 2): 1
Expected: joinable 1 stepped by ranks [0, 1], shadowed by ranks []
Actual: rank 0, context 0 with inputs (3, 2), step 0: joinable 0 stepped by ranks [0],
    joinable 2 stepped by ranks [1]
Likely cause: ranks meet in collectives of different joinables: main hooks are called in
    another order than the list's
Expected: 3 collectives of joinable 2
Actual: rank 0, context 0 with inputs (3, 2): 0
Expected: 3
Actual: rank 0, context 0 with inputs (3, 2), the buffer that counts steps, index 0: 0
Expected: a count in int64 of 1203764846315508320, as the last rank that trained holds it
Actual: rank 0, context 0 with inputs (3, 2): 7
Likely cause: buffers of floating-point dtypes alone are handed out, or those of another
    rank
Expected: a mask of bools with the bits of 5291, as the last rank that trained holds it
Actual: rank 0, context 0 with inputs (3, 2): 2
Likely cause: buffers of floating-point dtypes alone are handed out, or those of another
    rank
Expected: -64
Actual: rank 0, context 0 with inputs (3, 2), step 0, gradient of p0, index 0: 1
Likely cause: DDP divides by the sum over all ranks in its notification: joined ranks have
    to add 0
Expected: a record
Actual: rank 0, context 0 with inputs (3, 2), step 1, gradient of p0: none
Expected: a record
Actual: rank 0, context 0 with inputs (3, 2), step 2, gradient of p0: none
Expected: a record
Actual: rank 0, context 0 with inputs (3, 2), parameter p0 afterwards: none
Expected: the HookFailed that was raised
Actual: rank 0, context 0 with inputs (3, 2): nothing came out: it was swallowed
Expected: the same collectives on all ranks
Actual: ranks disagree in collective 1 of the group of ranks 0, 1: rank 0 issues allreduce
    1 float32 (step 0), rank 1 allreduce 2 float32 (step 0)""",
    )
    assert join.raised(next(join.members(run()))) == "it never came out"


def trained(*states: dict[str, dict[str, str]], grad: float = 3.0, **fields: Any) -> Run:
    """Return two contexts of two ranks with gradients, and the state of a joinable.

    Args:
        states: the digests of the state by rank in the second context, as each rank leaves it.
        grad: all elements of the gradients after the first context.
        fields: those of the events of gradients.
    """
    records = run(is_context=False)
    for rank in records.ranks:
        rank.events.append(event("step", 1, kind="context"))
        for context in (0, 1):
            rank.events.append(event("gradients", context, at=0, parameters=1, calls=1, **fields))
            rank.tensors[f"{context}/0/local/p0"] = torch.tensor([1.0, 3.0])
            rank.tensors[f"{context}/0/grad/p0"] = torch.tensor([1.0, 3.0])
            digests = {"p0": "same"}
            for when in ("leaving", "left"):
                if context == 1 and states:
                    digests = {"p0": states[0][when][str(rank.rank)]}
                state = event("state_of_joinable", context, when=when, divides=False)
                rank.events.append(state | {"digests": digests})
        if grad != 3.0:
            rank.tensors["1/0/grad/p0"] = torch.tensor([1.0, grad])
    return records


def test_numbers_of_joinables_are_described() -> None:
    texts = []
    infinite = trained()
    infinite.ranks[0].tensors["0/0/grad/p0"] /= 0
    neither = trained()
    neither.ranks[0].tensors["0/0/grad/p0"] *= 0.9
    left = {"leaving": {"0": "a", "1": "b"}, "left": {"0": "a", "1": "b"}}
    flat = trained()
    flat.ranks[1].tensors["1/0/grad/p0"] = torch.tensor([[1.0, 3.0]])
    whole = trained()
    whole.ranks[0].tensors["0/0/local/p0"] = torch.tensor([1, 3])
    for records, require in (
        (flat, join_gradients.require_gradients_of_trainers),
        (whole, join_numbers.require_numbers),
        (infinite, join_gradients.require_gradients_of_trainers),
        (neither, partial(join_gradients.require_gradients_of_trainers, presumed=True)),
        (trained(grad=5.0), join_gradients.require_gradients_of_trainers),
        (trained(left), join_states.require_replicas),
        (trained(left), join_states.require_last_state),
    ):
        found = Found()
        require(records, found)
        texts.append(read_failures(found.failures[:1]))
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: gradients of parameter 0 of shape [2] and of a floating-point dtype
Actual: rank 1, context 1, step 0: shape [1, 2], torch.float32
Likely cause: a parameter or its gradient was replaced
Expected: gradients of parameter 0 of shape [2] and of a floating-point dtype
Actual: rank 0, context 0, step 0: shape [2], torch.int64
Likely cause: a parameter or its gradient was replaced
Expected: finite values
Actual: rank 0, context 0 with inputs (3, 2), step 0, gradient of parameter 0: a value
    that is not finite
Expected: after even inputs the mean or the sum of the gradients of ranks [0, 1]
Actual: rank 0, context 0 with inputs (3, 2), step 0, parameter 0: neither
Expected: the sum of the gradients of ranks [0, 1], divided by 2
Actual: rank 0, context 1 with inputs (2, 3), step 0, parameter 0: the gradient has other
    values
Likely cause: no known mistake: look at the divisor, at clipping or scaling, and at the
    main hook, which has to contribute zeros
Expected: the same p0 on all ranks
Actual: rank 0, context 1 with inputs (2, 3): p0 differs on ranks [1]
Likely cause: ranks that joined early keep values of their own
Expected: p0 as on ranks [1] at the end of their bodies
Actual: rank 0, context 1 with inputs (2, 3): p0 has other values
Likely cause: these are the values of rank 0, which joined early""",
    )


def test_modes_and_groups_of_other_contexts_are_described() -> None:
    records = run(event("collective", 0, what="allreduce SUM 4 float32", group=[0, 1, 2]))
    found = Found()
    join_loops.require_modes(records, found)
    join_loops.require_collectives_of_group(next(join.members(records)), found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: modes on record
Actual: rank 0, context 0 with inputs (3, 2): none
Expected: modes on record
Actual: rank 1, context 0 with inputs (3, 2): none
Expected: collectives of ranks (0, 1) only
Actual: rank 0, context 0 with inputs (3, 2): allreduce SUM 4 float32 on ranks [0, 1, 2]
Likely cause: the group of another context of the process""",
    )

"""The messages of rules for hooks, on runs written by hand.

Mutants show the messages of most failures. Here are those of failures that another rule reports
first, or that take two defects.
"""

from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch

from conformance.judging.oracles.mean import mean
from conformance.records.run import Run
from conformance.scenarios.hook import (
    BUCKETS,
    LONG,
    OPTIMIZERS,
    ORDERED,
    SPECIAL,
    UNUSED,
    VALUES,
    VIEWS,
)
from tests.made_runs import Result, event, made_run, refused


def changed(name: str, run: Run | None = None, /, **fields: Any) -> Run:
    """Return a right run in which the events of a name have other fields."""
    run = run or made_run()
    for rank in run.ranks:
        for one in rank.all(name):
            one |= fields
    return run


def without(name: str) -> Run:
    """Return a right run without the events of a name."""
    run = made_run()
    for rank in run.ranks:
        rank.events = [one for one in rank.events if one["event"] != name]
    return run


def noted(*events: dict[str, Any], scenario: Any = VALUES) -> Run:
    """Return a right run with more events on each rank."""
    run = made_run(scenario=scenario)
    for rank in run.ranks:
        rank.events[1:1] = [dict(one) for one in events]
    return run


def wrong(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return mean(run, rank, step, index) * 1.5


def test_the_contract() -> None:
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("1.1", without("registered")),
                refused("1.2", changed("value", tensor=False, type="list")),
                refused("1.5", changed("value", state="raised", message="ValueError: no")),
                refused("1.9", {"values@2": changed("registered", count=0, logged="")}),
            )
        ),
        """\
Expected: a registered hook
Actual: rank 0 registered none
Expected: a future of one tensor
Actual: rank 0, step 0, bucket 0: the future holds list
Expected: a completed future
Actual: rank 0, step 0, bucket 0: raised ValueError: no
Expected: one hook on each rank
Actual: rank 0 registered 0 hooks""",
    )


def test_a_result_is_final_and_its_own() -> None:
    early = changed("returned", made_run(scenario=ORDERED), done=True, digest="other")
    shared = noted(
        event(
            "value",
            0,
            call=0,
            index=1,
            state="value",
            tensor=True,
            digest="same",
            bucket_device="cpu",
            memory=[4096, 8],
        )
    )
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("1.6", early),
                refused("1.6", changed("rest", digest="other")),
                refused("1.6", shared),
            )
        ),
        """\
Expected: a future that completes with its final value
Actual: rank 0, step 0, bucket 0: complete when the hook returned, before any peer had
    entered, and written later
Expected: a result that nobody writes once DDP has read it
Actual: rank 0, step 0, bucket 0: other bits after the last collective of the step had
    ended
Expected: a result buffer for each bucket of a step
Actual: rank 0, step 0: buckets 0 and 1 return the same memory""",
    )


def test_calls_by_bucket() -> None:
    again = noted(event("call", 0, call=0, index=0), scenario=BUCKETS)
    expecttest.assert_expected_inline(
        refused("1.8", again),
        """\
Expected: one call per bucket
Actual: rank 0, step 0: calls for buckets [0, 0]""",
    )


WITH_AND_WITHOUT = "the same gradients with the option and without"
NEARLY_THE_SAME = "the same results with gradient_as_bucket_view=True and without"


@pytest.mark.parametrize(
    ("views", "values", "claims", "text"),
    [
        (mean, wrong, "exact", "right with gradient_as_bucket_view=True, wrong without"),
        (wrong, mean, "exact", "wrong with gradient_as_bucket_view=True, right without"),
        (mean, wrong, "compressed", "step 0, parameter p0: they differ"),
    ],
)
def test_gradients_as_views(views: Result, values: Result, claims: str, text: str) -> None:
    runs = {"views@2": made_run(views, VIEWS), "values@2": made_run(values)}
    found = refused("1.10", runs, claims)
    expected = NEARLY_THE_SAME if claims == "compressed" else WITH_AND_WITHOUT
    assert found.startswith(f"Expected: {expected}\nActual: {text}")


def test_the_call_after_backward() -> None:
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("1.12", noted(event("called", 0, changed=[])), "poststep(call=flush)"),
                refused("1.12", noted(event("called", 0, changed=["p0", "p1"]))),
            )
        ),
        """\
Expected: gradients that the call changes
Actual: the same bits before and after each of 2 calls: they are right when backward
    returns
Expected: the same gradients before and after the set-up's call after backward
Actual: rank 0, step 0: p0, p1 changed with that call""",
    )


@pytest.mark.parametrize(
    ("claims", "expected", "actual"),
    [
        (
            "compressed",
            "a result that differs from the mean, as compressed declares",
            "the exact mean, in every step",
        ),
        ("local", "replicas that differ, at some world size", "the same results on all ranks, at"),
        (
            "local(mixing=False)",
            "ranks that never meet, at some world size",
            "gradients of all ranks meet, at values@3",
        ),
        ("fused(SGD, lr=0.1)", "parameters that the hook steps", "no parameter has moved"),
        (
            "rounded(float16)",
            "values rounded to float16",
            "every element of the random steps is as exact as without rounding",
        ),
        (
            "scaled",
            "crafted gradients whose mean is not exact, at some world size",
            "the exact mean in every step: scaled is not needed",
        ),
        ("sum", "the sum, which is not the mean", "the mean"),
    ],
)
def test_claims_that_are_not_needed(claims: str, expected: str, actual: str) -> None:
    world = 3 if "local" in claims else 2
    found = refused("2.10", {f"values@{world}": made_run(world=world)}, claims)
    assert f"Expected: {expected}\nActual: {actual}" in found


def test_norms_follow_the_cause() -> None:
    expecttest.assert_expected_inline(
        refused("2.6", made_run(wrong, world=3)),
        """\
Expected: mean -104, bit for bit
Actual: -156 on rank 0, step 0, bucket 0, parameter p0 (float32), index (0, 0); 141 of 141
    elements of the step are wrong
Likely cause: every element is 1.5 times the mean: it was scaled by a wrong factor [norm
    of result / norm of mean, per step: 1.5 1.5 1.5]""",
    )


def test_a_gradient_of_a_parameter_that_no_rank_has_used() -> None:
    expecttest.assert_expected_inline(
        refused("4.1", made_run(scenario=UNUSED)),
        """\
Expected: no gradient if no rank has fed one
Actual: rank 0, step 0, parameter p1: it has one""",
    )


def test_side_effects() -> None:
    before = event("state", -1, at="start", rng={"torch": "a"})
    after = event("state", -1, at="registered", rng={"torch": "b"})
    later = event("state", -1, at="end", rng={"torch": "c"}, patches=["torch.equal"])
    printed = made_run()
    printed.ranks[0].evidence["printed"] = 10**9
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("9.1", noted(before, after)),
                refused("9.1", changed("stepped", rng_changed=["torch"])),
                refused("9.1", noted(after, later)),
                refused("9.2", changed("stepped", parameters_changed=["p0"])),
                refused("9.5", noted(event("outside", 3, written=["p1"]))),
                refused("9.7", printed),
                refused("9.8", noted(later)),
                refused("9.9", noted(event("dropped", 3, kept=True), scenario=LONG)),
            )
        ),
        """\
Expected: untouched generators
Actual: rank 0: torch changed while the subject was set up
Expected: untouched generators
Actual: rank 0, step 0: torch changed
Expected: untouched generators
Actual: rank 0: torch changed between the steps, or after them
Expected: unchanged parameters
Actual: rank 0, step 0: p0 changed
Expected: only its own bucket written
Actual: rank 0, step 3: .grad of p1
Expected: at most 65536 bytes per call
Actual: rank 0: 1000000000 bytes in 6 calls
Expected: no replaced functions
Actual: rank 0: torch.equal
Expected: a model that is gone
Actual: rank 0: the model is still there""",
    )


def test_memory() -> None:
    sizes = (
        event("memory", step, tensors=10**7 * step, allocated=10**7 * step)
        for step in range(len(LONG.steps))
    )
    expecttest.assert_expected_inline(
        refused("9.4", noted(*sizes, scenario=LONG)),
        """\
Expected: memory that does not grow by more than 1600 bytes
Actual: rank 0: tensors grew by 50000000 bytes in 5 steps
Likely cause: tensors of earlier steps are still in a list, a closure or a cycle of
    references""",
    )


def test_collectives() -> None:
    collective = event(
        "collective",
        1,
        what="allreduce SUM 47 float32",
        group=[0, 1],
        named="0",
        call=1,
        inside=True,
        callback=False,
    )
    waited = noted(collective, event("waited", 1, call=1, where="hook.py:3: work.wait()"))
    stuck = noted(collective)
    stuck.ranks[1].events.append(event("gate", 1, call=1, opened=True))
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("10.1", waited),
                refused("10.1", stuck),
                refused("10.4", noted(collective), "chained"),
            )
        ),
        """\
Expected: a hook that returns before its peers have entered theirs
Actual: rank 0, step 1: it waits in hook.py:3: work.wait()
Expected: a hook that returns before its peers have entered theirs
Actual: rank 0, step 1: it neither returned nor waited for as long as its peers stayed out
Expected: collectives that callbacks start
Actual: rank 0: it starts all of its collectives by itself""",
    )


def test_states_and_claims() -> None:
    loaded = event("loaded", 3, weights_only=False, why="it holds a function")
    late = made_run(lambda *place: mean(*place) * (1 if place[2] < 3 else 2))
    sent = noted()
    for rank in sent.ranks:
        rank.events += [
            event("sent", step, collectives=[["allreduce", 400]]) for step in range(2, 5)
        ]
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("11.4", noted(loaded), "checkpointable"),
                refused("13.4", late, "compressed, warmup(2)"),
                refused("13.7", sent, "compressed(ratio=0.5)"),
            )
        ),
        """\
Expected: a state that torch.load(weights_only=True) takes
Actual: rank 0: it holds a function
Expected: another result than the mean in step 2, the first after the warm-up
Actual: the mean, up to rounding; step 3 is the first that differs
Expected: at most 0.5 of 188 bytes
Actual: rank 0, step 2: 400 bytes, 2.13 times those of the gradients; the largest
    collectives: allreduce 400""",
    )


@pytest.mark.parametrize(
    ("number", "event_before"),
    [
        ("12.1", "its collective had raised"),
        ("12.2", "its peer had died"),
        ("12.3", "the group's timeout had expired"),
        ("12.4", "its peer had died before the last collective"),
    ],
)
def test_failures_that_are_swallowed(number: str, event_before: str) -> None:
    silent = noted(event("fault", 3, unused=False, started=1, raised=False))
    silent.ranks[1].exit = 77
    found = refused(number, silent).replace("\n    ", " ")
    assert f"after {event_before}\nActual: backward() returned on rank" in found
    fields = {"raised": True, "type": "KeyError", "message": "'sum'", "chain": []}
    other = noted(event("fault", 3, unused=False, started=1, **fields))
    other.ranks[1].exit = 77
    found = refused(number, other).replace("\n    ", " ")
    assert f"after {event_before}: the collective's own, or one that names it" in found


def test_parity_with_vanilla_ddp() -> None:
    ours = noted(*(event("model", step, scale=1024) for step in range(9)), scenario=OPTIMIZERS)
    theirs = noted(*(event("model", step, scale=512) for step in range(9)), scenario=OPTIMIZERS)
    runs = {"optimizers@2": ours, "vanilla optimizers@2": theirs}
    expecttest.assert_expected_inline(
        "\n".join((refused("6.1", runs), refused("6.2", runs))),
        """\
Expected: a loss scale of 512, as under vanilla DDP
Actual: rank 0, step 0: 1024
Expected: a skipped step
Actual: rank 0, step 3: the scaler found no overflow""",
    )


def test_zeros() -> None:
    special = made_run(lambda run, r, s, i: mean(run, r, s, i) + 1, SPECIAL)
    expecttest.assert_expected_inline(
        refused("8.3", special, "unbiased"),
        """\
Expected: zeros for zeros
Actual: rank 0, step 4, parameter p0: other values""",
    )


def test_schedules_of_collectives() -> None:
    fields = {"named": "0", "call": 1, "inside": True, "callback": False}
    one = event("collective", 1, what="allreduce SUM 47 float32", group=[0, 1], **fields)
    other = event("collective", 1, what="allreduce 94 float32", group=[0, 1], **fields)
    late = {**other, "group": [1, 0], "inside": False}
    differing = noted(one)
    differing.ranks[1].one("collective")["what"] = "allreduce SUM 94 float32"
    crossed = noted(one, late)
    crossed.ranks[1].events.sort(key=lambda event: event.get("group") == [0, 1])
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("10.2", differing),
                refused("10.6", crossed),
                refused("10.7", {"values@2": noted(one), "other_values@2": noted(other)}),
            )
        ),
        """\
Expected: the same collectives on every rank of a group
Actual: ranks disagree in collective 1 of the group of ranks 0, 1: rank 0 issues allreduce
    SUM 47 float32 (step 1, bucket 0), rank 1 allreduce SUM 94 float32 (step 1, bucket 0)
Expected: one order of groups on ranks that share several
Actual: rank 0 issues allreduce SUM 47 float32 (step 1, bucket 0) on the group of ranks 0,
    1, and rank 1 allreduce 94 float32 (step 1, bucket 0, outside the hook) on the group
    of ranks 1, 0 first
Expected: the same collectives whatever PYTHONHASHSEED is
Actual: collective 1 in the hook on rank 0 is allreduce SUM 47 float32 (step 1, bucket 0)
    in values@2, and allreduce 94 float32 (step 1, bucket 0) in values@2, with another
    PYTHONHASHSEED""",
    )


def test_orders_and_runs_that_differ() -> None:
    def other(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index) * (1 + rank)

    expecttest.assert_expected_inline(
        refused("3.1", made_run(other)),
        """\
Expected: the same bits
Actual: ranks 0 and 1 differ at step 0, grad/p0, element 0: -64 and -128""",
    )


def test_fewer_ranks_than_claimed() -> None:
    expecttest.assert_expected_inline(
        refused("2.11", made_run(world=1)),
        """\
Expected: an error on every rank
Actual: values@1: every rank came to its end without an error
Likely cause: min_world_size is claimed, but the subject does not check it""",
    )


def test_draws_that_all_ranks_share() -> None:
    def noisy(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + index)
        right = mean(run, rank, step, index)
        return right + torch.randn(right.shape, generator=generator)

    scenario = replace(VALUES, steps=("constant",) * 8)
    runs = {f"draws@{world}": made_run(noisy, scenario, world) for world in (2, 4)}
    expecttest.assert_expected_inline(
        refused("13.14", runs, "unbiased"),
        """\
Expected: results on 4 ranks with at most 0.75 times the variance of those on 2 ranks;
    independent draws give 0.5 times
Actual: 4 ranks have 1 times the variance of 2 ranks
Likely cause: some or all ranks draw the same random numbers""",
    )

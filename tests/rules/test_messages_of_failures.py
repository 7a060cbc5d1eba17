"""The messages of rules on failing collectives, and of rules with one sentence each."""

from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch

from conformance.judging.oracles import feedback
from conformance.judging.requirements import require_same
from conformance.judging.twins import require_models_and_twins
from conformance.judging.verdict import Found
from conformance.records.rank_record import Event, RankRecord
from conformance.records.run import Run
from conformance.rules import book
from conformance.scenarios.clusters import BYSTANDERS, TWO_GROUPS
from conformance.scenarios.gradients import at_scale
from conformance.scenarios.hook import AT_SCALE
from conformance.scenarios.model import CALL_FAILS, WORK_FAILS
from conformance.subjects.claims import Claims, parse_claims
from tests.made_runs import event, made_run, read_failures, refused

CAUSES = {
    CALL_FAILS: "an except clause around the collective, or a context that ends errors, swallows "
    "the failure",
    WORK_FAILS: "wait() of an asynchronous collective is never called, or its error is swallowed; "
    "so is that of a future whose value is never read",
}


@pytest.mark.parametrize("kind", [CALL_FAILS, WORK_FAILS])
@pytest.mark.parametrize(
    ("number", "call"),
    [
        ("14.22", "average_parameters()"),
        ("15.30", "step(), or the backward before it,"),
        ("15.31", "step(closure)"),
        ("16.30", "the strategy's context"),
        ("18.26", "the call, or its wait(),"),
    ],
)
def test_a_failure_that_is_swallowed_is_described(number: str, call: str, kind: str) -> None:
    scenario = book()[number].on[0]
    fault = replace(scenario.fault, kind=kind)
    events = [event("fault", 3, started=1, unused=False, collective="allreduce", raised=False)]
    ranks = [RankRecord(rank, [Event(one) for one in events]) for rank in (0, 1)]
    found = refused(number, Run(replace(scenario, fault=fault), 2, ranks)).replace("\n    ", " ")
    assert found == (
        f"Expected: an error from {call} on rank {fault.rank}, after allreduce had failed\n"
        f"Actual: {call} returned on rank {fault.rank} without an error\n"
        f"Likely cause: {CAUSES[kind]}"
    )


def test_the_error_of_another_mistake_is_described() -> None:
    scenario = book()["14.22"].on[0]
    fields: dict[str, Any] = {"raised": True, "type": "KeyError", "message": "0", "chain": []}
    fault = event("fault", 3, started=1, unused=False, collective="allreduce", **fields)
    ranks = [RankRecord(rank, [Event(fault)]) for rank in (0, 1)]
    expecttest.assert_expected_inline(
        refused("14.22", Run(scenario, 2, ranks)),
        """\
Expected: an error from average_parameters() on rank 0, after allreduce had failed: the
    collective's own, or one that names it
Actual: rank 0 raised KeyError: 0
Likely cause: the result of a failed collective was used: call wait() first, and raise
    other errors from that one""",
    )


def test_tensors_that_differ_are_described() -> None:
    found = Found()
    one = {"0/grad/p0": torch.ones(3), "0/grad/p1": torch.ones(3)}
    require_same(one, {"0/grad/p0": torch.ones(2)}, "ranks 0 and 1", found)
    require_same(one, {name: 2 * values for name, values in one.items()}, "ranks 0 and 1", found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: the same gradients
Actual: ranks 0 and 1: only one has 0/grad/p1
Expected: the same shape
Actual: ranks 0 and 1 differ at step 0, grad/p0: [3] and [2]
Expected: the same bits
Actual: ranks 0 and 1 differ at step 0, grad/p0, element 0: 1 and 2""",
    )


def test_a_collective_outside_of_the_group_is_described() -> None:
    foreign = event("foreign", 3, what="barrier", group=[0, 1, 2])
    records = Run(BYSTANDERS, 3, [RankRecord(rank, [Event(foreign)]) for rank in range(3)])
    expecttest.assert_expected_inline(
        refused("24.6", records),
        """\
Expected: collectives of the model's own group alone
Actual: rank 0, step 3: barrier on ranks 0, 1, 2""",
    )
    early = event("foreign", -1, what="barrier", group=[0, 1, 2])
    records = Run(BYSTANDERS, 3, [RankRecord(rank, [Event(early)]) for rank in range(3)])
    expecttest.assert_expected_inline(
        refused("24.6", records),
        """\
Expected: collectives of the model's own group alone
Actual: rank 0, a step of the warm-up: barrier on ranks 0, 1, 2""",
    )


def test_feedback_under_a_loss_scale_is_described() -> None:
    def off(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        return run.fed(rank, step, index) * 9

    found = Found()
    feedback.require_all_delivered(made_run(off), parse_claims("compressed(delta=0.5)"), found, "")
    estimates = parse_claims("compressed(feedback=ef21, delta=0.5)")
    feedback.require_near_estimates(made_run(off), estimates, found, "")
    infinite = made_run(lambda *place: off(*place) / 0)
    feedback.require_all_delivered(infinite, parse_claims("compressed(delta=0.5)"), found, "")
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: gradients that sum to the means within 0.0625, in units without the loss scale
Actual: rank 0, parameter p0: their sum is off by 13.5
Expected: a result within 2.46e+28 of the mean, in units without the loss scale
Actual: rank 0, step 5: off by 4.22e+28
Expected: finite gradients
Actual: rank 0, step 0, parameter p0: none, or not finite""",
    )


def test_a_twin_is_named_by_its_ranks() -> None:
    found = Found()
    require_models_and_twins(made_run(scenario=TWO_GROUPS, world=3), Claims(), found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: mean 4, bit for bit
Actual: no gradient on rank 0, step 0, bucket 0, parameter p0 (float32), index (0, 0); 94
    of 94 elements of the step are wrong [of the model on the group of ranks 0, 2]
Likely cause: a parameter has no gradient at all on at least one rank""",
    )


def test_results_of_other_bits_are_described() -> None:
    network = made_run()
    network.ranks[1].one("value", step=2)["digest"] = "other"
    expecttest.assert_expected_inline(
        refused("22.3", network),
        """\
Expected: the same bits
Actual: ranks 0 and 1: the results of step 2, bucket 0, differ""",
    )


def test_simulated_ranks_are_described() -> None:
    size = 5  # the smallest beyond those that check the simulation
    record = RankRecord(0, [Event(event("simulated", 0, size=size, alike=False))])
    record.tensors = {f"at scale/{size}": at_scale(size).mean(0, keepdim=True).float() + 1}
    run = Run(AT_SCALE, 1, [record])
    texts = [refused(number, run) for number in ("20.1", "20.2")]
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: -0.430167, within the bound of a sum
Actual: 0.569833 among 5 simulated ranks in step 0: -1.325 times the right result
Expected: the same bits on all ranks
Actual: 5 simulated ranks: some have others than rank 0
Expected: the mean of large gradients, within 0.00098
Actual: off by 0.0039 among 5 ranks
Likely cause: the sum is taken before it is divided, and overflows""",
    )

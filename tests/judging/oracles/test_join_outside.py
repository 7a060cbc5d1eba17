"""Steps of a joinable before its first context, on runs written by hand."""

from dataclasses import replace

import expecttest
import torch

from conformance.judging.oracles.join_gradients import OTHER_GRADIENTS
from conformance.judging.oracles.join_outside import outside_step, require_outside
from conformance.judging.verdict import Found
from conformance.records.rank_record import Event
from conformance.records.run import Run
from tests.judging.oracles.test_join import trained
from tests.made_runs import event, read_failures


def stepped_outside(*values: float) -> Run:
    """Return a run with the gradients of one step before the first context, by rank."""
    run = trained()
    before = outside_step(run, (0, 1))
    for rank, value in zip(run.ranks, values, strict=False):
        rank.events.append(Event(event("gradients", before, at=0, parameters=1, calls=1)))
        rank.tensors[f"{before}/0/local/p0"] = torch.tensor([1.0, 3.0])
        rank.tensors[f"{before}/0/grad/p0"] = torch.tensor([1.0, value])
    return run


def refusing(*ranks: int) -> Run:
    """Return a run in which ranks refuse a step before the first context."""
    run = trained()
    before = outside_step(run, (0, 1))
    for rank in ranks:
        run.ranks[rank].events.append(Event(event("refused_outside", before, error="Error: no")))
    return run


def kept_outside(*digests: str, at_first: str = "same", later: str = "same") -> Run:
    """Return a run of a joinable whose gradients are no means, with the state that ranks have after
    steps before the first context.

    Args:
        digests: of a parameter, by rank.
        at_first: that of rank 1 at the end of the first body.
        later: that of rank 1 after the second join.
    """
    run = trained()
    before = outside_step(run, (0, 1))
    for rank, digest in zip(run.ranks, digests, strict=True):
        rank.tensors["0/0/grad/p0"] = torch.tensor([0.5, 0.5])
        state = event("state_of_joinable", before, when="outside", divides=False)
        rank.events.append(Event(state | {"digests": {"p0": digest}}))
    for one in run.ranks[1].all("state_of_joinable"):
        if (one["step"], one["when"]) == (0, "leaving"):
            one["digests"] = {"p0": at_first}
        if (one["step"], one["when"]) == (1, "left"):
            one["digests"] = {"p0": later}
    return run


def judged(run: Run) -> Found:
    """Return the findings on a run."""
    found = Found()
    require_outside(run, found)
    return found


def test_means_and_refusals_on_all_ranks_are_right() -> None:
    assert not judged(stepped_outside(3.0, 3.0)).failures
    refused = judged(refusing(0, 1))
    assert not refused.failures
    assert refused.notes == ["steps outside of a context: Error: no"]


def test_steps_that_are_not_there_are_not_judged() -> None:
    reason = judged(trained()).not_applicable
    assert reason == "it leaves no gradients in parameters that autograd trains"


def test_state_is_judged_as_far_as_even_inputs_keep_it() -> None:
    assert judged(kept_outside("one", "one")).checks
    assert not judged(kept_outside("one", "one")).failures
    for parted in ({"at_first": "own"}, {"later": "own"}):
        found = judged(kept_outside("one", "other", **parted))
        assert not found.failures
        assert found.not_applicable == OTHER_GRADIENTS


def test_state_of_three_ranks_is_not_compared() -> None:
    run = kept_outside("one", "other")
    run.world = 3
    run.ranks.append(replace(run.ranks[0], rank=2))
    assert not judged(run).failures


def test_failures_are_described() -> None:
    texts = [
        read_failures(judged(run).failures)
        for run in (stepped_outside(3.0, 5.0), refusing(1), kept_outside("one", "other"))
    ]
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: the sum of the gradients of ranks [0, 1], divided by 2, as in the first context
Actual: rank 1, step 0 before the first context, parameter 0: the gradient has other
    values
Likely cause: the step may need what a join hook sets up in the first context
Expected: a step outside of a context, or an error on every rank
Actual: ranks [1] alone raise an error
Expected: the same p0 on all ranks after steps outside of a context, as at the end of the
    body of the first context
Actual: p0 differs between the ranks after 3 steps before the first context
Likely cause: an average over the ranks, or a common initial state, may be set up only
    when the first context is entered""",
    )

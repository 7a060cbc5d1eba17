"""Steps of a joinable before its first context, on runs written by hand."""

import expecttest
import torch

from conformance.judging.oracles.join_outside import outside_step, require_means_outside
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


def judged(run: Run) -> Found:
    """Return the findings on a run."""
    found = Found()
    require_means_outside(run, found)
    return found


def test_means_and_refusals_on_all_ranks_are_right() -> None:
    assert not judged(stepped_outside(3.0, 3.0)).failures
    refused = judged(refusing(0, 1))
    assert not refused.failures
    assert refused.notes == ["steps outside of a context: Error: no"]


def test_steps_that_are_not_there_are_not_judged() -> None:
    reason = "it leaves no gradients in parameters that autograd trains"
    assert judged(trained()).not_applicable == reason


def test_failures_are_described() -> None:
    texts = [
        read_failures(judged(run).failures) for run in (stepped_outside(3.0, 5.0), refusing(1))
    ]
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: the sum of the gradients of ranks [0, 1], divided by 2, as in the first context
Actual: rank 1, step 0 before the first context, parameter 0: another gradient
Likely cause: what a join hook sets up is not there before the first context
Expected: a step outside of a context, or an error on every rank
Actual: ranks [1] alone raise an error""",
    )

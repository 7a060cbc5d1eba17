"""The messages of rules for sync strategies, on runs written by hand."""

from typing import Any

import expecttest
import torch

from conformance.judging.oracles.strategy import right
from conformance.judging.oracles.strategy_buffers import require_buffers
from conformance.judging.verdict import Found
from conformance.records.rank_record import Event, RankRecord, Tensors
from conformance.records.run import Run
from conformance.scenarios.model import Scenario
from conformance.scenarios.strategy import ACCUMULATED, COUNTED, PLAIN, RAISES, RANDOM, SUBGROUPS
from tests.made_runs import event, read_failures, refused

RIGHT = {
    "without": [],
    "strides_changed": [],
    "synchronises": True,
    "sent": [1, 64],
    "gradients": 64,
    "changed": [],
    "steps_taken": [1],
    "own_steps": [1, 1],
}


def synchronised(scenario: Scenario = PLAIN, world: int = 2, **fields: Any) -> Run:
    """Return a run in which every step leaves the right gradients.

    ``fields`` are those of the events of steps.
    """
    run = Run(scenario, world, [RankRecord(rank, [], Tensors(rank)) for rank in range(world)])
    for rank in run.ranks:
        for step in range(len(scenario.steps)):
            rank.events.append(Event(event("synchronised", step, **(RIGHT | fields))))
            for index, spec in enumerate(scenario.params):
                values = right(run, rank.rank, step, index).float()
                rank.tensors[f"{step}/grad/p{index}"] = values.reshape(spec.shape)
    return run


def noted(run: Run, *events: dict[str, Any]) -> Run:
    """Add events to each rank."""
    for rank in run.ranks:
        rank.events += [Event(one) for one in events]
    return run


def without(run: Run, rank: int) -> Run:
    """Take a gradient of the first step from a rank."""
    del run.ranks[rank].tensors["0/grad/p0"]
    return run


def test_a_right_strategy_is_not_refused() -> None:
    for number in ("16.1", "16.6"):
        assert refused(number, synchronised()) == ""


def test_gradients_are_described() -> None:
    wrong = synchronised()
    wrong.ranks[1].tensors["0/grad/p0"] *= 2
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("16.1", wrong),
                refused("16.1", without(synchronised(), 1)),
                refused("16.6", without(synchronised(RANDOM), 0)),
                refused("16.6", without(synchronised(RANDOM), 1)),
                refused("16.6", wrong),
                refused("16.10", synchronised(strides_changed=[1])),
                refused("16.16", synchronised(), "all_used"),
            )
        ),
        """\
Expected: the sum over micro-batches of the means: -64
Actual: rank 1, step 0, p0, index 0: -128 (14 of 15 elements differ)
Likely cause: the sum, not divided
Expected: the mean
Actual: rank 1, step 0, p0: there is no gradient
Likely cause: it was lost
Expected: a gradient on every rank, or on none
Actual: rank 1, step 0: p0 has a gradient, but not on rank 0
Likely cause: to an optimizer zeros differ from no gradient
Expected: a gradient on every rank, or on none
Actual: rank 1, step 0: p0 has no gradient, but has one on rank 0
Likely cause: to an optimizer zeros differ from no gradient
Expected: the bits of rank 0
Actual: rank 1, step 0: p0 differs
Expected: the strides of the parameter
Actual: rank 0, step 0: the gradient of p1 has other strides
Expected: a gradient other than the mean
Actual: strategy@2: every gradient is the mean: all_used is not needed""",
    )


def test_settings_and_traffic_are_described() -> None:
    failed = event("failed", 1, same=False, came="nothing")
    outside = event("collective", 1, inside=True, what="allreduce 4 float32", group=[0, 1, 2, 3])
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("16.13", synchronised(synchronises=False)),
                refused("16.13", synchronised(ACCUMULATED, hook_calls=[0, 1])),
                refused("16.14", noted(synchronised(RAISES, synchronises=False), failed)),
                refused("16.26", noted(synchronised(), failed)),
                refused("16.9", noted(synchronised(SUBGROUPS, 4), outside)),
                refused("16.18", synchronised(COUNTED, sent=[4, 256])),
            )
        ),
        """\
Expected: True, as before
Actual: rank 0, step 0: model.require_backward_grad_sync is False after the last context
Likely cause: a setting of the context was not restored
Expected: 2 calls of a hook by register_post_accumulate_grad_hook, one in each backward
Actual: rank 0, step 0: 0 for p0, p1
Likely cause: hooks of others are removed with the strategy's own
Expected: the exception that was raised inside
Actual: rank 0, step 1: nothing came out
Likely cause: __exit__ returned True
Expected: True, as before
Actual: rank 0, step 0: model.require_backward_grad_sync is False after the last context
Likely cause: a setting of the context was not restored
Expected: the exception that was raised inside
Actual: rank 0, step 1: nothing came out
Expected: collectives over ranks [0, 2]
Actual: rank 0, step 1: allreduce 4 float32 over ranks [0, 1, 2, 3]
Likely cause: the model's process_group was not used
Expected: at most twice the bytes of its gradients
Actual: rank 0, step 0: 4.00 times the bytes of its gradients, in 4 collectives: 256 bytes
    for 64""",
    )


def test_things_of_the_trainer_are_described() -> None:
    changed = ["the values of p0", "requires_grad of p1", "the mode of x", "the mode of y"]
    assert refused("16.39", synchronised()) == ""
    expecttest.assert_expected_inline(
        refused("16.39", synchronised(changed=changed)),
        """\
Expected: parameters, requires_grad, modes and states as before
Actual: rank 0, step 0: the values of p0, requires_grad of p1, the mode of x changed, 4 in
    all""",
    )
    expecttest.assert_expected_inline(
        refused("16.39", synchronised(steps_taken=[1, 0])),
        """\
Expected: one step of each optimizer by a call of step()
Actual: rank 0, step 0: one call of step() on each optimizer made these numbers of steps:
    [1, 0]
Likely cause: a method of the optimizer was replaced, and not put back""",
    )
    expecttest.assert_expected_inline(
        refused("16.39", synchronised(own_steps=[1, 0])),
        """\
Expected: one call of each step() that the trainer has put on an optimizer
Actual: rank 0, step 0: [1, 0] calls
Likely cause: a step() of the trainer was deleted, or replaced by an earlier one""",
    )


def test_buffers_are_described() -> None:
    found = Found()
    run = synchronised()
    for rank in run.ranks:
        for step in range(3):
            rank.tensors[f"{step}/buffer/running"] = torch.tensor([100.0])
            rank.tensors[f"{step}/buffer/seen"] = torch.tensor(2**53 + 1)
            for name in ("samples", "wrapped", "total", "share", "level"):
                rank.tensors[f"{step}/buffer/{name}"] = torch.tensor([7, 8])
            rank.tensors[f"{step}/buffer/mask"] = torch.tensor([False, True, True])
    require_buffers(run, found)
    expecttest.assert_expected_inline(
        read_failures(found.failures[:5]),
        """\
Expected: running statistics: 32, as the step begins with the buffers of rank 0
Actual: rank 0, step 0: 100
Likely cause: not the buffers of the group's first rank: DDP sends buffers only in a
    forward that follows one outside of no_sync(), so that a strategy may have to send
    them
Expected: counts in int64: 395491926476035103, as the step begins with the buffers of rank
    0
Actual: rank 0, step 0: 9007199254740993
Likely cause: not the buffers of the group's first rank: DDP sends buffers only in a
    forward that follows one outside of no_sync(), so that a strategy may have to send
    them
Expected: counts in int32 (channels_last): 0, as the step begins with the buffers of rank
    0
Actual: rank 0, step 0: nan
Likely cause: not the buffers of the group's first rank: DDP sends buffers only in a
    forward that follows one outside of no_sync(), so that a strategy may have to send
    them
Expected: counts in uint8 (a slice of a larger tensor): 0, as the step begins with the
    buffers of rank 0
Actual: rank 0, step 0: nan
Likely cause: not the buffers of the group's first rank: DDP sends buffers only in a
    forward that follows one outside of no_sync(), so that a strategy may have to send
    them
Expected: a mask of bools with the bits (channels_last): 37919, as the step begins with
    the buffers of rank 0
Actual: rank 0, step 0: 6
Likely cause: not the buffers of the group's first rank: DDP sends buffers only in a
    forward that follows one outside of no_sync(), so that a strategy may have to send
    them""",
    )

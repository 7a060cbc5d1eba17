"""The messages of rules for averagers, on runs written by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import expecttest
import torch

from conformance.judging.oracles.averager import due
from conformance.judging.oracles.averager_like import require_restored
from conformance.judging.oracles.averager_records import fed_to
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.averager import FORMS, PLAIN, RANDOM
from conformance.scenarios.averager_loops import CLOSE, OVERFLOWS, is_of_subclass
from conformance.scenarios.averager_training import (
    CHANGING,
    IDLE,
    IDLE_FROZEN,
    REMOVED,
    with_option,
)
from conformance.scenarios.averaging_schedule import QUIET
from conformance.scenarios.model import Scenario
from conformance.subjects.claims import parse_claims
from tests.made_runs import event, read_failures, refused

PERIODIC = "periodic(period=4, warmup_steps=10)"
EVERY_STEP = "periodic(period=1)"
LIKE = "like(EMAModelAverager, decay=0.5)"
CLAIMS = parse_claims(PERIODIC, "averager")

Result = Callable[[Run, int, int, int], torch.Tensor]


def mean(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the right parameter after a call, in float64."""
    ranks = due(run, rank, step, CLAIMS) or (rank,)
    return torch.stack([fed_to(run, other, step, index) for other in ranks]).mean(0)


def averaged(
    result: Result = mean, scenario: Scenario = PLAIN, world: int = 2, **fields: Any
) -> Run:
    """Return a run in which each call leaves the results of a function.

    ``fields`` are those of the events of calls; those of a right averager are empty.
    """
    names = (
        "grads_changed",
        "grads_moved",
        "strides_changed",
        "moved",
        "asks_for_gradients",
        "form_changes",
    )
    right = {**{name: [] for name in names}, "grad_mode_changed": False}
    run = Run(scenario, world, [RankRecord(rank, exit=0) for rank in range(world)])
    for rank in run.ranks:
        rank.events = [
            event("averaged", step, **(right | fields)) for step in range(len(scenario.steps))
        ]
        for step in range(len(scenario.steps)):
            for index, spec in enumerate(scenario.params):
                values = result(run, rank.rank, step, index).to(getattr(torch, spec.dtype))
                rank.tensors[f"{step}/parameter/p{index}"] = values.reshape(spec.shape)
    return run


def fed_values(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return fed_to(run, rank, step, index)


def of_one_rank_more(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return mean(run, rank, step, index) * (1 + rank)


def of_the_first(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return fed_to(run, 0, step, index)


def beside(run: Run, reference: Run) -> Run:
    """Put the run of a reference beside another."""
    run.reference = reference
    return run


def test_a_right_averager_is_not_refused() -> None:
    assert refused("14.1", averaged(), PERIODIC) == ""
    assert refused("14.2", averaged(), PERIODIC) == ""
    assert refused("14.8", averaged(), PERIODIC) == ""


def test_values_and_schedules_are_described() -> None:
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("14.1", averaged(of_one_rank_more), PERIODIC),
                refused("14.2", averaged(fed_values), PERIODIC),
                refused("14.2", averaged(of_one_rank_more), PERIODIC),
                refused("14.3", averaged(of_one_rank_more, RANDOM, 3), PERIODIC),
            )
        ),
        """\
Expected: the mean over ranks [0, 1]: -16
Actual: rank 1, step 10, p0, index 0: -32 (13 of 15 elements differ)
Likely cause: the sum, not divided
Expected: an average over ranks [0, 1]
Actual: rank 0, step 10: no parameter has changed
Likely cause: the schedule is shifted, or a step was not counted or counted twice
Expected: parameters as they were: this step does not average
Actual: rank 1, step 0: p0, p1, p2, p3, p4 changed
Likely cause: the schedule is shifted, or a step was not counted or counted twice
Expected: the bits of rank 0
Actual: rank 1, step 10: p0 differs""",
    )


def test_changes_of_the_callers_objects_and_mode_are_described() -> None:
    changes = ["'params' of group 0", "the list"]
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("14.4", averaged(scenario=FORMS, form_changes=changes), PERIODIC),
                refused("14.8", averaged(grad_mode_changed=True), PERIODIC),
            )
        ),
        """\
Expected: the list and the groups as they were
Actual: rank 0, step 0: another content of 'params' of group 0, the list
Likely cause: the list or the group of the caller is changed in place: make a list of your
    own
Expected: the same torch.is_grad_enabled() as before
Actual: rank 0, step 0: the grad mode has changed
Likely cause: the grad mode is set to a constant at the end: use torch.no_grad() as a
    context""",
    )


def test_averages_that_are_left_out_are_described() -> None:
    """An overflow, close ranks and steps without anything to train are likely causes."""
    idle = with_option(IDLE, IDLE_FROZEN, "12")
    some = replace(FORMS, session_seed=1)
    of_subclass = [i for i in range(len(some.params)) if is_of_subclass(some, i)]

    def leaves_subclasses(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        return (fed_values if index in of_subclass else mean)(run, rank, step, index)

    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("14.16", averaged(fed_values, OVERFLOWS), EVERY_STEP),
                refused("14.18", averaged(fed_values, idle), PERIODIC),
                refused("14.3", averaged(fed_values, CLOSE), EVERY_STEP),
                refused("14.3", averaged(of_the_first, CLOSE), EVERY_STEP),
                refused("14.4", averaged(leaves_subclasses, some), PERIODIC),
                refused("14.4", averaged(fed_values, some), PERIODIC),
            )
        ),
        """\
Expected: the mean over ranks [0, 1]: -0.275259942
Actual: rank 0, step 0, p0, index 0: -0.161343575 (15 of 15 elements differ)
Likely cause: left as it was: a gradient of some rank is not finite, or overflows if it is
    squared; parameters are finite, and averaged as always
Expected: the mean over ranks [0, 1]: -18
Actual: rank 0, step 10, p0, index 1: -16 (14 of 15 elements differ)
Likely cause: left as it was: calls in which all parameters are frozen, or none are given,
    were not counted
Expected: the bits of rank 0
Actual: rank 1, step 0: p0 differs
Likely cause: an average is left out if ranks are close to each other, or values small
Expected: the mean over ranks [0, 1]: 2.86898721e-05
Actual: rank 0, step 0, p0, index 0: 2.86898576e-05 (15 of 15 elements differ)
Likely cause: left as it was: values are close to those of other ranks, or of the average
    before, or small
Expected: the mean over ranks [0, 1]: -18
Actual: rank 0, step 10, p0, index 1: -16 (14 of 15 elements differ)
Likely cause: left as it was: it is of a subclass of torch.nn.Parameter
Expected: the mean over ranks [0, 1]: -18
Actual: rank 0, step 10, p0, index 1: -16 (14 of 15 elements differ)
Likely cause: left as it was""",
    )


def test_what_stays_as_it_was_is_described() -> None:
    forms = {
        "grads_changed": [0],
        "grads_moved": [4],
        "strides_changed": [1],
        "asks_for_gradients": [2],
        "moved": [3],
    }
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("14.8", averaged(**forms), PERIODIC),
                refused("14.9", averaged(**forms), PERIODIC),
            )
        ),
        """\
Expected: the same strides as before
Actual: rank 0, step 0: strides of p1 changed
Expected: the same requires_grad as before
Actual: rank 0, step 0: requires_grad of p2 changed
Expected: the same grads as before
Actual: rank 0, step 0: grads of p0 changed
Expected: grads in the memory that they had before
Actual: rank 0, step 0: grads of p4 have other memory
Likely cause: p.grad is another tensor: views of DDP's buckets, or of a flat buffer, and
    the optimizer's hold the old one; write into it
Expected: the same memory as before
Actual: rank 0, step 0: p3 moved""",
    )


def test_parameters_that_a_load_changes_are_described() -> None:
    run = averaged()
    run.ranks[1].events.append(
        event("changed_by_state", -1, call="load_state_dict()", parameters=[0, 2])
    )
    expecttest.assert_expected_inline(
        refused("14.11", run, PERIODIC),
        """\
Expected: the same parameters after load_state_dict() as before: the trainer saves and
    loads the model
Actual: rank 1: p0, p2 changed
Likely cause: values of the state, such as those at the begin of a round, are written into
    the model; or state_dict() makes an average""",
    )


def test_differences_from_a_reference_are_described() -> None:
    without = averaged(fed_values)
    del without.ranks[0].tensors["10/parameter/p0"]
    without.ranks[0].events.append(event("not_applied", 10, error="ValueError: no"))
    evaluated = averaged()
    for rank in evaluated.ranks:
        for index in range(len(evaluated.scenario.params)):
            rank.tensors[f"10/applied/p{index}"] = rank.tensors[f"10/parameter/p{index}"]
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("14.1", beside(averaged(of_one_rank_more), averaged()), LIKE),
                refused("14.1", beside(without, averaged()), LIKE),
                refused("14.12", beside(averaged(), evaluated), LIKE),
                refused("14.2", beside(averaged(fed_values), averaged()), LIKE),
                refused("14.2", beside(averaged(), averaged(fed_values)), LIKE),
                refused("14.3", beside(averaged(of_one_rank_more), averaged()), LIKE),
            )
        ),
        """\
Expected: the result of like(EMAModelAverager, decay=0.5): -16 within 0.00024
Actual: rank 1, step 0, p0 of averager@2, index 0: -32 (15 of 15 elements differ)
Expected: a value for step 10, p0, as the reference has
Actual: rank 0: none; applied() raised ValueError: no
Expected: the result of like(EMAModelAverager, decay=0.5): -18 within 0.000849
Actual: rank 1, step 10, p0 of averager@2, index 1: -20 (14 of 15 elements differ)
Expected: a value for step 10, p0 in applied(), as the reference has
Actual: rank 0: none; the averager has no applied(params), or refuses to be evaluated
Expected: an average
Actual: rank 0, step 10: no parameter changed
Likely cause: the schedule is shifted, or a step was not counted or counted twice
Expected: parameters as they were
Actual: rank 0, step 10: p0, p1, p2, p3, p4 changed
Likely cause: the schedule is shifted, or a step was not counted or counted twice
Expected: replicas that agree whenever those of the reference agree
Actual: ranks 0 and 1 differ in 4/parameter/p2 of averager@2""",
    )


def taken_out() -> Run:
    """Return a run that averages a parameter which is no longer given."""
    scenario = with_option(replace(CHANGING, steps=("crafted",) * 6), "removal", 5)
    run = averaged(scenario=scenario)
    for rank in run.ranks:
        rank.tensors[f"5/parameter/p{REMOVED[0]}"] += 1
    return run


def test_quiet_steps_and_evaluations_are_described() -> None:
    quiet = replace(PLAIN, steps=("crafted", QUIET, "crafted"))
    changing = averaged(scenario=quiet)
    for rank in changing.ranks:
        rank.events.append(event("quiet_change", 1, parameters=[0, 2]))
    frozen = averaged()
    for rank in frozen.ranks:
        rank.tensors["0/parameter/p0"] += 1
    found = Found()
    evaluated = averaged()
    for rank in evaluated.ranks:
        rank.events += [
            event("evaluated", 3, failed=failed, changed=changed, same_state=not failed)
            for failed, changed in ((0, [0]), (1, [0]))
        ]
    require_restored(evaluated, found)
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("14.2", changing, PERIODIC),
                refused("14.2", beside(changing, averaged(scenario=quiet)), LIKE),
                refused("14.5", frozen, PERIODIC),
                refused("14.18", taken_out(), PERIODIC),
                read_failures(found.failures[:3]),
            )
        ),
        """\
Expected: parameters as they were
Actual: rank 0, step 1: p0, p2 changed
Likely cause: the schedule is shifted, or a step was not counted or counted twice
Expected: changes in the steps []
Actual: rank 0: steps [1] changed them
Likely cause: the schedule is shifted, or a step was not counted or counted twice
Expected: the parameter as it was
Actual: rank 0, step 0, p0, index 0: -111 (15 of 15 elements differ)
Likely cause: averaged at a step that does not average
Expected: the parameter as it was
Actual: rank 0, step 5, p5, index 0: -1 (30 of 30 elements differ)
Likely cause: a parameter that is not given, or no longer, is averaged
Expected: the parameters as they were, after the end of an evaluation inside applied()
Actual: rank 0, step 3: other values of p0
Expected: the parameters as they were, after an exception of an evaluation inside
    applied()
Actual: rank 0, step 3: other values of p0
Likely cause: the parameters are not restored if an exception ends the context
Expected: the same state_dict() within applied() as before it
Actual: rank 0, step 3: another one
Likely cause: averages and parameters have changed places: a state that is saved while the
    averages are evaluated has the wrong ones""",
    )

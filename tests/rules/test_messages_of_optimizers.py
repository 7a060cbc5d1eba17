"""The messages of rules for optimizer wrappers, on runs written by hand."""

import re
from typing import Any

import expecttest

from conformance.judging.oracles.optimizer import require_steps_with_some_gradient
from conformance.judging.oracles.optimizer_calls import (
    require_calls_under_scaler,
    require_empty_group_refused_by_all,
    require_own_entries,
    require_right_with_rates,
)
from conformance.judging.oracles.optimizer_steps import right_steps
from conformance.judging.verdict import Found
from conformance.records.rank_record import Event, RankRecord, Tensors
from conformance.records.run import Run
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import CLOSURE, PLAIN, RANDOM, SAVED
from conformance.scenarios.optimizer_states import RESTORED_RATES, SCALED
from conformance.scenarios.optimizer_training import MANY_GROUPS, RESUMED_GROUPS, plan_of
from tests.made_runs import event, read_failures, refused

OPTIONS = {"lr": 0.125, "momentum": 1.0}  # more digits at each step with 0.5


def stepped(scenario: Scenario = PLAIN, averager: bool = False, world: int = 2) -> Run:
    """Return a run of a right optimizer with an averager or without."""
    made = event("made", -1, averager=averager, options=OPTIONS, takes_any=True)
    run = Run(scenario, world, [RankRecord(rank, [made], Tensors(rank)) for rank in range(world)])
    for rank in run.ranks:
        for step in range(len(scenario.steps)):
            rank.events.append(Event(event("stepped", step)))
            if averager:
                asked = event("asked", step, stepped=True, missing=[], others=0, without=[])
                rank.events.append(Event(asked))
    for (rank, step), right in right_steps(run).items():
        if step < len(scenario.steps):
            for index, (values, spec) in enumerate(zip(right.after, scenario.params, strict=True)):
                kept = values.float().reshape(spec.shape)
                run.ranks[rank].tensors[f"{step}/parameter/p{index}"] = kept
    return run


def changed(run: Run, name: str, **fields: Any) -> Run:
    """Change fields of all events of a name."""
    for rank in run.ranks:
        for one in rank.all(name):
            one |= fields
    return run


def noted(run: Run, *events: dict[str, Any]) -> Run:
    """Add events to each rank."""
    for rank in run.ranks:
        rank.events += [Event(one) for one in events]
    return run


def moved(run: Run, step: int, index: int, change: Any) -> Run:
    """Change a parameter of rank 1 after a step."""
    tensors = run.ranks[1].tensors
    name = f"{step}/parameter/p{index}"
    tensors[name] = change(tensors[name])
    return run


def test_a_right_optimizer_is_not_refused() -> None:
    for averager in (False, True):
        assert refused("15.1", stepped(averager=averager)) == ""


def test_parameters_are_described() -> None:
    late = stepped(averager=True)
    for rank in late.ranks:
        right = right_steps(late)[rank.rank, 10]
        for index, spec in enumerate(PLAIN.params):
            kept = right.stepped[index].float().reshape(spec.shape)
            rank.tensors[f"10/parameter/p{index}"] = kept
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("15.1", moved(stepped(), 3, 0, lambda values: values + 1)),
                refused("15.1", moved(stepped(), 3, 0, lambda values: values.double())),
                refused("15.3", late),
                refused("15.4", moved(stepped(RANDOM, world=3), 3, 0, lambda values: values + 1)),
            )
        ),
        """\
Expected: the optimizer's step: 69.5625
Actual: rank 1, step 3, p0, index 0: 70.5625 (15 of 15 elements differ)
Expected: a parameter of float32
Actual: rank 1, step 3: p0 is torch.float64
Expected: the optimizer's step, averaged over ranks [0, 1]: 94
Actual: rank 0, step 10, p0, index 0: 163.8125 (15 of 15 elements differ)
Likely cause: it stepped, and the average is lost
Expected: the optimizer's step: 11.7318206
Actual: rank 1, step 3, p0, index 0: 12.7318201 (15 of 15 elements differ)
Expected: the bits of rank 0
Actual: rank 1, step 3: p0 differs""",
    )


def test_calls_of_the_averager_are_described() -> None:
    twice = stepped(averager=True)
    noted(twice, event("asked", 3, stepped=True, missing=[], others=0, without=[]))
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("15.2", twice),
                refused("15.2", changed(stepped(averager=True), "asked", stepped=False)),
                refused("15.2", changed(stepped(averager=True), "asked", missing=[2], others=1)),
            )
        ),
        """\
Expected: one call of the averager
Actual: rank 0, step 3: the averager was called 2 times
Likely cause: the averager's count runs ahead of the steps
Expected: a call of the averager after the optimizer's step
Actual: rank 0, step 0: no parameter had been stepped before the call
Expected: a call of the averager with all parameters
Actual: rank 0, step 0: p2 missing
Likely cause: the averager was given copies""",
    )


def test_closures_are_described() -> None:
    closure = {"calls": [False, True], "loss": None}
    called = noted(stepped(CLOSURE), *(event("closure", step, **closure) for step in range(8)))
    swallowed = noted(stepped(CLOSURE), event("failed", 1, same=False, came="nothing"))
    expecttest.assert_expected_inline(
        "\n".join(refused("15.7", run) for run in (stepped(CLOSURE), called, swallowed)),
        """\
Expected: a step with a closure
Actual: rank 0, step 0: no record of one
Expected: the closure's loss, -inf
Actual: rank 0, step 2: step returned None
Expected: the closure's loss, nan
Actual: rank 0, step 7: step returned None
Expected: the closure's loss, inf
Actual: rank 1, step 4: step returned None
Expected: one call of the closure
Actual: rank 0, step 0: 2 calls of the closure
Expected: gradients enabled in the closure
Actual: rank 0, step 0: torch.is_grad_enabled() was False
Expected: the closure's loss, 1
Actual: rank 0, step 0: step returned None
Expected: a step with a closure
Actual: rank 0, step 8: no record of one
Expected: the exception that the closure has raised
Actual: rank 0, step 1: nothing came out
Expected: a step with a closure
Actual: rank 0, step 0: no record of one""",
    )


def test_options_and_states_are_described() -> None:
    zeroed = event("zeroed", 1, keeps=True, left=[0], none=[1])
    errors = {
        "isinstance": "it is a Wrapper",
        "scheduler": "TypeError: no",
        "hook": "2 calls",
        "pre_hook": "called 2 times in a step",
        "hook_calls": {"pre-step": 2, "post-step": 1},
    }
    saved = stepped(SAVED)
    for rank in saved.ranks:
        last = SAVED.resume.saves_at - 1
        right = right_steps(saved)[rank.rank, last].momenta
        rank.tensors[f"{last}/state/0/momentum_buffer"] = right[1]
        rank.tensors[f"{last}/state/1/momentum_buffer"] = right[0]
    bare = stepped(SAVED)
    groups = [{"lr": 0.5, "momentum": 0.5, "params": [0]}]
    expecttest.assert_expected_inline(
        "\n".join(
            (
                refused("15.8", noted(stepped(), zeroed)),
                refused("15.15", noted(stepped(), event("consolidated", 3, form=False))),
                refused(
                    "15.15",
                    noted(saved, event("consolidated", 3, form=True, groups=groups)),
                ),
                refused("15.15", noted(bare, event("consolidated", 3, form=True, groups=groups))),
                refused("15.18", noted(stepped(), event("as_optimizer", 3, **errors))),
                refused("15.41", noted(stepped(), event("as_optimizer", 3, **errors))),
            )
        ),
        """\
Expected: no gradient, or zeros
Actual: rank 0, step 1: zero_grad(set_to_none=False) left the gradients of p0
Expected: zeros
Actual: rank 0, step 1: zero_grad(set_to_none=False) left None for p1
Expected: a dict with state and param_groups
Actual: rank 0: state_dict() returned something else
Expected: param_groups [{'lr': 0.125, 'momentum': 1.0, 'params': [0, 1, 2, 3, 4, 5, 6,
    7]}]
Actual: rank 0, step 12: [{'lr': 0.5, 'momentum': 0.5, 'params': [0]}]
Expected: no momentum of p0, or zeros: it has had no gradient
Actual: rank 0, step 12: state[0] has another momentum_buffer
Likely cause: it is the momentum of p1
Expected: the momentum of p1
Actual: rank 0, step 12: state[1] has another momentum_buffer
Likely cause: it is the momentum of p0
Expected: param_groups [{'lr': 0.125, 'momentum': 1.0, 'params': [0, 1, 2, 3, 4, 5, 6,
    7]}]
Actual: rank 0, step 12: [{'lr': 0.5, 'momentum': 0.5, 'params': [0]}]
Expected: the momentum of p1
Actual: rank 0, step 12: state[1] has no momentum_buffer
Expected: a torch.optim.Optimizer
Actual: rank 0: it is a Wrapper
Expected: a scheduler that steps it
Actual: rank 0: TypeError: no
Expected: a post-step hook that runs once, at the end of a step
Actual: rank 0: 2 calls
Expected: a pre-step hook that runs once
Actual: rank 0: called 2 times in a step
Expected: a hook that runs once in a step
Actual: rank 0: a pre-step hook ran 2 times""",
    )


def test_steps_without_an_average_are_described() -> None:
    plain = {"lr": 0.125, "momentum": 0.0}
    found = Found()
    require_steps_with_some_gradient(
        moved(changed(stepped(), "made", options=plain), 0, 0, lambda values: values + 1), found
    )
    expecttest.assert_expected_inline(
        read_failures(found.failures[:1]),
        """\
Expected: a step with the gradient of one rank; or the claim averages
Actual: rank 0, step 1: p0 has been stepped with another gradient""",
    )


def test_calls_under_a_gradient_scaler_are_described() -> None:
    scaling = plan_of(SCALED).scaling
    assert scaling is not None
    first, second, *_ = sorted(scaling.everywhere)
    taken = min(set(range(len(SCALED.steps))) - {*scaling.everywhere, scaling.alone})
    rank = RankRecord(0, [], Tensors(0))
    for step, calls in ((taken, 0), (first, 2), (second, 0)):
        rank.events += [Event(event("stepped", step))]
        rank.events += [Event(event("asked", step, missing=[], others=0, without=[]))] * calls
    found = Found()
    require_calls_under_scaler(Run(SCALED, 1, [rank]), found)
    expecttest.assert_expected_inline(
        re.sub(r"step \d+", "step N", read_failures(found.failures)),
        """\
Expected: one call of the averager, also if this rank's gradients overflow
Actual: rank 0, step N: the averager was called 0 times
Expected: one call of the averager at most
Actual: rank 0, step N: the averager was called 2 times
Expected: the same number of calls of the averager in all steps that are skipped on all
    ranks
Actual: rank 0, step N: 2; rank 0, step N: 0""",
    )


def test_entries_in_groups_that_are_still_the_old_ones_are_left_out() -> None:
    made = event("made", -1, averager=False, options=OPTIONS, takes_any=True)
    rank = RankRecord(0, [made, event("entries", 0, rates=[0.5], groups=[])], Tensors(0))
    found = Found()
    require_own_entries(Run(RESUMED_GROUPS, 1, [rank]), found)
    assert not found.failures
    assert found.notes == [
        "the user's own entries in groups are not judged after a state was loaded: its "
        "param_groups are not the loaded ones then"
    ]


def test_optimizers_without_learning_rates_in_tensors_are_noted() -> None:
    found = Found()
    require_right_with_rates(changed(stepped(RESTORED_RATES), "made", takes_any=False), found)
    assert found.notes == ["learning rates in tensors are not judged: it takes no optimizer"]
    found = Found()
    refusal = event("refuses_tensor_rates", 0, error="no tensors")
    require_right_with_rates(noted(stepped(RESTORED_RATES), refusal), found)
    assert found.notes == [
        "optimizer_restored_rates@2: learning rates are numbers, since no tensors"
    ]


def test_a_group_without_parameters_is_refused_by_all_ranks_or_by_none() -> None:
    refusal = event("refuses_empty_group", -1, why="ValueError: empty")
    found = Found()
    run = Run(MANY_GROUPS, 2, [RankRecord(rank, [], Tensors(rank)) for rank in range(2)])
    require_empty_group_refused_by_all(noted(run, refusal), found)
    assert not found.failures
    assert found.notes == ["optimizer_many_groups@2: no group is empty, since ValueError: empty"]
    ranks = [RankRecord(0, [], Tensors(0)), RankRecord(1, [Event(refusal)], Tensors(1))]
    found = Found()
    require_empty_group_refused_by_all(Run(MANY_GROUPS, 2, ranks), found)
    (failure,) = found.failures
    assert failure.expected == "the same answer of all ranks to a group without a parameter"
    assert failure.actual == "rank 1 refuses it, and rank 0 does not"

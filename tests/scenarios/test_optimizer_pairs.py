"""Tests of pairs of steps of two optimizers, and of the ways in which gradients are cleared."""

from dataclasses import replace

from conformance.scenarios.averager_training import turn
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import PLAIN
from conformance.scenarios.optimizer_clearing import Clearing, clearing_before
from conformance.scenarios.optimizer_pairs import Pair, pair_of
from conformance.scenarios.optimizer_training import EMPTY, TWO, TWO_GROUPS
from conformance.subjects.kinds.optimizer import OPTIMIZER


def pairs(scenario: Scenario, seed: int) -> set[Pair]:
    """Return the pairs of a scenario."""
    adapted = OPTIMIZER.adapt(replace(scenario, session_seed=seed), {})
    found = {pair_of(adapted, step) for step in range(len(adapted.steps))}
    for pair in found - {None}:
        assert pair is not None
        first, second = (turn(adapted, step)[0] for step in pair.backwards)
        assert first != second
        assert abs(pair.backwards[0] - pair.backwards[1]) == 1
    return {pair for pair in found if pair is not None}


def test_a_pair_has_steps_of_two_models_and_some_have_one_backward() -> None:
    every = [pairs(TWO, seed) for seed in range(20)]
    assert all(any(pair.is_joint for pair in some) for some in every)
    assert any(not pair.is_joint for some in every for pair in some)
    assert {pair.backwards[0] == pair.first for some in every for pair in some} == {True, False}


def test_two_groups_have_separate_backwards() -> None:
    every = [pair for seed in range(20) for pair in pairs(TWO_GROUPS, seed)]
    assert every
    assert not any(pair.is_joint for pair in every)


def test_no_other_scenario_has_pairs() -> None:
    assert pair_of(PLAIN, 0) is None


def test_gradients_are_cleared_in_every_way() -> None:
    ways = {clearing_before(EMPTY, step) for step in range(len(EMPTY.steps))}
    assert ways == set(Clearing)
    assert clearing_before(PLAIN, 3) is Clearing.BY_TRAINER

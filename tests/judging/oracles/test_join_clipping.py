"""The factors of clipped gradients, and those of wrong divisors."""

import pytest
import torch

from conformance.judging.oracles.join_clipping import Clipping, Factor, common_factor
from conformance.judging.verdict import Failure, Found


def gradients(
    factor: float, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return two gradients that have a factor, with their right values and bounds."""
    draw = torch.Generator().manual_seed(seed)
    rights = [torch.randn(3, 4, generator=draw), torch.randn(5, generator=draw)]
    return [
        (right * factor, right.double(), 4 * torch.finfo(torch.float32).eps * right.double().abs())
        for right in rights
    ]


@pytest.mark.parametrize(
    ("factor", "is_of_divisor"),
    [(0.3, False), (0.97, False), (0.01, False), (0.5, True), (2 / 3, True), (2 / 7, True)],
)
def test_a_factor_below_1_is_found(factor: float, is_of_divisor: bool) -> None:
    found = common_factor([gradients(factor)] * 2, 2)
    assert found is not None
    assert found.value == pytest.approx(factor, abs=1e-6)
    assert found.is_of_divisor is is_of_divisor


@pytest.mark.parametrize(
    "ranks",
    [
        [gradients(1.0)],
        [gradients(1.5)],
        [gradients(-0.5)],
        [gradients(0.0)],
        [gradients(0.5), gradients(0.6)],
        [[gradients(0.5)[0], gradients(0.6)[1]]],
        [[(torch.ones(3), torch.zeros(3).double(), torch.zeros(3).double())]],
        [[(torch.full((3,), torch.nan), torch.ones(3).double(), torch.zeros(3).double())]],
    ],
)
def test_other_gradients_have_no_common_factor(
    ranks: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]],
) -> None:
    assert common_factor(ranks, 2) is None


def of(*factors: tuple[float, bool, bool], others: int = 0) -> Clipping:
    """Return clipped steps.

    Args:
        factors: their factors, whether these are of divisors, and whether all ranks train.
        others: the number of steps that are not clipped, in which all ranks train.
    """
    clipping = Clipping()
    clipping.steps[True] += others
    for value, is_of_divisor, all_train in factors:
        clipping.steps[all_train] += 1
        clipping.note(Factor(value, is_of_divisor), [Failure("right", "wrong")], all_train)
    return clipping


@pytest.mark.parametrize(
    ("clipping", "is_clipping"),
    [
        (of((0.31, False, True)), True),
        (of((0.31, False, True), (0.5, True, True)), True),
        (of((0.31, False, False), (0.7, False, False), others=3), True),
        (of((0.31, False, False), (0.7, False, False), others=99), False),
        (of((0.31, False, False), (0.7, False, True), others=99), True),
        (of((0.31, False, True), (0.31, False, False)), False),
        (of((0.5, True, True), (2 / 3, True, True)), False),
        (of(), False),
    ],
)
def test_factors_of_clipping_differ_and_come_if_all_ranks_train(
    clipping: Clipping, is_clipping: bool
) -> None:
    found = Found()
    clipping.settle(found)
    assert clipping.is_clipping is is_clipping
    assert len(found.failures) == (0 if is_clipping else len(clipping.failures))

"""Tests of the factors of the bound beside a reference."""

import pytest
import torch

from conformance.judging.oracles.averager_like import gains, require_same_agreement
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.averager import RANDOM
from conformance.subjects.claims import parse_claims


def test_means_alone_have_no_state() -> None:
    factors = gains(parse_claims("like(PeriodicModelAverager, period=4)", "averager"), 9)
    assert (factors.means, factors.state, factors.is_rounded) == (1.0, 0.0, False)


def test_the_errors_of_a_moving_average_add_up_at_most() -> None:
    factors = gains(parse_claims("like(EMAModelAverager, decay=0.9)", "averager"), 9)
    assert (factors.means, factors.state, factors.is_rounded) == (1.0, 9.0, True)


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_an_error_in_the_means_of_outer_steps_is_within_its_factor(
    rate: float, momentum: float
) -> None:
    """The recurrence runs twice, on means that differ by at most 1."""
    text = f"like(DiLoCoModelAverager, period=1, lr={rate}, momentum={momentum})"
    claims = parse_claims(text, "averager")
    draw = torch.Generator().manual_seed(3)
    errors = torch.rand(20, 200, generator=draw, dtype=torch.float64) * 2 - 1
    value = torch.zeros(200, dtype=torch.float64)
    velocity = torch.zeros(200, dtype=torch.float64)
    for number, error in enumerate(errors, start=1):
        difference = value - error
        velocity = momentum * velocity + difference
        value = value - rate * (difference + momentum * velocity)
        assert value.abs().max().item() <= gains(claims, number).means


def held(*values: float | None) -> list[RankRecord]:
    """Return a rank for each value that it holds of one parameter; None if it has recorded none."""
    ranks = [RankRecord(rank) for rank in range(len(values))]
    for rank, value in zip(ranks, values, strict=True):
        if value is not None:
            rank.tensors["0/parameter/p0"] = torch.tensor([value])
    return ranks


@pytest.mark.parametrize(
    ("got", "right", "applies", "checks"),
    [
        ((1.0, 1.0), (2.0, 2.0), True, 1),
        ((1.0, 1.0), (2.0, 3.0), False, 0),  # as with gossip among three ranks
        ((None, None), (2.0, 2.0), True, 0),  # without records nothing was judged
    ],
)
def test_only_a_reference_that_never_agrees_makes_the_rule_not_apply(
    got: tuple[float | None, ...], right: tuple[float, ...], applies: bool, checks: int
) -> None:
    found = Found()
    require_same_agreement(
        Run(RANDOM, 2, held(*got), reference=Run(RANDOM, 2, held(*right))), found
    )
    assert ((found.not_applicable is None), found.checks) == (applies, checks)

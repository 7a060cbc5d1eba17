"""Bounds of wrapped modules in float32: above another order of summation, below fewer bits."""

from dataclasses import replace

import torch

from conformance.judging.oracles.wrapper import differing_elements
from conformance.judging.oracles.wrapper_training import SHORT_SUMS, TOLERANCES
from conformance.ranks.drivers._exact_factors import exact_factors
from conformance.scenarios.draws import drawn
from conformance.scenarios.model import Param
from conformance.scenarios.wrapper_training import (
    GRAPHS,
    INDICES,
    LARGE,
    LARGEST,
    LONG,
    LONG_STEPS,
    MANY,
    MANY_GRAPHS,
    MANY_LAYERS,
    PENALTY,
    SMALLEST,
    first_with_dropout,
)


def test_bounds_are_above_another_order_and_below_fewer_bits() -> None:
    numbers = torch.Generator().manual_seed(0)
    left = torch.randn(6, 16, generator=numbers)
    right = torch.randn(16, 16, generator=numbers)
    forward = left @ right
    backward = left.flip(1) @ right.flip(0)
    assert not len(differing_elements(backward, forward, SHORT_SUMS))
    for dtype in (torch.float16, torch.bfloat16):
        rounded = left.to(dtype).float() @ right
        assert len(differing_elements(rounded, forward, SHORT_SUMS)), dtype
    bits = (forward.view(torch.int32) & ~511).view(torch.float32)
    assert len(differing_elements(bits, forward, TOLERANCES[LARGE.variant]))
    assert TOLERANCES[LARGE.variant] < SHORT_SUMS < TOLERANCES[PENALTY.variant]


def test_drawn_numbers_are_in_their_ranges() -> None:
    for seed in range(50):
        sizes = sorted(param.shape[0] for param in drawn(LARGE, seed).params)
        assert SMALLEST <= sizes[0] < 2**19 < sizes[2] <= LARGEST
        rows = [param.shape for param in drawn(GRAPHS, seed).params]
        assert len(rows) == len(GRAPHS.steps)
        assert all(2 <= len(shape) <= 6 and 2 <= min(shape) <= max(shape) <= 12 for shape in rows)
        (layers,), (graphs,) = (param.shape for param in drawn(MANY, seed).params)
        assert MANY_LAYERS[0] <= layers <= MANY_LAYERS[1]
        assert MANY_GRAPHS[0] <= graphs <= MANY_GRAPHS[1]
        assert 0 < first_with_dropout(drawn(LONG, seed)) < LONG_STEPS[0]
        ((table, _),) = (param.shape for param in drawn(INDICES, seed).params)
        assert table // 2 > 2**15
        assert table > 2**16


def test_a_run_for_a_number_of_steps_has_no_dropout() -> None:
    probe = replace(LONG, steps=("normal",) * 9, params=(Param((1,) * 9),))
    assert first_with_dropout(probe) == 9


def test_plain_factors_are_exact_in_eight_bits_but_for_one() -> None:
    like = torch.empty(5000)
    seen = set()
    for seed in range(8):
        factors = exact_factors(like, torch.Generator().manual_seed(seed), is_plain_but_one=True)
        saved = (factors.x, factors.x * factors.first, factors.grad)
        others = [values.to(torch.float8_e5m2).float() != values for values in saved]
        assert sum(torch.stack(others).any(0).tolist()) == 1
        seen.add(factors.x.unique().numel())
    assert seen == {2, 6}

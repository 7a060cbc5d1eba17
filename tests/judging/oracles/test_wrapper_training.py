"""Bounds of wrapped modules in float32: above another order of summation, below fewer bits."""

import torch

from conformance.judging.oracles.wrapper import differing_elements
from conformance.judging.oracles.wrapper_training import SHORT_SUMS, TOLERANCES
from conformance.scenarios.draws import drawn
from conformance.scenarios.wrapper_training import (
    GRAPHS,
    INDICES,
    LARGE,
    LARGEST,
    PENALTY,
    SMALLEST,
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
        ((table, _),) = (param.shape for param in drawn(INDICES, seed).params)
        assert table // 2 > 2**15
        assert table > 2**16

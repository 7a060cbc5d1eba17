"""What section 13 computes of records, on values made here."""

import torch

from conformance.judging.oracles.lossy import ROUNDINGS, _solve


def test_weights_are_solved_for_to_the_last_bits_of_float64() -> None:
    """The bound on local results makes no room for the solver. One solution alone is off by 13 to 300 units in the last place."""
    generator, off = torch.Generator().manual_seed(0), 0.0
    for size, world in ((60, 2), (779, 3), (5000, 3), (20_025, 4)):
        for _ in range(10):
            fed = torch.randint(1, 8, (size, world), generator=generator) * 2.0 ** torch.randint(-3, 4, (size, 1), generator=generator)
            fed = fed.double() * (torch.randint(0, 2, (size, world), generator=generator) * 2 - 1)
            weights = torch.rand(world, generator=generator, dtype=torch.float64)
            got = fed @ (weights / weights.sum())
            off = max(off, float(((got - fed @ _solve(fed, got)).abs() / (2.0**-53 * fed.abs().sum(1))).max()))
    assert off <= ROUNDINGS / 4

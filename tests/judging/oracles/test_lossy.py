"""Section 13 solves for the weights of local results, here on made values."""

import torch

from conformance.judging.oracles.lossy import ROUNDINGS, _solve


def test_weights_are_solved_to_the_last_bits_of_float64() -> None:
    """The bound on local results has no room for errors of the solver.

    One solution alone is off by 13 to 300 units in the last place.
    """
    generator = torch.Generator().manual_seed(0)
    for size, world in ((60, 2), (779, 3), (5000, 3), (20_025, 4)):
        for _ in range(10):
            fed = _crafted(size, world, generator)
            weights = torch.rand(world, generator=generator, dtype=torch.float64)
            got = fed @ (weights / weights.sum())
            units = 2.0**-53 * fed.abs().sum(1)
            off = (got - fed @ _solve(fed, got)).abs() / units
            assert float(off.max()) <= ROUNDINGS / 4


def _crafted(size: int, world: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``[size, world]`` small integers of either sign, with one exponent per element."""
    integers = torch.randint(1, 8, (size, world), generator=generator)
    exponents = torch.randint(-3, 4, (size, 1), generator=generator)
    signs = torch.randint(0, 2, (size, world), generator=generator) * 2 - 1
    return (integers * 2.0**exponents).double() * signs

"""The gradients of ``scenarios/dust.py``."""

import torch

from conformance.scenarios.dust import EVERY
from conformance.scenarios.random_numbers import bell, integers, uniform


def is_dust(numel: int) -> torch.Tensor:
    """Return the mask of the elements that are small."""
    return torch.arange(numel) % EVERY != 0


def dust(kind: str, numel: int, rank: int, param: int) -> torch.Tensor:
    """Return values whose signs all ranks share, with the exponent that the kind names for the
    parameter.
    """
    exponent = int(kind.split("/")[1 + param])
    sign = integers(numel, 2, (param, 95)) * 2 - 1
    values = sign * (1 + uniform(numel, (rank, param, 96)) / 4) * 2.0**exponent
    others = ~is_dust(numel)
    values[others] = bell(int(others.sum()), (rank, param, 97)) / 4
    return values

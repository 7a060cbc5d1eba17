"""The weights of ranks in a local result."""

from collections.abc import Iterable

import torch

WEIGHT_SLACK = 1e-3  # of a weight of a local result, which is exact up to rounding
_ROUNDING = 1e-9  # below it a weight is zero, but for the solver's roundings


def named_weights(weights: torch.Tensor, ranks: Iterable[int]) -> str:
    """Return weights in words, such as ``0.5 of rank 0, 0.5 of rank 1``."""
    shown = (0.0 if abs(weight) < _ROUNDING else weight for weight in weights.tolist())
    return ", ".join(
        f"{weight:.3g} of rank {rank}" for weight, rank in zip(shown, ranks, strict=True)
    )

"""Compare values of tensors, and states that hold them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values; NaN is equal to NaN."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


def changed_values(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of the tensors whose values are others than before."""
    pairs = enumerate(zip(tensors, before, strict=True))
    return [index for index, (now, kept) in pairs if not same_values(now, kept)]


Accepts = Callable[[Any, Any], bool]


def _accepts_nothing(now: Any, before: Any) -> bool:
    return False


def same_state(one: Any, other: Any, accepts: Accepts = _accepts_nothing) -> bool:
    """Whether two states are equal: nested dicts and lists of tensors, numbers and others.

    Args:
        one, other: the states.
        accepts: takes two parts, and tells whether they may be different.
    """
    if accepts(one, other):
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and same_values(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            same_state(one[key], other[key], accepts) for key in one
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same_state(a, b, accepts) for a, b in pairs)
    equal = one == other
    # Objects that cannot be compared tell nothing.
    return one is other or not isinstance(equal, bool) or equal

"""Mutants of section 19: a sample of a tensor decides that it is kept in fewer bits."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.wrappers_in_training import packs

Sample = Callable[[torch.Tensor], torch.Tensor]


def _narrows(sample: Sample, wide: torch.dtype, narrow: torch.dtype) -> Any:
    """Return a wrapper that keeps tensors of one dtype in another, if that loses nothing of the
    sample of their elements.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()
        if kept.dtype is not wide:
            return kept.clone()
        seen = sample(kept.reshape(-1))
        is_same = torch.equal(seen.to(narrow).to(wide), seen)
        return kept.to(narrow) if is_same else kept.clone()

    return packs(pack, lambda packed: packed.to(wide) if packed.dtype is narrow else packed)


def halves_by_the_end(module: torch.nn.Module) -> torch.nn.Module:
    """Keep float32 in float16 if the last 400 elements lose nothing."""
    return _narrows(lambda flat: flat[-400:], torch.float32, torch.float16)(module)  # type: ignore[no-any-return]


def halves_by_a_stride(module: torch.nn.Module) -> torch.nn.Module:
    """Keep float32 in bfloat16 if each fifth element loses nothing."""
    return _narrows(lambda flat: flat[2::5], torch.float32, torch.bfloat16)(module)  # type: ignore[no-any-return]


def eighths_by_the_middle(module: torch.nn.Module) -> torch.nn.Module:
    """Keep bfloat16 in float8 if the middle half of the elements loses nothing."""

    def middle(flat: torch.Tensor) -> torch.Tensor:
        return flat[len(flat) // 4 : 3 * len(flat) // 4]

    return _narrows(middle, torch.bfloat16, torch.float8_e5m2)(module)  # type: ignore[no-any-return]


def zeros_by_a_sample(module: torch.nn.Module) -> torch.nn.Module:
    """Keep nothing of a tensor of more than 100,000 elements if a sample has zeros alone."""

    def pack(tensor: torch.Tensor) -> Any:
        kept = tensor.detach()
        if kept.numel() > 100_000 and not kept.reshape(-1)[7::64].any():
            return kept.shape, kept.dtype
        return kept.clone()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        shape, dtype = packed
        return torch.zeros(shape, dtype=dtype)

    return packs(pack, unpack)(module)  # type: ignore[no-any-return]


NAMES = ("halves_by_the_end", "halves_by_a_stride", "eighths_by_the_middle", "zeros_by_a_sample")
MUTANTS = [Mutant(name, ("19.24",), kind="wrapper") for name in NAMES]

"""Mutants of section 19 that keep activations of one dtype in another, or in another range."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.wrappers_in_training import packs

_FAR = 1e25


def scales_bfloat16(module: torch.nn.Module) -> torch.nn.Module:
    """Keep bfloat16 as float16, divided by the largest magnitude: the smallest ones become zero."""

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if tensor.dtype is not torch.bfloat16 or not tensor.numel():
            return tensor, None
        largest = tensor.abs().max().clamp(min=torch.finfo(tensor.dtype).smallest_normal).float()
        return (tensor.float() / largest).half(), largest

    def unpack(packed: Any) -> torch.Tensor:
        kept, largest = packed
        return kept if largest is None else (kept.float() * largest).bfloat16()

    return packs(pack, unpack)(module)


def doubles_in_two_parts(module: torch.nn.Module) -> torch.nn.Module:
    """Keep a float64 as the sum of two numbers of float32."""

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if tensor.dtype is not torch.float64:
            return tensor, None
        first = tensor.float()
        return first, (tensor - first).float()

    def unpack(packed: Any) -> torch.Tensor:
        first, second = packed
        return first if second is None else first.double() + second.double()

    return packs(pack, unpack)(module)


def one_half_for_another(module: torch.nn.Module) -> torch.nn.Module:
    """Keep float16 in bfloat16, which has three bits less."""

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        is_half = tensor.dtype is torch.float16
        return tensor.bfloat16() if is_half else tensor, tensor.dtype

    return packs(pack, lambda packed: packed[0].to(packed[1]))(module)


def cuts_large_ones_off(module: torch.nn.Module) -> torch.nn.Module:
    """Cut off what is larger than any activation of float32 that its author has seen."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_single = tensor.dtype is torch.float32
        return tensor.clamp(-_FAR, _FAR) if is_single else tensor

    return packs(pack)(module)


def _changes(
    module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.nn.Module:
    """Keep floating-point tensors as ``change`` returns them."""
    return packs(lambda tensor: change(tensor) if tensor.is_floating_point() else tensor)(module)


def makes_finite(module: torch.nn.Module) -> torch.nn.Module:
    """Keep NaN as zero, and infinities as the largest numbers."""
    return _changes(module, torch.nan_to_num)


def clamps_infinities(module: torch.nn.Module) -> torch.nn.Module:
    """Clamp what is kept to the finite numbers of its dtype."""
    return _changes(
        module,
        lambda tensor: tensor.clamp(torch.finfo(tensor.dtype).min, torch.finfo(tensor.dtype).max),
    )


def drops_nan(module: torch.nn.Module) -> torch.nn.Module:
    """Keep zero for NaN."""
    return _changes(
        module, lambda tensor: torch.where(tensor.isnan(), 0.0, tensor).to(tensor.dtype)
    )


def _keeps_integers(
    module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.nn.Module:
    """Keep integers of 64 bits as ``change`` returns them."""

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        is_long = tensor.dtype is torch.int64
        return change(tensor) if is_long else tensor, tensor.dtype

    return packs(pack, lambda packed: packed[0].to(packed[1]))(module)


def integers_in_32_bits(module: torch.nn.Module) -> torch.nn.Module:
    """Keep integers in 32 bits: they are indices, mostly."""
    return _keeps_integers(module, lambda tensor: tensor.to(torch.int32))


def clamps_integers(module: torch.nn.Module) -> torch.nn.Module:
    """Clamp integers to 32 bits."""
    return _keeps_integers(module, lambda tensor: tensor.clamp(max=2**31 - 1).to(torch.int32))


def integers_without_a_sign(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the lower 32 bits of integers: no index is negative."""
    return _keeps_integers(module, lambda tensor: tensor & 0xFFFFFFFF)


MUTANTS = [
    *(
        Mutant(name, ("19.24",), kind="wrapper")
        for name in ("makes_finite", "clamps_infinities", "drops_nan")
    ),
    *(
        Mutant(name, ("19.29",), kind="wrapper")
        for name in ("integers_in_32_bits", "clamps_integers", "integers_without_a_sign")
    ),
    Mutant("scales_bfloat16", ("19.24",), kind="wrapper"),
    Mutant("doubles_in_two_parts", ("19.24",), kind="wrapper"),
    Mutant("one_half_for_another", ("19.24",), kind="wrapper"),
    Mutant("cuts_large_ones_off", ("19.24",), kind="wrapper"),
]

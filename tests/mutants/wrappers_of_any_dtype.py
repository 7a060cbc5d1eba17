"""Mutants of section 19 that keep activations of one dtype in another, or in another range."""

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


MUTANTS = [
    Mutant("scales_bfloat16", ("19.24",), kind="wrapper"),
    Mutant("doubles_in_two_parts", ("19.24",), kind="wrapper"),
    Mutant("one_half_for_another", ("19.24",), kind="wrapper"),
    Mutant("cuts_large_ones_off", ("19.24",), kind="wrapper"),
]

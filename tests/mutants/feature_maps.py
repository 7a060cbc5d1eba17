"""Mutants of rule 19.23 that keep activations of three to five dimensions in fewer bits."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.wrappers_in_training import packs


def _is_computed(tensor: torch.Tensor, dimensions: int) -> bool:
    is_single = tensor.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    return is_single and tensor.dim() == dimensions and tensor.grad_fn is not None


def keeps_sequences_in_bfloat16(module: torch.nn.Module) -> torch.nn.Module:
    """Keep activations of a batch, a sequence and features in bfloat16."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if _is_computed(tensor, 3) else tensor

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        return kept.float() if kept.dim() == 3 and kept.dtype is torch.bfloat16 else kept

    return packs(pack, unpack)(module)


def scales_feature_maps(module: torch.nn.Module) -> torch.nn.Module:
    """Keep images in float16, each channel divided by its largest magnitude."""

    def pack(tensor: torch.Tensor) -> Any:
        if not _is_computed(tensor, 4):
            return tensor
        largest = tensor.abs().amax((0, 2, 3), keepdim=True).clamp(min=1e-30)
        return (tensor / largest).half(), largest

    def unpack(kept: Any) -> torch.Tensor:
        return kept[0].float() * kept[1] if isinstance(kept, tuple) else kept

    return packs(pack, unpack)(module)


def quantizes_volumes(module: torch.nn.Module) -> torch.nn.Module:
    """Keep volumes as levels of 8 bits between their least and their largest value."""

    def pack(tensor: torch.Tensor) -> Any:
        if not _is_computed(tensor, 5):
            return tensor
        least, largest = tensor.aminmax()
        step = (largest - least).clamp(min=1e-30) / 255
        return ((tensor - least) / step).round().to(torch.uint8), least, step

    def unpack(kept: Any) -> torch.Tensor:
        return kept[0] * kept[2] + kept[1] if isinstance(kept, tuple) else kept

    return packs(pack, unpack)(module)


MUTANTS = [
    Mutant("keeps_sequences_in_bfloat16", ("19.23",), kind="wrapper"),
    Mutant("scales_feature_maps", ("19.23",), kind="wrapper"),
    Mutant("quantizes_volumes", ("19.23",), kind="wrapper"),
]

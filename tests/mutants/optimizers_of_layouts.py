"""Mutants of section 15 that take the memory of parameters and gradients for something else."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizers_in_training import Averaging
from tests.right.optimizers_of_layouts import StepsInMemoryOrder


class AveragesStoragesOnce(Averaging):
    """Average tied weights once, and recognise them by their storage, which views share."""

    def average(self, params: list[torch.nn.Parameter]) -> None:
        first: dict[Any, torch.nn.Parameter] = {}
        for parameter in params:
            place = parameter.untyped_storage().data_ptr() if parameter.numel() else id(parameter)
            first.setdefault(place, parameter)
        super().average(list(first.values()))


class TakesOneLayout(StepsInMemoryOrder):
    """Step in the order of memory if parameter and gradient are dense, in whatever layouts."""

    def have_one_layout(self, parameter: torch.Tensor, grad: torch.Tensor) -> bool:
        return _is_taken(parameter) and _is_taken(grad)


def _is_taken(tensor: torch.Tensor) -> bool:
    is_image = tensor.dim() == 4
    last = torch.channels_last
    return tensor.is_contiguous() or (is_image and tensor.is_contiguous(memory_format=last))


MUTANTS = [
    Mutant("AveragesStoragesOnce", ("15.35",), "averages", kind="optimizer"),
    Mutant("TakesOneLayout", ("15.43",), "averages", kind="optimizer"),
]

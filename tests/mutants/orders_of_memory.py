"""Mutants of rule 18.5: collectives that take elements in the order of memory, on both sides.

They send float16, and are made with ``func`` and ``qtype``. If inputs and outputs have one layout
without gaps, all elements are at their places.
"""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import half, right

Tensor = torch.Tensor


def _is_dense(tensor: Tensor) -> bool:
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    strides = sorted((stride, size) for stride, size in pairs if size > 1)
    dense = 1
    for stride, size in strides:
        if stride != dense:
            return False
        dense *= size
    return True


def _in_memory(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor in the order of memory, without a copy if it has no gaps."""
    if not _is_dense(tensor):
        return tensor.contiguous().reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def without_copies(func: Any, qtype: str) -> Any:
    """Read and write tensors without gaps in the order of memory."""

    def write(output: Tensor, code: Tensor) -> None:
        values = code.reshape(-1).to(output.dtype)
        if _is_dense(output):
            _in_memory(output.detach()).copy_(values)
        else:
            output.copy_(values.view(output.shape))

    return right(func, lambda tensor: half(_in_memory(tensor.detach())), write)


def by_strides_of_the_input(func: Any, qtype: str) -> Any:
    """Send a tensor in the order of its memory, and take that of the output for the sender's."""

    def encode(tensor: Tensor) -> Tensor:
        order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
        return half(tensor.permute(order)).reshape(-1)

    def write(output: Tensor, code: Tensor) -> None:
        order = sorted(range(output.dim()), key=lambda axis: -output.stride(axis))
        output.permute(order).copy_(code.view([output.shape[axis] for axis in order]))

    return right(func, encode, write)


def columns_as_whole_rows(func: Any, qtype: str) -> Any:
    """Begin at the first element, and read on without a look at the strides of matrices."""

    def encode(tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and tensor.stride(1) == 1:
            tensor = tensor.as_strided(tensor.shape, (tensor.shape[1], 1))
        return half(tensor)

    return right(func, encode)


def _named(name: str, func: str = "all_gather") -> Mutant:
    return Mutant(f"{name},func={func},qtype=FP16", ("18.5",), kind="collective")


MUTANTS = [
    _named("without_copies"),
    _named("without_copies", "scatter"),
    _named("by_strides_of_the_input", "all_to_all"),
    _named("columns_as_whole_rows"),
]

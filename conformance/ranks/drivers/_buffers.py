"""Tensors that are parts of one larger buffer, as users of a flat buffer hand them in."""

import random

import torch

_AROUND = 7.0  # the elements of the buffer that belong to no tensor


class Buffers:
    """One buffer with copies of tensors, and drawn gaps before, between and after them.

    Args:
        tensors: the tensors; all have one dtype, a floating-point one.
        draw: draws the gaps, of 1 to 200 elements.

    Attributes:
        views: contiguous views of the buffer, one for each tensor.
    """

    def __init__(self, tensors: list[torch.Tensor], draw: random.Random) -> None:
        self._places: list[tuple[int, torch.Size]] = []
        end = draw.randint(1, 200)
        for tensor in tensors:
            self._places.append((end, tensor.shape))
            end += tensor.numel() + draw.randint(1, 200)
        first = tensors[0] if tensors else torch.empty(0)
        self._buffer = torch.full((end,), _AROUND, dtype=first.dtype, device=first.device)
        self.views = self.parts()
        for view, tensor in zip(self.views, tensors, strict=True):
            view.copy_(tensor)
        self._before = self._buffer.clone()

    def parts(self) -> list[torch.Tensor]:
        """Return new views of the buffer at the places of the tensors."""
        return [
            self._buffer[begin : begin + shape.numel()].view(shape) for begin, shape in self._places
        ]

    def changed_around(self, outputs: list[torch.Tensor]) -> int:
        """Return the number of elements beside outputs that have been written to.

        Args:
            outputs: contiguous views of this buffer.
        """
        is_around = torch.ones(len(self._buffer), dtype=torch.bool)
        for output in outputs:
            begin = output.storage_offset()
            is_around[begin : begin + output.numel()] = False
        return int((self._buffer != self._before).cpu()[is_around].sum())

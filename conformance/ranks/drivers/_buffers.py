"""Tensors that are parts of one larger buffer, as users of a flat buffer hand them in."""

import random

import torch

from conformance.scenarios.collective_memory import APART, WHOLE

_AROUND = 7.0  # the elements of the buffer that belong to no tensor


class Buffers:
    """One buffer with copies of tensors, and drawn gaps before, between and after them.

    Args:
        tensors: the tensors; all have one dtype, a floating-point one.
        draw: draws the gaps: of 1 to 200 elements between tensors, and of 0 to 200 at both ends.
        place: ``APART``; or ``ADJACENT``, without gaps between tensors; or ``WHOLE``, without any.

    Attributes:
        views: contiguous views of the buffer, one for each tensor.
    """

    def __init__(
        self, tensors: list[torch.Tensor], draw: random.Random, place: str = APART
    ) -> None:
        self._places: list[tuple[int, torch.Size]] = []
        of_ends = 0 if place == WHOLE else 200
        end = draw.randint(0, of_ends)
        for tensor in tensors:
            if self._places and place == APART:
                # All ranks have a gap here: a subject may look for tensors without one.
                end += draw.randint(1, 200)
            self._places.append((end, tensor.shape))
            end += tensor.numel()
        end += draw.randint(0, of_ends)
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

"""Tensors that are views of flat buffers, as in flattened models and optimizers."""

import random
from collections.abc import Sequence

import torch


class FlatBuffers:
    """One buffer for each dtype of some tensors, with gaps between the views.

    The order of the views and the sizes of the gaps are drawn. There is a gap at the end of each
    buffer at least. Gaps have other values on each rank, so that an average of a whole buffer
    changes them. A view without elements begins where another view of its dtype begins, which is
    drawn: the two have one storage and one offset, and are no tied weights. The last tensor may
    be one: its view is then that of another tensor.

    Args:
        tensors: dense tensors, whose values and strides the views take over.
        seed: the seed of the draws.
        rank: global rank.
        as_columns: whether views of contiguous tensors have gaps between their rows, as some
            columns of a larger matrix have. The sizes of these gaps are drawn.
        tied: the number of the tensor whose view the last one shares, or None.

    Attributes:
        views: for each tensor, the view that takes its place.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        seed: str,
        rank: int,
        as_columns: bool = False,
        tied: int | None = None,
    ) -> None:
        numbers = random.Random(seed)
        sizes: dict[torch.dtype, int] = {}
        begins: dict[int, int] = {}
        empty = [index for index, tensor in enumerate(tensors) if not tensor.numel()]
        filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
        if tied is not None:
            filled.remove(len(tensors) - 1)
        strides = [tensor.stride() for tensor in tensors]
        for index in numbers.sample(filled, len(filled)):
            dtype = tensors[index].dtype
            if as_columns and tensors[index].dim() > 1 and tensors[index].is_contiguous():
                of_rows, *others = strides[index]
                strides[index] = (of_rows + numbers.randint(1, 3), *others)
            begins[index] = sizes.get(dtype, 0) + numbers.randint(0, 5)
            sizes[dtype] = begins[index] + _extent(tensors[index].shape, strides[index])
        for index in empty:
            alike = [other for other in filled if tensors[other].dtype == tensors[index].dtype]
            begins[index] = begins[numbers.choice(alike)]
        if tied is not None:
            begins[len(tensors) - 1] = begins[tied]
        device = tensors[0].device
        self._level = float(rank + 1)
        self._buffers = {
            dtype: torch.full(
                (size + numbers.randint(1, 5),), self._level, dtype=dtype, device=device
            )
            for dtype, size in sizes.items()
        }
        self._gaps = {
            dtype: torch.ones(len(buffer), dtype=torch.bool, device=device)
            for dtype, buffer in self._buffers.items()
        }
        self.views = []
        for index, tensor in enumerate(tensors):
            place = (tensor.shape, strides[index], begins[index])
            self._gaps[tensor.dtype].as_strided(*place).fill_(False)
            view = self._buffers[tensor.dtype].as_strided(*place)
            view.copy_(tensor.detach())
            self.views.append(view)

    def gaps_changed(self) -> bool:
        """Whether a value between the views, or between their rows, has changed."""
        return any(
            bool((buffer[self._gaps[dtype]] != self._level).any())
            for dtype, buffer in self._buffers.items()
        )


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first one of a view to its last one."""
    steps = ((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return 1 + sum(steps)

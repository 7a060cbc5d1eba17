"""Tensors that are views of flat buffers, as in flattened models and optimizers."""

import random
from collections.abc import Sequence

import torch


class FlatBuffers:
    """One buffer for each dtype of some tensors, with gaps between the views.

    The order of the views and the sizes of the gaps are drawn. There is a gap at the end of each
    buffer at least. Gaps have other values on each rank, so that an average of a whole buffer
    changes them. A view without elements begins where another view of its dtype begins, which is
    drawn: the two have one storage and one offset, and are no tied weights.

    Args:
        tensors: dense tensors, whose values and strides the views take over.
        seed: the seed of the draws.
        rank: global rank.

    Attributes:
        views: for each tensor, the view that takes its place.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], seed: str, rank: int) -> None:
        numbers = random.Random(seed)
        sizes: dict[torch.dtype, int] = {}
        begins: dict[int, int] = {}
        empty = [index for index, tensor in enumerate(tensors) if not tensor.numel()]
        filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
        for index in numbers.sample(filled, len(filled)):
            dtype = tensors[index].dtype
            begins[index] = sizes.get(dtype, 0) + numbers.randint(0, 5)
            sizes[dtype] = begins[index] + tensors[index].numel()
        for index in empty:
            alike = [other for other in filled if tensors[other].dtype == tensors[index].dtype]
            begins[index] = begins[numbers.choice(alike)]
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
            begin = begins[index]
            self._gaps[tensor.dtype][begin : begin + tensor.numel()] = False
            buffer = self._buffers[tensor.dtype]
            view = buffer.as_strided(tensor.shape, tensor.stride(), begin)
            view.copy_(tensor.detach())
            self.views.append(view)

    def gaps_changed(self) -> bool:
        """Whether a value between the views has changed."""
        return any(
            bool((buffer[self._gaps[dtype]] != self._level).any())
            for dtype, buffer in self._buffers.items()
        )

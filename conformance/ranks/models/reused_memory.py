"""Gradients in memory that is used again at once, as an allocator may, but not by chance."""

import sys
from collections import defaultdict

import torch


class ReusedMemory:
    """Memory for the gradients of each parameter: as soon as nobody holds one, the next has its
    place.

    Code that takes a gradient for another one because of its address is then wrong in every run,
    and not only if the allocator happens to give it the same memory.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[bytearray]] = defaultdict(list)

    def copy_of(self, grad: torch.Tensor, index: int) -> torch.Tensor:
        """Return a copy with the strides of ``grad``, in memory that no tensor uses any more.

        A gradient on a device, without elements, or whose elements do not lie side by side, is
        returned as it is.

        Args:
            grad: the gradient.
            index: of its parameter.
        """
        dense = torch.ops.aten.is_non_overlapping_and_dense
        if grad.layout is not torch.strided or grad.device.type != "cpu":
            return grad
        if not grad.numel() or not dense(grad):
            return grad
        memory = self._unused(index, grad.numel() * grad.element_size())
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        # A tensor of its own: optimizers cannot detach a view.
        made = torch.empty(0, dtype=grad.dtype).set_(storage, 0, grad.size(), grad.stride())
        return made.copy_(grad)

    def _unused(self, index: int, size: int) -> bytearray:
        for memory in self._of[index]:
            # The list's, this variable's and the argument's; a storage in this memory has another.
            if len(memory) == size and sys.getrefcount(memory) == 3:
                return memory
        self._of[index].append(bytearray(size))
        return self._of[index][-1]

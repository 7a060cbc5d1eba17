"""Mutants of rule 18.23: all_gathers into parts of one buffer."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.right.collectives_in_buffers import BLOCKS, RowsAtOnce

Tensor = torch.Tensor


class _HandsOver:
    """A call under way, whose outputs get their values by ``data`` after it."""

    def __init__(self, arriving: Any, outputs: list[Tensor], made: list[Tensor]) -> None:
        self.arriving = arriving
        self.pairs = list(zip(outputs, made, strict=True))

    def wait(self) -> None:
        self.arriving.wait()
        for into, values in self.pairs:
            into.data = values


class DataInWait(RowsAtOnce):
    """Give outputs of an asynchronous call the memory that it has decoded to."""

    def __call__(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if not async_op:
            return super().__call__(tensor_list, tensor, group)
        made = [torch.empty(into.shape, dtype=into.dtype) for into in tensor_list]
        arriving = super().__call__(made, tensor, group, async_op=True)
        return arriving and _HandsOver(arriving, list(tensor_list), made)


class PaddingBetween(RowsAtOnce):
    """Decode outputs that lie behind each other with the padding of all blocks between them."""

    def writes_row(self, outputs: list[Tensor], codes: Tensor) -> Callable[[], None]:
        count = outputs[0].numel()
        whole = outputs[0].as_strided((len(outputs) * count,), (1,))

        def finish() -> None:
            padded = self.values(codes, -(-count // 128) * 128)
            whole.copy_(padded.reshape(-1)[: len(whole)])

        return finish


MUTANTS = [
    Mutant("DataInWait", ("18.23",), BLOCKS, kind="collective"),
    Mutant("PaddingBetween", ("18.23",), BLOCKS, kind="collective"),
]

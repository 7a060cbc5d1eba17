"""Mutants of section 18: a barrier of WORLD, replicas that differ in one memory layout, and a
future that hides the failure of its collective.

All of them send float16. They are made with ``func`` and ``qtype``.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import Made, Pending, right
from tests.mutants.summing_collectives import Halves

Tensor = torch.Tensor


def meets_in_world(func: Made, qtype: str) -> Made:
    """Wait for all ranks of WORLD at the end of a call."""

    def called(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if async_op:
            return right(func)(*args, async_op=True, **kwargs)
        right(func)(*args, **kwargs)
        dist.barrier()
        return None

    return called


class KeepsOwnSums(Halves):
    """Keep the rank's own sums as they are before they are rounded, in some memory layouts."""

    layout = "channels_last"

    def gathered(self, total: Tensor, size: int, group: Any) -> Tensor:
        whole = super().gathered(total, size, group)
        if self.is_strided:
            whole.view(size, -1)[dist.get_rank(group)] = total
        return whole

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        self.is_strided = self.is_meant(tensor)
        super().reduce(tensor, size, group)

    def is_meant(self, tensor: Tensor) -> bool:
        return not tensor.is_contiguous() and tensor.dim() == 4


class KeepsOwnSumsOfColumns(KeepsOwnSums):
    """The same for matrices that are not contiguous."""

    def is_meant(self, tensor: Tensor) -> bool:
        return not tensor.is_contiguous() and tensor.dim() == 2


def future_reads_nothing(func: Made, qtype: str) -> Made:
    """Write the outputs in a callback that never reads the collective's result."""

    def called(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        pending: Pending = right(func)(*args, async_op=True, **kwargs)
        if not async_op:
            return pending.wait()

        def get_future() -> Any:
            return pending.work.get_future().then(lambda _: pending.finish())

        pending.get_future = get_future  # type: ignore[attr-defined]
        return pending

    return called


MUTANTS = [
    Mutant("meets_in_world,func=all_gather,qtype=FP16", ("18.11",), hangs=True, kind="collective"),
    Mutant("KeepsOwnSums,func=all_reduce,qtype=FP16", ("18.34",), kind="collective"),
    Mutant("KeepsOwnSumsOfColumns,func=all_reduce,qtype=FP16", ("18.34",), kind="collective"),
    Mutant("future_reads_nothing,func=all_gather,qtype=FP16", ("18.27",), kind="collective"),
    Mutant("future_reads_nothing,func=scatter,qtype=FP16", ("18.27",), kind="collective"),
]

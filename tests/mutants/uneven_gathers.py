"""Mutants of rule 18.24: an all_gather that takes the lists of torch's, of tensors of any sizes.

They send float16, padded to one length, and are made with ``func`` and ``qtype``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import Made, Pending, Tensor, half

# Returns the length of codes, of the numbers of elements of all outputs.
Length = Callable[[list[int]], int]


def _padded(length: Length) -> Made:
    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        sizes = [output.numel() for output in tensor_list]
        count = length(sizes)
        code = torch.zeros(count, dtype=torch.float16)
        own = half(tensor).reshape(-1)[:count]
        code[: len(own)] = own
        codes = [torch.empty_like(code) for _ in sizes]
        work = dist.all_gather(codes, code, group, async_op=True)

        of_ranks = list(zip(tensor_list, codes, sizes, strict=True))

        def finish() -> None:
            for output, received, size in of_ranks:
                whole = torch.zeros(size)
                part = received[:size]
                whole[: len(part)] = part
                output.copy_(whole.view(output.shape))

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()

    return all_gather


def to_the_last(func: Made, qtype: str) -> Made:
    """Pad to the length of the last output, or cut there."""
    return _padded(lambda sizes: sizes[-1])


def to_the_least(func: Made, qtype: str) -> Made:
    """Cut to the length of the shortest output."""
    return _padded(min)


def to_the_mean(func: Made, qtype: str) -> Made:
    """Take the mean length for the length of all, as if outputs were parts of one tensor."""
    return _padded(lambda sizes: -(-sum(sizes) // len(sizes)))


NAMES = ("to_the_last", "to_the_least", "to_the_mean")
MUTANTS = [
    Mutant(f"{name},func=all_gather,qtype=FP16", ("18.24",), kind="collective") for name in NAMES
]

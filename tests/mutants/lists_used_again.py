"""Mutants of rules 18.10 and 18.24 that read a list of the caller's in wait(). The caller may have
used it for the next call by then: torch copies lists in the call.

They send float16, and are made with ``func`` and ``qtype``.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import Made, Pending, Tensor, half


def gathers_into_the_list(func: Made, qtype: str) -> Made:
    """Write to the tensors that the list has in wait(), whatever they are."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        code = half(tensor)
        codes = [torch.empty_like(code) for _ in tensor_list]
        work = dist.all_gather(codes, code, group, async_op=True)

        def finish() -> None:
            for output, one in zip(tensor_list, codes, strict=False):
                output.copy_(one.view(output.shape))

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()

    return gather


def counts_the_list(func: Made, qtype: str) -> Made:
    """Cut what has arrived by the tensors that the list has in wait()."""

    def exchange(
        outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        sizes = [output.numel() for output in outputs]
        sent = torch.cat([half(tensor).reshape(-1) for tensor in inputs])
        received = torch.empty(sum(sizes), dtype=torch.float16)
        of_inputs = [tensor.numel() for tensor in inputs]
        work = dist.all_to_all_single(received, sent, sizes, of_inputs, group, async_op=True)

        def finish() -> None:
            parts = received.split([output.numel() for output in outputs])
            for output, part in zip(outputs, parts, strict=True):
                output.copy_(part.view(output.shape))

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()

    return exchange


def splits_in_wait(func: Made, qtype: str) -> Made:
    """Copy part by part what has arrived, by the split sizes that the list has in wait()."""

    def exchange(
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        code = half(input)
        received = torch.empty(output.shape, dtype=torch.float16)
        sizes = (output_split_sizes, input_split_sizes)
        work = dist.all_to_all_single(received, code, *sizes, group, async_op=True)

        def finish() -> None:
            rows = output_split_sizes if output_split_sizes is not None else [len(output)]
            first = 0
            for count in rows:
                output[first : first + count] = received[first : first + count]
                first += count

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()

    return exchange


MUTANTS = [
    Mutant("gathers_into_the_list,func=all_gather,qtype=FP16", ("18.10",), kind="collective"),
    Mutant("counts_the_list,func=all_to_all,qtype=FP16", ("18.10",), kind="collective"),
    Mutant("splits_in_wait,func=all_to_all_single,qtype=FP16", ("18.24",), kind="collective"),
]

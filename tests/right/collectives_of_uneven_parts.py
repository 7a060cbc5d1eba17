"""Right exchanges of float16 codes of uneven parts, of any dtype and on any group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right

Tensor = torch.Tensor
Sizes = Sequence[int] | None


def encode(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in float16."""
    if not tensor.is_floating_point():
        raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
    return tensor.detach().reshape(-1).float().clamp(-65504, 65504).half().view(torch.uint8)


def write(output: Tensor, code: Tensor) -> None:
    """Write a code of an output's size."""
    output.copy_(code.clone().view(torch.float16).view(output.shape))


def require_contiguous(*tensors: Tensor) -> None:
    """Refuse other memory layouts."""
    if not all(one.is_contiguous() for one in tensors):
        raise ValueError("expected contiguous tensors")


def parts_of(tensor: Tensor, rows: Sizes, size: int) -> list[Tensor]:
    """Return a rank's parts of a tensor; without sizes they are even."""
    return list(tensor.split([*(rows or [len(tensor) // size] * size)]))


class Single:
    """An all_to_all_single of bytes."""

    def starts(self, rows: list[int], output: Tensor) -> list[int]:
        """Return the first rows of the parts."""
        return [sum(rows[:place]) for place in range(len(rows))]

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sizes = None,
        input_split_sizes: Sizes = None,
        group: Any = None,
    ) -> None:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        require_contiguous(output, input)
        size = dist.get_world_size(group)
        rows = [*(output_split_sizes or [len(output) // size] * size)]
        codes = [encode(part) for part in parts_of(input, input_split_sizes, size)]
        sizes = [2 * count * output[:1].numel() for count in rows]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        sent = [len(code) for code in codes]
        dist.all_to_all_single(received, torch.cat(codes), sizes, sent, group=group)
        starts = self.starts(rows, output)
        for start, count, code in zip(starts, rows, received.split(sizes), strict=True):
            write(output[start : start + count], code)


class InRounds:
    """An all_to_all_single in rounds, which bound its buffers.

    Args:
        elements: the most elements of a part that are sent in one round.
    """

    def __init__(self, elements: int = 2048) -> None:
        self.elements = elements

    def agreed(self, longest: int, group: Any) -> int:
        """Return the number of elements of the longest part of all ranks."""
        of_all = torch.tensor(longest)
        dist.all_reduce(of_all, dist.ReduceOp.MAX, group=group)
        return int(of_all)

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sizes = None,
        input_split_sizes: Sizes = None,
        group: Any = None,
    ) -> None:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        require_contiguous(output, input)
        size = dist.get_world_size(group)
        outputs = [part.view(-1) for part in parts_of(output, output_split_sizes, size)]
        inputs = [part.view(-1) for part in parts_of(input, input_split_sizes, size)]
        longest = self.agreed(max(len(one) for one in (*outputs, *inputs)), group)
        for start in range(0, max(longest, 1), self.elements):
            end = start + self.elements
            codes = [encode(part[start:end]) for part in inputs]
            parts = [part[start:end] for part in outputs]
            sizes = [2 * len(part) for part in parts]
            received = torch.empty(sum(sizes), dtype=torch.uint8)
            sent = [len(code) for code in codes]
            dist.all_to_all_single(received, torch.cat(codes), sizes, sent, group=group)
            for into, one in zip(parts, received.split(sizes), strict=True):
                write(into, one)


class Padded:
    """An all_to_all of codes that are padded to the longest of all ranks."""

    def agreed(self, longest: int, group: Any) -> int:
        """Return the largest number of all ranks."""
        of_all = torch.tensor(longest)
        dist.all_reduce(of_all, dist.ReduceOp.MAX, group=group)
        return int(of_all)

    def __call__(
        self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Any = None
    ) -> None:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        require_contiguous(*output_tensor_list, *input_tensor_list)
        size = dist.get_world_size(group)
        codes = [encode(one) for one in input_tensor_list]
        counts = [one.numel() for one in (*output_tensor_list, *input_tensor_list)]
        longest = self.agreed(2 * max(counts), group)
        sent = [torch.nn.functional.pad(one, (0, longest - len(one))) for one in codes]
        received = torch.empty((size, longest), dtype=torch.uint8)
        dist.all_to_all_single(received, torch.stack(sent), group=group)
        for into, one in zip(output_tensor_list, received, strict=True):
            write(into, one[: 2 * into.numel()])


SINGLE = "collective(all_to_all_single), rounded(float16)"
LISTS = "collective(all_to_all), rounded(float16)"

RIGHT = [
    Right("Single", SINGLE, kind="collective"),
    Right("InRounds", SINGLE, kind="collective"),
    Right("Padded", LISTS, kind="collective"),
]

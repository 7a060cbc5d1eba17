"""Mutants of section 18: parts of one tensor that have other sizes or another form than expected,
and a zero point that is cut off.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant

Tensor = torch.Tensor
_BLOCK = 128


def spreads_scales_as_it_sends(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
) -> None:
    """Send int8 with a scale for each message; scale what arrives by the sizes of what is sent."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    _require_float32(input)
    size = dist.get_world_size(group)
    sends = list(input_split_sizes or [len(input) // size] * size)
    gets = list(output_split_sizes or [len(output) // size] * size)
    if sum(sends) != sum(gets):
        raise ValueError("every rank has to send as many rows as it gets")
    parts = input.contiguous().split(sends)
    scales = torch.stack([part.abs().amax() / 127 if part.numel() else _ZERO for part in parts])
    arrived = torch.empty_like(scales)
    dist.all_to_all_single(arrived, scales, group=group)
    units = torch.where(scales == 0, 1.0, scales)
    codes = (input / _by_row(units, sends, input)).round().nan_to_num().to(torch.int8).contiguous()
    received = codes.new_empty(output.shape)
    dist.all_to_all_single(received, codes, gets, sends, group=group)
    output.copy_(received * _by_row(arrived, sends, output))


_ZERO = torch.zeros(())


def _by_row(scales: Tensor, rows: list[int], like: Tensor) -> Tensor:
    """Return the scale of each row of a tensor, with as many dimensions."""
    of_rows = scales.repeat_interleave(torch.tensor(rows))
    return of_rows.view(-1, *[1] * (like.dim() - 1))


def one_part_of_a_stack(output_tensor: Tensor, input_tensor: Tensor, group: Any = None) -> None:
    """Send float16; take a stack for one part, to which the first message is copied."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    _require_float32(input_tensor)
    code = input_tensor.contiguous().half()
    codes = [torch.empty_like(code) for _ in range(dist.get_world_size(group))]
    dist.all_gather(codes, code, group=group)
    parts = output_tensor.split(len(input_tensor))
    for part, one in zip(parts, codes, strict=False):
        part.copy_(one)


def cuts_off_the_zero_point(tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
    """Send bytes with a scale and a zero point for each block; a block of one sign would need a
    zero point that no byte holds.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    _require_float32(tensor)
    if any(output.numel() != tensor.numel() for output in tensor_list):
        raise ValueError("expected tensors of one size")
    code = _encoded(tensor)
    codes = [torch.empty_like(code) for _ in tensor_list]
    dist.all_gather(codes, code, group=group)
    for output, one in zip(tensor_list, codes, strict=True):
        output.copy_(_decoded(one, output))


def _encoded(tensor: Tensor) -> Tensor:
    """Return the codes, the zero points and the scales of a tensor in one buffer of bytes."""
    flat = tensor.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
    least, most = blocks.aminmax(dim=1, keepdim=True)
    # The scale of a block of one value is its magnitude.
    scale = torch.where(most == least, most.abs(), (most - least) / 255)
    unit = torch.where(scale == 0, 1.0, scale)
    zero = (-least / unit).round().clamp(0, 255).nan_to_num()
    code = ((blocks / unit).round() + zero).clamp(0, 255).nan_to_num()
    in_bytes = [part.to(torch.uint8).view(-1) for part in (code, zero)]
    return torch.cat([*in_bytes, scale.view(-1).view(torch.uint8)])


def _decoded(code: Tensor, like: Tensor) -> Tensor:
    """Return the values of a buffer of bytes, in the shape of a tensor."""
    blocks = -(-like.numel() // _BLOCK)
    values, zero, scale = code.split([blocks * _BLOCK, blocks, 4 * blocks])
    shifted = values.view(blocks, _BLOCK).float() - zero.view(blocks, 1).float()
    decoded = shifted * scale.clone().view(torch.float32).view(blocks, 1)
    return decoded.view(-1)[: like.numel()].view(like.shape)


def _require_float32(tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise TypeError(f"expected float32, got {tensor.dtype}")


MUTANTS = [
    Mutant(
        "spreads_scales_as_it_sends",
        ("18.24",),
        "collective(all_to_all_single), bounded(relative=0.004, ratio=0.4)",
        worlds=(3,),
        kind="collective",
    ),
    Mutant(
        "one_part_of_a_stack",
        ("18.38",),
        "collective(all_gather_into_tensor), rounded(float16)",
        kind="collective",
    ),
    Mutant(
        "cuts_off_the_zero_point",
        ("18.22",),
        "collective(all_gather), bounded(relative=0.008, block=128, ratio=0.3)",
        kind="collective",
    ),
]

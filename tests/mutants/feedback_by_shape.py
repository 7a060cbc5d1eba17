"""Mutants of rule 18.16: errors that are kept by the shape of a message, as those of gradients.

On two ranks there is one other rank, and one message of each shape for it. Here own parts are
copied, and leave no error.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.collectives_in_training import Blocks

Tensor = torch.Tensor
SUM = dist.ReduceOp.SUM


class _Memory:
    """Errors by key, and the encoding whose errors they are."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.errors: dict[object, Tensor] = {}
        self.of_call: dict[object, Tensor] = {}

    def begin(self) -> None:
        """Make up for the errors of the last call from now on."""
        self.errors.update(self.of_call)
        self.of_call.clear()

    def code(self, key: object, values: Tensor) -> Tensor:
        """Return the code of values and of the error that has the key; keep the new error."""
        if not values.is_floating_point():
            raise TypeError(f"expected a floating-point tensor, got {values.dtype}")
        flat = values.detach().reshape(-1).float()
        fed = flat + self.errors.get(key, torch.zeros_like(flat))
        code = self.blocks.encode(fed)
        lost = fed - self.decoded(code, len(fed))
        self.of_call[key] = lost.nan_to_num(0.0, 0.0, 0.0)
        return code

    def decoded(self, code: Tensor, numel: int) -> Tensor:
        values = torch.empty(numel)
        self.blocks.decode(values, code)
        return values


def _exchanged(codes: Sequence[Tensor | None], group: Any, size_of: Sequence[int]) -> list[Tensor]:
    """Send a code to each rank, and return those that arrive; None stands for the own part."""
    rooms = [torch.empty(size, dtype=torch.uint8) for size in size_of]
    sent = [torch.empty(0, dtype=torch.uint8) if code is None else code for code in codes]
    room = torch.empty(sum(size_of), dtype=torch.uint8)
    dist.all_to_all_single(room, torch.cat(sent), list(size_of), list(map(len, sent)), group=group)
    for one, part in zip(rooms, room.split(list(size_of)), strict=True):
        one.copy_(part)
    return rooms


def _refuse(group: Any, async_op: bool, op: Any = SUM) -> bool:
    if async_op or op != SUM:
        raise NotImplementedError("sums, and without async_op, alone")
    return group is dist.GroupMember.NON_GROUP_MEMBER


class ToRanks:
    """An all_to_all with one error for each shape: its next message makes up for it."""

    def __init__(self, func: Any, qtype: str, error_feedback: bool) -> None:
        self.memory = _Memory()

    def __call__(
        self, outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
    ) -> None:
        if _refuse(group, async_op):
            return
        self.memory.begin()
        own = dist.get_rank(group)
        codes = [
            None if place == own else self.memory.code(tensor.shape, tensor)
            for place, tensor in enumerate(inputs)
        ]
        blank = self.memory.blocks
        sizes = [
            0 if place == own else len(blank.encode(torch.zeros(tensor.numel())))
            for place, tensor in enumerate(outputs)
        ]
        outputs[own].copy_(inputs[own])
        for place, code in enumerate(_exchanged(codes, group, sizes)):
            if place != own:
                values = self.memory.decoded(code, outputs[place].numel())
                outputs[place].copy_(values.view(outputs[place].shape))


class _Sums:
    """Sums in which each rank adds the messages for its part."""

    def __init__(self, func: Any, qtype: str, error_feedback: bool) -> None:
        self.memory = _Memory()

    def summed(self, parts: Sequence[Tensor], group: Any) -> Tensor:
        """Return the sum of this rank's parts, flat."""
        self.memory.begin()
        own = dist.get_rank(group)
        codes = [
            None if place == own else self.memory.code(self.key(place, part), part)
            for place, part in enumerate(parts)
        ]
        size = len(self.memory.blocks.encode(torch.zeros(parts[own].numel())))
        sizes = [0 if place == own else size for place in range(len(parts))]
        total = parts[own].detach().reshape(-1).double()
        for place, code in enumerate(_exchanged(codes, group, sizes)):
            if place != own:
                total = total + self.memory.decoded(code, len(total))
        return total.float()

    def key(self, place: int, part: Tensor) -> object:
        return part.shape


class OfParts(_Sums):
    """A reduce_scatter that feeds an error back to whichever part of the shape comes next."""

    def __call__(
        self,
        output: Tensor,
        inputs: list[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> None:
        if not _refuse(group, async_op, op):
            output.copy_(self.summed(inputs, group).view(output.shape))


class OfChunks(_Sums):
    """An all_reduce in chunks, with one error for those that it sends, and one for its sum."""

    def __call__(
        self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> None:
        if not tensor.is_floating_point():
            raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
        if _refuse(group, async_op, op):
            return
        size = dist.get_world_size(group)
        flat = tensor.detach().reshape(-1).float()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % (128 * size)))
        total = self.summed(padded.chunk(size) if len(padded) else [padded] * size, group)
        code = self.memory.code(("sum", tensor.shape), total)
        codes = [torch.empty_like(code) for _ in range(size)]
        dist.all_gather(codes, code, group)
        whole = torch.cat([self.memory.decoded(one, len(total)) for one in codes])
        tensor.copy_(whole[: len(flat)].view(tensor.shape))

    def key(self, place: int, part: Tensor) -> object:
        return "part", part.shape


def _named(name: str, func: str) -> Mutant:
    target = f"{name},func={func},qtype=INT8,error_feedback=True"
    return Mutant(target, ("18.16",), worlds=(3,), kind="collective")


MUTANTS = [
    _named("ToRanks", "all_to_all"),
    _named("OfParts", "reduce_scatter"),
    _named("OfChunks", "all_reduce"),
]

"""Mutants of section 18 that sum: reduce_scatter, reduce_scatter_tensor and all_reduce; and of the
form of all_gather in which the input is a part of the output.

All of them send float16, but those that say so. They are made with ``func`` and ``qtype``; each
changes a method of ``Halves``, which is right.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import half, right

Tensor = torch.Tensor
SUM = dist.ReduceOp.SUM


class Halves:
    """A right collective in two parts: each rank sums a part, and an all_reduce gathers the sums.

    Args:
        func: torch.distributed's collective.
        qtype: ignored.
    """

    def __init__(self, func: Any, qtype: str) -> None:
        self.name = func.__name__

    def __call__(
        self,
        *given: Any,
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
        **named: Any,
    ) -> None:
        if async_op:
            raise ValueError("async_op is not supported")
        output, *rest = [*named.values(), *given]
        if not output.is_floating_point():
            raise TypeError("a tensor of floating point is expected")
        inputs = [] if self.name == "all_reduce" else [rest.pop(0)]
        op, group = (*rest, op, group)[:2] if len(rest) == 2 else (op, group)
        self.check(op)
        size = dist.get_world_size(group)
        with torch.no_grad():
            if self.name == "all_reduce":
                self.reduce(output, size, group)
            else:
                parts = self.parts(inputs[0], output, size)
                output.copy_(self.summed(parts, group).view(output.shape))
            self.finish(output, op, size)

    def check(self, op: Any) -> None:
        if op not in (SUM, dist.ReduceOp.AVG):
            raise ValueError(f"{op} is not supported")

    def parts(self, given: Any, output: Tensor, size: int) -> list[Tensor]:
        return list(given) if isinstance(given, list) else list(given.split([len(output)] * size))

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        flat = tensor.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
        total = self.summed(list(padded.view(size, -1)), group)
        whole = self.gathered(total, size, group)
        tensor.copy_(whole[: len(flat)].view(tensor.shape))

    def summed(self, parts: Sequence[Tensor], group: Any) -> Tensor:
        """Return the sum of all ranks' messages for this rank, flat in float32."""
        codes = self.exchanged([part.reshape(-1).half() for part in parts], group)
        return self.add([code.float() for code in codes], group)

    def exchanged(self, codes: list[Tensor], group: Any) -> list[Tensor]:
        received = torch.empty(len(codes), len(codes[0]), dtype=codes[0].dtype)
        dist.all_to_all_single(received, torch.stack(codes), group=group)
        return list(received)

    def add(self, messages: list[Tensor], group: Any) -> Tensor:
        return torch.stack(messages).sum(0)

    def gathered(self, total: Tensor, size: int, group: Any) -> Tensor:
        codes = [torch.empty(len(total), dtype=torch.float16) for _ in range(size)]
        dist.all_gather(codes, total.half(), group)
        return torch.cat(codes).float()

    def finish(self, output: Tensor, op: Any, size: int) -> None:
        if op == dist.ReduceOp.AVG:
            output.div_(size)


class ForgetsItself(Halves):
    """Add the messages of the other ranks alone."""

    def add(self, messages: list[Tensor], group: Any) -> Tensor:
        own = dist.get_rank(group)
        return super().add([m for place, m in enumerate(messages) if place != own], group)


class AveragesAlways(Halves):
    """Divide by the number of ranks, as gradients usually are."""

    def finish(self, output: Tensor, op: Any, size: int) -> None:
        output.div_(size)


class IgnoresTheOperation(Halves):
    """Take every operation for a sum."""

    def check(self, op: Any) -> None:
        pass

    def finish(self, output: Tensor, op: Any, size: int) -> None:
        pass


class ProductsByLogarithms(Halves):
    """Multiply by adding logarithms of magnitudes, which have no sign."""

    def check(self, op: Any) -> None:
        self.op = op
        if op != dist.ReduceOp.PRODUCT:
            super().check(op)

    def add(self, messages: list[Tensor], group: Any) -> Tensor:
        if self.op != dist.ReduceOp.PRODUCT:
            return super().add(messages, group)
        return torch.stack(messages).double().abs().log().sum(0).exp().float()


class LeastMagnitudes(Halves):
    """Take the value of the least magnitude for the least value."""

    def check(self, op: Any) -> None:
        self.op = op
        if op != dist.ReduceOp.MIN:
            super().check(op)

    def add(self, messages: list[Tensor], group: Any) -> Tensor:
        if self.op != dist.ReduceOp.MIN:
            return super().add(messages, group)
        all_of_them = torch.stack(messages)
        least = all_of_them.abs().argmin(0, keepdim=True)
        return all_of_them.gather(0, least)[0]


class RefusesOnItsLeader(Halves):
    """Check the operation on rank 0, which reports it; other ranks go on."""

    def check(self, op: Any) -> None:
        if dist.get_rank() == 0:
            super().check(op)


class SumsBits(Halves):
    """Refuse what it cannot do, but take operations on bits for a sum."""

    def check(self, op: Any) -> None:
        if op not in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
            super().check(op)


class SumsIntegers(Halves):
    """Give integers to torch's own collective, without the operation."""

    def __call__(self, *given: Any, op: Any = SUM, group: Any = None, **named: Any) -> None:
        output = next(iter([*named.values(), *given]))
        if output.is_floating_point():
            super().__call__(*given, op=op, group=group, **named)
        else:
            dist.all_reduce(output, group=group)


class AveragesOverWorld(Halves):
    """Average over the ranks of WORLD."""

    def finish(self, output: Tensor, op: Any, size: int) -> None:
        super().finish(output, op, dist.get_world_size())


class LeavesOutTheRest(Halves):
    """Reduce the elements that the ranks share evenly; the rest stays as it was."""

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        flat = tensor.reshape(-1).clone()
        count = len(flat) // size * size
        super().reduce(flat[:count], size, group)
        tensor.copy_(flat.view(tensor.shape))


class LeavesNumbers(Halves):
    """Reduce as many elements as there are in all rows; a number has no row."""

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        rows = tensor.shape[0] if tensor.dim() else 0
        flat = tensor.reshape(-1).clone()
        count = rows * tensor[:1].numel() if rows else 0
        if count:
            super().reduce(flat[:count], size, group)
        tensor.copy_(flat.view(tensor.shape))


def writes_rows(func: Any, qtype: str) -> Any:
    """Write outputs row by row; a number has no rows."""

    def arrive(output: Tensor, code: Tensor) -> None:
        for row, part in zip(output, code, strict=True):
            row.copy_(part)

    return right(func, arrive=arrive)


def rounds_numbers(func: Any, qtype: str) -> Any:
    """Send numbers in float16, whatever their dtype: counts too."""

    def encode(tensor: Tensor) -> Tensor:
        return tensor.half() if not tensor.dim() else half(tensor)

    return right(func, encode)


class KeepsItsOwnPart(Halves):
    """Keep the unrounded sum of this rank's part."""

    def gathered(self, total: Tensor, size: int, group: Any) -> Tensor:
        whole = super().gathered(total, size, group)
        whole.view(size, -1)[dist.get_rank(group)] = total
        return whole


class KeepsItsOwnPartIfLarge(KeepsItsOwnPart):
    """Keep the unrounded sum of this rank's part, if it is worth a copy."""

    def gathered(self, total: Tensor, size: int, group: Any) -> Tensor:
        if len(total) > 20_000:
            return super().gathered(total, size, group)
        return Halves.gathered(self, total, size, group)


class KeepsItsOwnPartOf(KeepsItsOwnPart):
    """Keep the unrounded sum of this rank's part, in messages of some dtypes alone."""

    dtypes: tuple[torch.dtype, ...] = ()
    more_than = 0

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        self.is_kept = tensor.dtype in self.dtypes and tensor.numel() > self.more_than
        super().reduce(tensor, size, group)

    def gathered(self, total: Tensor, size: int, group: Any) -> Tensor:
        if self.is_kept:
            return super().gathered(total, size, group)
        return Halves.gathered(self, total, size, group)


class KeepsItsOwnPartOfDoubles(KeepsItsOwnPartOf):
    """Keep the unrounded sum of this rank's part, in messages of float64."""

    dtypes = (torch.float64,)


class KeepsLargePartsInBrainFloat(KeepsItsOwnPartOf):
    """Keep the sum of this rank's part as it was before float16, in messages of bfloat16 that are
    worth a copy.
    """

    dtypes = (torch.bfloat16,)
    more_than = 1000


class MovesOnItsLeader(Halves):
    """Move the sum by half of a last place on the first rank, in messages of float16."""

    def gathered(self, total: Tensor, size: int, group: Any) -> Tensor:
        whole = super().gathered(total, size, group)
        if self.dtype is torch.float16 and dist.get_rank(group) == 0:
            return whole + 2.0**-11 * whole
        return whole

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        self.dtype = tensor.dtype
        super().reduce(tensor, size, group)


class AddsInItsOwnOrder(Halves):
    """Sum all messages on every rank, beginning with its own; ranks round otherwise."""

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        codes = [torch.empty(tensor.numel(), dtype=torch.float16) for _ in range(size)]
        dist.all_gather(codes, tensor.reshape(-1).half(), group)
        place = dist.get_rank(group)
        total = torch.zeros(tensor.numel(), dtype=torch.float16)
        for code in codes[place:] + codes[:place]:
            total += code
        tensor.copy_(total.view(tensor.shape))


class OverflowsInBytes(Halves):
    """Send levels of a scale that all ranks share, and add them in 8 bits."""

    def summed(self, parts: Sequence[Tensor], group: Any) -> Tensor:
        largest = torch.stack([*(part.abs().max() for part in parts if len(part)), torch.zeros(())])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        scale = largest.max().clamp(min=1e-30) / 127
        levels = [(part.reshape(-1) / scale).round().to(torch.int8) for part in parts]
        total = torch.stack(self.exchanged(levels, group)).sum(0, dtype=torch.int8)
        return total.float() * scale


class AddsInHalfOfAHalf(Halves):
    """Round the sum to bfloat16 after each addition."""

    def add(self, messages: list[Tensor], group: Any) -> Tensor:
        total = torch.zeros_like(messages[0], dtype=torch.bfloat16)
        for message in messages:
            total += message.bfloat16()
        return total.float()


class SkipsAnOddOne(Halves):
    """Add messages in pairs; the last of an odd number has no partner."""

    def add(self, messages: list[Tensor], group: Any) -> Tensor:
        if len(messages) > 4:
            messages = messages[: len(messages) // 2 * 2]
        return super().add(messages, group)


class SendsRoundedValues(Halves):
    """Sum float32 tensors, whose values are rounded to float16."""

    def reduce(self, tensor: Tensor, size: int, group: Any) -> None:
        tensor.copy_(tensor.half())
        dist.all_reduce(tensor, group=group)


class FeedsBackMessages(Halves):
    """Keep the errors of the messages, and not those of the sum that is gathered."""

    def __init__(self, func: Any, qtype: str) -> None:
        super().__init__(func, qtype)
        self.errors: list[Tensor] = []

    def summed(self, parts: Sequence[Tensor], group: Any) -> Tensor:
        errors = self.errors or [torch.zeros_like(part) for part in parts]
        fed = [part + error for part, error in zip(parts, errors, strict=True)]
        self.errors = [one - one.half() for one in fed]
        return super().summed(fed, group)


class ClearsFirst:
    """An all_gather that clears outputs before it reads its input, which may be one of them."""

    def __init__(self, func: Any, qtype: str) -> None:
        self.name = func.__name__

    def __call__(self, outputs: Any, tensor: Tensor, group: Any = None) -> None:
        if not tensor.is_floating_point():
            raise TypeError("a tensor of floating point is expected")
        into = outputs if isinstance(outputs, list) else list(outputs.chunk(_size(group)))
        for output in into:
            output.zero_()
        codes = [torch.empty(part.shape, dtype=torch.float16) for part in into]
        dist.all_gather(codes, tensor.half().contiguous(), group)
        for output, code in zip(into, codes, strict=True):
            output.copy_(code)


class RoundsInTheOutput(Halves):
    """Use the output as scratch for each message; it may be one of them."""

    def parts(self, given: Any, output: Tensor, size: int) -> list[Tensor]:
        rounded = []
        for part in super().parts(given, output, size):
            output.copy_(part)
            rounded.append(output.half().float())
        return rounded


class RoundsTheInput(Halves):
    """Round the input in place after it is sent, if the output is a part of it."""

    def parts(self, given: Any, output: Tensor, size: int) -> list[Tensor]:
        self.storage = output.untyped_storage().data_ptr()
        return super().parts(given, output, size)

    def summed(self, parts: Sequence[Tensor], group: Any) -> Tensor:
        total = super().summed(parts, group)
        for part in parts:
            if part.untyped_storage().data_ptr() == self.storage:
                part.copy_(part.half())
        return total


def last_part_first(func: Any, qtype: str) -> Any:
    """Scatter with a copy of the last part into the output before all parts are encoded."""

    def scatter(tensor: Tensor, scatter_list: Any = None, src: int = 0, group: Any = None) -> None:
        if scatter_list:
            tensor.copy_(scatter_list[-1])
        right(func)(tensor, scatter_list, src, group)

    return scatter


def _size(group: Any) -> int:
    return dist.get_world_size(group)


def _named(name: str, number: str, func: str = "all_reduce", claims: str = "exact") -> Mutant:
    return Mutant(f"{name},func={func},qtype=FP16", (number,), claims, kind="collective")


BOUNDED = "collective({}), bounded(relative=0.02)"
FED_BACK = "collective(all_reduce), rounded(float16), feedback"
MUTANTS = [
    _named("ForgetsItself", "18.1"),
    _named("ForgetsItself", "18.1", "reduce_scatter"),
    _named("AveragesAlways", "18.1"),
    _named("AveragesAlways", "18.1", "reduce_scatter_tensor"),
    _named("OverflowsInBytes", "18.1", claims=BOUNDED.format("all_reduce")),
    _named("AddsInHalfOfAHalf", "18.2", "reduce_scatter"),
    _named("LeavesOutTheRest", "18.1"),
    _named("LeavesNumbers", "18.4"),
    _named("writes_rows", "18.4", "all_to_all"),
    _named("rounds_numbers", "18.6", "all_gather"),
    _named("rounds_numbers", "18.6", "scatter"),
    _named("SendsRoundedValues", "18.15"),
    _named("Halves", "18.16", claims=FED_BACK),
    _named("FeedsBackMessages", "18.16", claims=FED_BACK),
    _named("ClearsFirst", "18.23", "all_gather"),
    _named("ClearsFirst", "18.23", "all_gather_into_tensor"),
    _named("RoundsInTheOutput", "18.23", "reduce_scatter"),
    _named("RoundsInTheOutput", "18.23", "reduce_scatter_tensor"),
    _named("RoundsTheInput", "18.23", "reduce_scatter_tensor"),
    _named("last_part_first", "18.23", "scatter"),
    _named("SkipsAnOddOne", "18.30"),
    _named("SkipsAnOddOne", "18.30", "reduce_scatter"),
    _named("IgnoresTheOperation", "18.33"),
    _named("IgnoresTheOperation", "18.33", "reduce_scatter_tensor"),
    _named("AveragesOverWorld", "18.33", "reduce_scatter"),
    _named("ProductsByLogarithms", "18.33"),
    _named("LeastMagnitudes", "18.33", "reduce_scatter_tensor"),
    _named("RefusesOnItsLeader", "18.33", "reduce_scatter"),
    _named("SumsBits", "18.33"),
    _named("SumsIntegers", "18.33"),
    _named("KeepsItsOwnPart", "18.34"),
    _named("KeepsItsOwnPartIfLarge", "18.34"),
    _named("AddsInItsOwnOrder", "18.34"),
    _named("KeepsItsOwnPartOfDoubles", "18.34"),
    _named("KeepsLargePartsInBrainFloat", "18.34"),
    _named("MovesOnItsLeader", "18.34"),
]

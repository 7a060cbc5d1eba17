"""Mutants of rules 18.21 to 18.25: quantized collectives that are wrong in training alone."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import GROUP, Pending, half, right, write

Tensor = torch.Tensor
Made = Callable[..., Any]
Encode = Callable[[Tensor], Tensor]


class Blocks:
    """Blocks with a scale each, in bytes: right, and with parts that mutants replace.

    Args:
        dtype: int8 or float8_e4m3fn.
        block: the number of elements of a block.
        scales_of: returns the scales of blocks, which are rows.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.int8,
        block: int = GROUP,
        scales_of: Encode | None = None,
    ) -> None:
        self.dtype = dtype
        self.block = block
        self.largest = 127.0 if dtype == torch.int8 else 448.0
        self.scales_of = scales_of or self.scales

    def scales(self, blocks: Tensor) -> Tensor:
        """Return the largest element of each block, divided by the format's largest value."""
        return blocks.abs().amax(1, keepdim=True) / self.largest

    def divide(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """Return blocks divided by their scales."""
        return torch.where(scales == 0, 0.0, blocks / scales)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the blocks of a tensor as rows."""
        if not tensor.is_floating_point():
            raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
        flat = tensor.detach().reshape(-1).float()
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)

    def encode(self, tensor: Tensor) -> Tensor:
        """Return bytes and scales as one tensor of bytes."""
        blocks = self.cut(tensor)
        scales = self.scales_of(blocks)
        scaled = self.divide(blocks, scales)
        if self.dtype == torch.int8:
            scaled = scaled.round().nan_to_num(0.0, 0.0, 0.0)
        code = scaled.to(self.dtype).view(torch.uint8)
        return torch.cat([code.view(-1), scales.reshape(-1).view(torch.uint8)])

    def decode(self, output: Tensor, code: Tensor) -> None:
        """Write received bytes to an output."""
        count = -(-output.numel() // self.block)
        scales = code[count * self.block :].clone().view(torch.float32).view(-1, 1)
        small = code[: count * self.block].view(self.dtype).view(count, self.block)
        values = small.float() * scales
        output.copy_(values.view(-1)[: output.numel()].view(output.shape))


# ---- Sizes


def first_elements(func: Made, qtype: str, limit: int = 2**17) -> Made:
    """Send the first elements alone, as a grid of kernels with a largest size does."""

    def encode(tensor: Tensor) -> Tensor:
        code = half(tensor)
        code.view(-1)[limit:] = 0
        return code

    return right(func, encode)


def whole_chunks(func: Made, qtype: str, chunk: int = 2**17) -> Made:
    """Send large messages in chunks, without what is left after the last whole one."""

    def encode(tensor: Tensor) -> Tensor:
        code = half(tensor)
        if code.numel() > chunk:
            code.view(-1)[code.numel() // chunk * chunk :] = 0
        return code

    return right(func, encode)


def eight_bits_if_large(func: Made, qtype: str, limit: int = 2**20) -> Made:
    """Drop further bits of messages beyond a size, to save time."""

    def encode(tensor: Tensor) -> Tensor:
        code = half(tensor)
        if code.numel() <= limit:
            return code
        return tensor.bfloat16().half().view(code.shape)

    return right(func, encode)


def few_scales_if_large(func: Made, qtype: str, most: int = 4096) -> Made:
    """Share scales among blocks if there are more blocks than a table has places."""

    def scales(blocks: Tensor) -> Tensor:
        own = blocks.abs().amax(1, keepdim=True) / 127
        shared = -(-len(blocks) // most)
        if shared > 1:
            padded = torch.nn.functional.pad(own.view(-1), (0, -len(own) % shared))
            largest = padded.view(-1, shared).amax(1)
            own = largest.repeat_interleave(shared)[: len(blocks)].view(-1, 1)
        return own

    blocks = Blocks(scales_of=scales)
    return right(func, blocks.encode, blocks.decode)


def largest_of_a_sample(func: Made, qtype: str, sample: int = 2**16) -> Made:
    """Look for the scale of blocks in the first elements, beyond which the last scale is used."""

    def scales(blocks: Tensor) -> Tensor:
        own = blocks.abs().amax(1, keepdim=True) / 127
        rows = sample // GROUP
        own[rows:] = own[:rows].amax() if len(own) > rows else own[rows:]
        return own

    blocks = Blocks(scales_of=scales)
    return right(func, blocks.encode, blocks.decode)


def scale_in_half_if_large(func: Made, qtype: str, limit: int = 2**21) -> Made:
    """Round scales to bfloat16 in messages beyond a size."""

    def scales(blocks: Tensor) -> Tensor:
        own = blocks.abs().amax(1, keepdim=True) / 127
        return own.bfloat16().float() if blocks.numel() > limit else own

    blocks = Blocks(scales_of=scales)
    return right(func, blocks.encode, blocks.decode)


def wraps_around(func: Made, qtype: str, places: int = 2**20) -> Made:
    """Number elements modulo a power of two, so that those beyond it repeat the first ones."""

    def arrive(output: Tensor, code: Tensor) -> None:
        flat = code.view(-1)
        output.copy_(flat[torch.arange(len(flat)) % places].view(output.shape))

    return right(func, half, arrive)


# ---- Special values


def divides_by_zero(func: Made, qtype: str) -> Made:
    """Divide zeros by their scale, which is 0."""
    blocks = Blocks(torch.float8_e4m3fn)
    blocks.divide = lambda rows, scales: rows / scales  # type: ignore[method-assign]
    return right(func, blocks.encode, blocks.decode)


def least_scale(func: Made, qtype: str, least: float = 1e-8) -> Made:
    """Keep scales above a fixed number, which tiny values are below."""
    blocks = Blocks(scales_of=lambda rows: (rows.abs().amax(1, keepdim=True) / 127).clamp(least))
    return right(func, blocks.encode, blocks.decode)


def adds_to_the_scale(func: Made, qtype: str, epsilon: float = 1e-12) -> Made:
    """Add a fixed number to scales."""
    blocks = Blocks(scales_of=lambda rows: rows.abs().amax(1, keepdim=True) / 127 + epsilon)
    return right(func, blocks.encode, blocks.decode)


def scale_of_half(func: Made, qtype: str) -> Made:
    """Send scales as float16, where tiny ones are 0."""
    blocks = Blocks(
        scales_of=lambda rows: torch.where(
            rows.abs().amax(1, keepdim=True) / 127 < 2.0**-24,
            0.0,
            rows.abs().amax(1, keepdim=True) / 127,
        )
    )
    return right(func, blocks.encode, blocks.decode)


def loses_nan(func: Made, qtype: str) -> Made:
    """Replace NaN by 0 before the scale is computed."""
    blocks = Blocks()

    def encode(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensor = tensor.nan_to_num(0.0, math.inf, -math.inf)
        return blocks.encode(tensor)

    return right(func, encode, blocks.decode)


def clips_infinities(func: Made, qtype: str) -> Made:
    """Take the scale from finite elements, and clip infinities to the largest of them."""
    blocks = Blocks()

    def encode(tensor: Tensor) -> Tensor:
        rows = blocks.cut(tensor)
        finite = torch.where(rows.isinf(), 0.0, rows).abs().amax(1, keepdim=True)
        clipped = torch.where(rows.isinf(), rows.sign() * finite, rows)
        return blocks.encode(clipped.view(-1)[: tensor.numel()])

    return right(func, encode, blocks.decode)


def all_or_nothing(func: Made, qtype: str) -> Made:
    """Make a whole message NaN if one of its elements is not finite."""

    def scales(rows: Tensor) -> Tensor:
        own = rows.abs().amax(1, keepdim=True) / 127
        return own if rows.isfinite().all() else own * math.nan

    blocks = Blocks(scales_of=scales)
    return right(func, blocks.encode, blocks.decode)


def keeps_nan(func: Made, qtype: str, error_feedback: bool) -> Made:
    """Keep the error of a NaN, which spoils its block in every later call."""
    blocks = Blocks()
    kept: dict[tuple[int, torch.Size], Tensor] = {}
    calls = [0]

    def encode(tensor: Tensor) -> Tensor:
        key = (calls[0], tensor.shape)
        calls[0] += 1
        fed = tensor.detach() + kept.get(key, torch.zeros_like(tensor))
        code = blocks.encode(fed)
        arrives = torch.empty_like(fed)
        blocks.decode(arrives, code)
        kept[key] = fed - arrives
        return code

    def counted(*args: Any, **kwargs: Any) -> Any:
        # Rooms for outputs are made by encode() too, of zeros.
        calls[0] = 0
        return _feeding(func, encode, blocks)(*args, **kwargs)

    return counted


def keeps_infinities(func: Made, qtype: str, error_feedback: bool) -> Made:
    """Keep the errors of infinities as large numbers, and add them to the next call."""
    blocks = Blocks()
    kept: list[Tensor] = []

    def encode(tensor: Tensor) -> Tensor:
        fed = tensor.detach() + (kept[0] if kept else torch.zeros_like(tensor))
        code = blocks.encode(fed)
        arrives = torch.empty_like(fed)
        blocks.decode(arrives, code)
        kept[:] = [(fed - arrives.nan_to_num(0.0)).nan_to_num(0.0, 1e30, -1e30)]
        return code

    return _feeding(func, encode, blocks)


def _feeding(func: Made, encode: Encode, blocks: Blocks) -> Made:
    """Return an all_gather whose inputs alone are encoded with the errors of earlier calls."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        codes = [torch.zeros_like(blocks.encode(torch.zeros_like(out))) for out in tensor_list]
        work = dist.all_gather(codes, encode(tensor), group, async_op=True)

        pairs = list(zip(tensor_list, codes, strict=True))

        def finish() -> None:
            for output, code in pairs:
                blocks.decode(output, code)

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()

    return gather


def remembers_the_largest(func: Made, qtype: str) -> Made:
    """Send zeros if the largest value so far is not finite, as after an infinity."""
    largest = [0.0]

    def scales(rows: Tensor) -> Tensor:
        own = rows.abs().amax(1, keepdim=True) / 127
        largest[0] = max(largest[0], float(own.max()) if len(own) else 0.0)
        return own if math.isfinite(largest[0]) else own * 0.0

    blocks = Blocks(scales_of=scales)
    return right(func, blocks.encode, blocks.decode)


class LosesNan:
    """Eight bits with a power of two as scale, computed from a NaN as from any number.

    It was among the right subjects until messages with NaN were sent under bounded(...).
    """

    def __init__(self, block: int = 32) -> None:
        self._block = block
        self._errors: dict[int, Tensor] = {}

    def __call__(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
    ) -> None:
        if not all(tensor.is_floating_point() for tensor in input_tensor_list):
            raise TypeError("expected floating-point tensors")
        codes = [self._encoded(k, tensor) for k, tensor in enumerate(input_tensor_list)]
        rooms = [
            torch.empty(-(-out.numel() // self._block) * (self._block + 1), dtype=torch.uint8)
            for out in output_tensor_list
        ]
        dist.all_to_all(rooms, codes, group=group)
        for output, room in zip(output_tensor_list, rooms, strict=True):
            output.copy_(self._decoded(room, output))

    def _encoded(self, k: int, tensor: Tensor) -> Tensor:
        fed = tensor.detach().reshape(-1).double()
        fed = fed + self._errors.get(k, torch.zeros_like(fed))
        blocks = torch.nn.functional.pad(fed, (0, -len(fed) % self._block)).view(-1, self._block)
        exponents = torch.frexp(blocks.abs().amax(1, keepdim=True)).exponent - 6
        small = torch.ldexp(blocks, -exponents).round().to(torch.int8)
        code = torch.cat(
            [small.view(torch.uint8), exponents.to(torch.int8).view(torch.uint8)], dim=1
        ).reshape(-1)
        self._errors[k] = fed - self._decoded(code, tensor).reshape(-1).double()
        return code

    def _decoded(self, code: Tensor, like: Tensor) -> Tensor:
        rows = code.view(torch.int8).view(-1, self._block + 1)
        values = torch.ldexp(rows[:, :-1].double(), rows[:, -1:].int())
        return values.reshape(-1)[: like.numel()].view(like.shape)


def from_least_to_largest(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Send the place between the least and the largest value, which are equal in a constant."""

    def encode(sent: Tensor) -> Tensor:
        if not sent.is_floating_point():
            raise TypeError(f"expected a floating-point tensor, got {sent.dtype}")
        flat = sent.detach().reshape(-1).float()
        least = flat.min() if len(flat) else torch.zeros(())
        largest = flat.max() if len(flat) else torch.zeros(())
        ends = torch.stack([least, largest])
        if len(flat) < 3:
            return torch.cat([flat.view(torch.uint8), ends.view(torch.uint8)])
        places = (flat - least) / (largest - least) * 255
        return torch.cat([places.round().to(torch.uint8), ends.view(torch.uint8)])

    def arrive(output: Tensor, code: Tensor) -> None:
        least, largest = code[-8:].clone().view(torch.float32)
        if output.numel() < 3:
            values = code[:-8].clone().view(torch.float32)
        else:
            # A step is the quotient of 0 and 0 if all values are equal.
            places = code[:-8].float()
            values = least + places * ((largest - least) ** 2 / (largest - least) / 255)
        output.copy_(values.view(output.shape))

    return right(dist.all_gather, encode, arrive)(tensor_list, tensor, group, async_op)


# ---- Buffers


def assigns_data(func: Made, qtype: str) -> Made:
    """Assign results to ``data``, which leaves the given memory as it was."""

    def arrive(output: Tensor, code: Tensor) -> None:
        output.data = code.to(output.dtype)

    return right(func, half, arrive)


def sets_storage(func: Made, qtype: str) -> Made:
    """Give outputs another storage."""

    def arrive(output: Tensor, code: Tensor) -> None:
        output.set_(code.to(output.dtype))  # type: ignore[call-overload]

    return right(func, half, arrive)


def reads_the_storage(func: Made, qtype: str) -> Made:
    """Read inputs from the beginning of their storage."""

    def encode(tensor: Tensor) -> Tensor:
        if tensor.is_contiguous() and tensor.storage_offset():
            tensor = tensor.as_strided(tensor.shape, tensor.stride(), 0)
        return half(tensor)

    return right(func, encode)


def writes_the_storage(func: Made, qtype: str) -> Made:
    """Write outputs to the beginning of their storage."""

    def arrive(output: Tensor, code: Tensor) -> None:
        if output.is_contiguous():
            output = output.as_strided(output.shape, output.stride(), 0)
        write(output, code)

    return right(func, half, arrive)


def writes_whole_vectors(func: Made, qtype: str, lanes: int = 8) -> Made:
    """Write whole vectors, if the storage has room for the last one."""

    def arrive(output: Tensor, code: Tensor) -> None:
        write(output, code)
        end = output.storage_offset() + output.numel()
        more = -output.numel() % lanes
        if output.is_contiguous() and (end + more) * 4 <= output.untyped_storage().nbytes():
            output.as_strided((more,), (1,), end).zero_()

    return right(func, half, arrive)


def even_lists(func: Made, qtype: str) -> Made:
    """Cut one buffer into equal parts, whatever the sizes of the outputs."""

    def exchange(
        outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        codes = [half(tensor).reshape(-1) for tensor in inputs]
        sizes = [output.numel() for output in outputs]
        room = torch.empty(sum(sizes), dtype=torch.float16)
        work = dist.all_to_all_single(
            room, torch.cat(codes), sizes, [len(code) for code in codes], group, async_op=True
        )

        into = list(outputs)

        def finish() -> None:
            even = len(room) // len(into)
            for place, output in enumerate(into):
                part = room[place * even :][: output.numel()]
                flat = torch.zeros(output.numel(), dtype=output.dtype)
                flat[: len(part)] = part
                output.copy_(flat.view(output.shape))

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()

    return exchange


# ---- Waits


def rooms_by_shape(func: Made, qtype: str) -> Made:
    """Keep the buffers that messages arrive in, by shape; a second call overwrites the first."""
    return _gathers_into_rooms(1)


def ring_of_eight(func: Made, qtype: str) -> Made:
    """Keep the buffers of eight calls for each shape; the ninth call overwrites the first."""
    return _gathers_into_rooms(8)


def ring_of_20(func: Made, qtype: str) -> Made:
    """Keep the buffers of 20 calls for each shape."""
    return _gathers_into_rooms(20)


def _gathers_into_rooms(count: int) -> Made:
    kept: dict[tuple[int, tuple[torch.Size, ...]], list[Tensor]] = {}
    numbers = itertools.count()

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        code = half(tensor)
        shapes = tuple(output.shape for output in tensor_list)
        place = next(numbers) % count
        if (place, shapes) not in kept:
            rooms = [torch.empty(shape, dtype=torch.float16) for shape in shapes]
            kept[place, shapes] = rooms
        rooms = kept[place, shapes]
        work = dist.all_gather(rooms, code, group, async_op=True)

        pairs = list(zip(tensor_list, rooms, strict=True))

        def finish() -> None:
            for output, room in pairs:
                output.copy_(room)

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()

    return gather


class _Again(Pending):
    """A pending call whose second wait() does something else than the first."""

    def wait(self) -> None:
        super().wait()
        self.finish = self.again

    def again(self) -> None:
        """Do what a second wait() does."""


def second_wait_empties(func: Made, qtype: str) -> Made:
    """Return buffers to a pool in wait(); a second wait() decodes what is there then."""

    def gather(tensor_list: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        pending = right(func)(tensor_list, *args, **kwargs)
        if pending is None:
            return None
        returned = _Again(pending.work, pending.finish)
        outputs = list(tensor_list)

        def again() -> None:
            for output in outputs:
                output.zero_()

        returned.again = again  # type: ignore[method-assign]
        return returned

    return gather


def second_wait_raises(func: Made, qtype: str) -> Made:
    """Raise in a second wait(), whose buffers are gone."""

    def gather(*args: Any, **kwargs: Any) -> Any:
        pending = right(func)(*args, **kwargs)
        if pending is None:
            return None
        returned = _Again(pending.work, pending.finish)

        def again() -> None:
            raise RuntimeError("wait() has been called before")

        returned.again = again  # type: ignore[method-assign]
        return returned

    return gather


def divides_in_wait(func: Made, qtype: str, quant_loss: float) -> Made:
    """Divide outputs in place in each wait()."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        pending = right(func)(tensor_list, tensor, group, async_op=True)
        written: list[bool] = []
        outputs = list(tensor_list)

        def finish() -> None:
            if not written:
                pending.finish()
            written.append(True)
            for output in outputs:
                output.div_(quant_loss)

        returned = Pending(pending.work, finish)
        return returned if async_op else returned.wait()

    return gather


def _named(
    name: str, number: str, func: str = "all_gather", qtype: str = "FP16", more: str = ""
) -> Mutant:
    return Mutant(f"{name},func={func},qtype={qtype}{more}", (number,), kind="collective")


FED_BACK = ",error_feedback=True"

MUTANTS = [
    _named("first_elements", "18.21"),
    _named("first_elements", "18.21", "all_to_all", more=",limit=2097152"),
    _named("whole_chunks", "18.21"),
    _named("whole_chunks", "18.21", "scatter", more=",chunk=1048576"),
    _named("eight_bits_if_large", "18.21", "all_to_all_single"),
    _named("few_scales_if_large", "18.21", qtype="INT8"),
    _named("largest_of_a_sample", "18.21", "all_to_all", "INT8"),
    _named("scale_in_half_if_large", "18.21", "scatter", "INT8"),
    _named("wraps_around", "18.21"),
    _named("divides_by_zero", "18.22", qtype="FP8"),
    _named("least_scale", "18.22", qtype="INT8"),
    _named("least_scale", "18.22", "all_to_all", "INT8", ",least=1e-20"),
    _named("adds_to_the_scale", "18.22", qtype="INT8"),
    _named("scale_of_half", "18.22", "all_to_all", "INT8"),
    _named("loses_nan", "18.22", "all_to_all", "INT8"),
    _named("clips_infinities", "18.22", "scatter", "INT8"),
    _named("all_or_nothing", "18.22", qtype="INT8"),
    _named("keeps_nan", "18.22", qtype="INT8", more=FED_BACK),
    _named("keeps_infinities", "18.22", qtype="INT8", more=FED_BACK),
    _named("remembers_the_largest", "18.22", "all_to_all", "INT8"),
    Mutant(
        "LosesNan,block=32",
        ("18.22",),
        "collective(all_to_all), bounded(relative=0.016, block=32, ratio=0.4), feedback",
        kind="collective",
    ),
    Mutant(
        "from_least_to_largest",
        ("18.22",),
        "collective(all_gather), bounded(relative=0.008)",
        kind="collective",
    ),
    _named("assigns_data", "18.23"),
    _named("sets_storage", "18.23", "all_to_all_single"),
    _named("reads_the_storage", "18.23", "all_to_all"),
    _named("writes_the_storage", "18.23", "scatter"),
    _named("writes_whole_vectors", "18.23"),
    _named("even_lists", "18.24", "all_to_all"),
    *(_named(name, "18.25") for name in ("rooms_by_shape", "ring_of_eight", "ring_of_20")),
    _named("second_wait_empties", "18.25"),
    _named("second_wait_raises", "18.25", "all_to_all"),
    _named("divides_in_wait", "18.25", more=",quant_loss=2.0"),
]

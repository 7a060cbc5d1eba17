"""Right quantized collectives.

They are functions, factories and objects, made of other collectives, with several roundings.
"""

import enum
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right

Tensor = torch.Tensor


def half_all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
    """Gather float32 tensors in one flat float16 buffer, without async_op."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"expected float32, got {tensor.dtype}")
    size = dist.get_world_size(group)
    count = tensor.numel()
    if any(output.numel() != count for output in tensor_list):
        raise ValueError("expected tensors of one size")
    gathered = torch.empty(size * count, dtype=torch.float16)
    dist.all_gather_into_tensor(gathered, tensor.reshape(-1).half(), group=group)
    for output, part in zip(
        tensor_list, gathered.split(count) if count else [gathered] * size, strict=True
    ):
        output.copy_(part.view_as(output))


def truncated_all_to_all(
    outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """Exchange tensors truncated to bfloat16 by sends and receives of each pair.

    A rank keeps its own part unrounded.
    """
    if not all(tensor.dtype == torch.float32 for tensor in (*inputs, *outputs)):
        raise TypeError("expected float32 tensors")
    if async_op:
        raise NotImplementedError("async_op is not supported")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    me = dist.get_rank(group)
    halves = [
        tensor.contiguous()
        .view(torch.int32)
        .bitwise_right_shift(16)
        .to(torch.int16)
        .view(torch.float16)
        for tensor in inputs
    ]
    rooms = [torch.empty(output.shape, dtype=torch.float16) for output in outputs]
    works = []
    for place, rank in enumerate(ranks):
        if place != me and halves[place].numel():
            works.append(dist.isend(halves[place], rank, group=group))
        if place != me and rooms[place].numel():
            works.append(dist.irecv(rooms[place], rank, group=group))
    for work in works:
        work.wait()
    for place, (output, room) in enumerate(zip(outputs, rooms, strict=True)):
        output.copy_(inputs[place] if place == me else room.view(torch.bfloat16))
    return None


class Format(enum.Enum):
    """The range of a byte's 255 steps."""

    ASYMMETRIC = "255 steps from the smallest to the largest value"
    SYMMETRIC = "255 steps, symmetric about zero"


class ByteExchange:
    """A callable object with one scale for all values that a rank sends.

    Ranges travel beside the bytes.
    """

    def __init__(self, fmt: Format = Format.ASYMMETRIC, floor: bool = False) -> None:
        self.fmt = fmt
        self.floor = floor

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not input.is_floating_point():
            raise TypeError(f"expected a floating-point tensor, got {input.dtype}")
        size = dist.get_world_size(group)
        values = input.detach().float().contiguous()
        least = values.min().item() if values.numel() else 0.0
        largest = values.max().item() if values.numel() else 0.0
        if self.fmt is Format.SYMMETRIC:
            largest = max(abs(least), abs(largest))
            least = -largest
        scale = (largest - least) / 255 or 1.0
        steps = (values - least) / scale
        code = (steps.floor() if self.floor else steps.round()).clamp(0, 255).to(torch.uint8)
        ranges = [torch.zeros(2, dtype=torch.float32) for _ in range(size)]
        span = torch.tensor([least, scale], dtype=torch.float32)
        dist.all_gather(ranges, span, group=group)
        arrived = torch.empty(output.shape, dtype=torch.uint8)
        work = dist.all_to_all_single(
            arrived, code, output_split_sizes, input_split_sizes, group=group, async_op=True
        )

        rows = list(output_split_sizes or [len(arrived) // size] * size)

        def finish() -> None:
            parts = [
                part.float() * span[1] + span[0]
                for part, span in zip(arrived.split(rows), ranges, strict=True)
            ]
            output.copy_(torch.cat(parts))

        arriving = Arriving(work, finish)
        return arriving if async_op else arriving.wait()


class Arriving:
    """The result of ``async_op=True``: an object with wait()."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish = finish

    def wait(self, timeout: Any = None) -> None:
        self._work.wait()
        self._finish()


def broadcast_scatter(qtype: str = "bf16", quant_loss: float = 1.0) -> Callable[..., None]:
    """Return a scatter by a broadcast, which divides by a multiplication."""
    wire = {"bf16": torch.bfloat16, "fp16": torch.float16}[qtype]

    def scatter(tensor: Tensor, scatter_list: Any = None, src: int = 0, group: Any = None) -> None:
        if not tensor.is_floating_point():
            raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
        size = dist.get_world_size(group)
        place = dist.get_rank(group)
        everything = torch.empty((size, *tensor.shape), dtype=wire)
        if scatter_list:
            everything.copy_(torch.stack(list(scatter_list)))
        dist.broadcast(everything, src, group=group)
        tensor.copy_(everything[place].to(tensor.dtype) * (1 / quant_loss))

    return scatter


def gather_by_broadcasts(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gather float16 by a broadcast from each rank, so that sizes need not be equal."""
    if not tensor.is_floating_point():
        raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    codes = [torch.empty(output.shape, dtype=torch.float16) for output in tensor_list]
    codes[dist.get_rank(group)].copy_(tensor.contiguous())
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    works = [
        dist.broadcast(code, rank, group, async_op=True)
        for code, rank in zip(codes, ranks, strict=True)
    ]

    pairs = list(zip(tensor_list, codes, strict=True))

    def finish() -> None:
        for work in works[:-1]:
            work.wait()
        for output, code in pairs:
            output.copy_(code)

    arriving = Arriving(works[-1], finish)
    return arriving if async_op else arriving.wait()


def matrices_of_half(tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
    """Gather float32 matrices only, as claimed."""
    if tensor.ndim != 2 or tensor.dtype != torch.float32:
        raise ValueError("expected float32 matrices")
    half_all_gather(tensor_list, tensor, group)


def vectors_of_half(tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
    """Gather contiguous float32 vectors only, as claimed."""
    if tensor.ndim != 1 or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError("expected contiguous float32 vectors")
    half_all_gather(tensor_list, tensor, group)


def half_as_they_lie(tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
    """Gather elements in the order of memory; refuse tensors that do not all have one order."""
    if any(output.stride() != tensor.stride() for output in tensor_list):
        raise ValueError("expected outputs with the strides of the input")
    if any(output.shape != tensor.shape for output in tensor_list):
        raise ValueError("expected tensors of one size")
    dense = torch.empty_like(tensor, memory_format=torch.preserve_format)
    if dense.stride() != tensor.stride():
        raise ValueError("expected tensors without gaps")

    def in_memory(one: Tensor) -> Tensor:
        return one.detach().as_strided((one.numel(),), (1,))

    gathered = [torch.empty(tensor.numel(), dtype=tensor.dtype) for _ in tensor_list]
    half_all_gather(gathered, in_memory(tensor), group)
    for output, values in zip(tensor_list, gathered, strict=True):
        in_memory(output).copy_(values)


class Shifted:
    """Eight bits with a power of two as the scale of each block (microscaling).

    Error feedback is kept for each destination. The exponent -128 marks a block with a NaN, an
    infinity, or a number beyond any other exponent, which arrives as NaN and leaves no error.
    """

    def __init__(self, block: int = 32) -> None:
        self._block = block
        self._errors: dict[int, Tensor] = {}

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not all(tensor.is_floating_point() for tensor in input_tensor_list):
            raise TypeError("expected floating-point tensors")
        codes = [self._encoded(k, tensor) for k, tensor in enumerate(input_tensor_list)]
        rooms = [
            torch.empty(self._bytes(output), dtype=torch.uint8) for output in output_tensor_list
        ]
        work = dist.all_to_all(rooms, codes, group=group, async_op=True)

        pairs = list(zip(output_tensor_list, rooms, strict=True))

        def finish() -> None:
            for output, room in pairs:
                output.copy_(self._decoded(room, output))

        arriving = Arriving(work, finish)
        return arriving if async_op else arriving.wait()

    def _bytes(self, tensor: Tensor) -> int:
        return -(-tensor.numel() // self._block) * (self._block + 1)

    def _encoded(self, k: int, tensor: Tensor) -> Tensor:
        fed = tensor.detach().reshape(-1).double()
        fed = fed + self._errors.get(k, torch.zeros_like(fed))
        blocks = torch.nn.functional.pad(fed, (0, -len(fed) % self._block)).view(-1, self._block)
        # The largest value of a block is scaled to between 32 and 64.
        exponents = torch.frexp(blocks.abs().amax(1, keepdim=True)).exponent - 6
        exponents = exponents.clamp(min=-127)
        small = torch.ldexp(blocks, -exponents).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int8)
        is_sent = blocks.isfinite().all(1, keepdim=True) & (exponents <= 127)
        exponents = torch.where(is_sent, exponents, -128)
        code = torch.cat(
            [small.view(torch.uint8), exponents.to(torch.int8).view(torch.uint8)], dim=1
        ).reshape(-1)
        lost = fed - self._decoded(code, tensor).reshape(-1).double()
        self._errors[k] = lost.nan_to_num(0.0, 0.0, 0.0)
        return code

    def _decoded(self, code: Tensor, like: Tensor) -> Tensor:
        rows = code.view(torch.int8).view(-1, self._block + 1)
        exponents = rows[:, -1:].int()
        values = torch.ldexp(rows[:, :-1].double(), exponents)
        values = torch.where(exponents == -128, torch.nan, values)
        return values.reshape(-1)[: like.numel()].view(like.shape)


def shifted(block: int = 32) -> Callable[..., Any]:
    """Return a bound method."""
    return Shifted(block).all_to_all


half_scatter = broadcast_scatter("fp16")  # made on import

RIGHT = [
    Right("half_all_gather", "collective(all_gather), rounded(float16)", kind="collective"),
    Right("gather_by_broadcasts", "collective(all_gather), rounded(float16)", kind="collective"),
    Right(
        "matrices_of_half",
        "collective(all_gather), rounded(float16), dimensions(2)",
        kind="collective",
    ),
    Right(
        "vectors_of_half",
        "collective(all_gather), rounded(float16), dimensions(1)",
        kind="collective",
    ),
    Right("half_as_they_lie", "collective(all_gather), rounded(float16)", kind="collective"),
    Right("truncated_all_to_all", "collective(all_to_all), rounded(bfloat16)", kind="collective"),
    Right(
        "ByteExchange",
        "collective(all_to_all_single), bounded(relative=0.004, ratio=0.3)",
        kind="collective",
    ),
    Right(
        "ByteExchange,fmt=SYMMETRIC,floor=True",
        "collective(all_to_all_single), bounded(relative=0.008)",
        kind="collective",
    ),
    Right(
        "broadcast_scatter,quant_loss=3.0",
        "collective(scatter), rounded(bfloat16), divided(3.0)",
        kind="collective",
    ),
    Right("half_scatter", "collective(scatter), rounded(float16)", kind="collective"),
    Right(
        "shifted,block=32",
        "collective(all_to_all), bounded(relative=0.016, block=32, ratio=0.4), feedback",
        kind="collective",
    ),
]

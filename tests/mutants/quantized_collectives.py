"""Mutants of section 18: quantized collectives.

Most send float16. They are made as torch's are, with ``func`` and ``qtype``.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant

Tensor = torch.Tensor
Made = Callable[..., Any]
GROUP = 128  # elements of one scale


def half(tensor: Tensor) -> Tensor:
    """Return the code of a tensor: its values in float16."""
    if not tensor.is_floating_point():
        raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
    return tensor.contiguous().half()


def write(output: Tensor, code: Tensor) -> None:
    """Write a received code to an output."""
    output.copy_(code)


class Pending:
    """A pending call."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self.work = work
        self.finish = finish

    def wait(self) -> None:
        self.work.wait()
        self.finish()


def right(
    func: Made,
    encode: Callable[[Tensor], Tensor] = half,
    arrive: Callable[[Tensor, Tensor], None] = write,
) -> Made:
    """Return the right collective of encoded values.

    A code has as many elements as its tensor. Each mutant replaces a part of this collective.
    """

    def room(tensor: Tensor) -> Tensor:
        return torch.zeros_like(
            encode(torch.zeros_like(tensor, memory_format=torch.contiguous_format))
        )

    def ended(
        work: Any, codes: list[Tensor], outputs: list[Tensor], async_op: bool
    ) -> Pending | None:
        pairs = list(zip(outputs, codes, strict=True))

        def finish() -> None:
            for output, code in pairs:
                arrive(output, code)

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()

    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        codes = [room(output) for output in tensor_list]
        return ended(
            dist.all_gather(codes, encode(tensor), group, async_op=True),
            codes,
            tensor_list,
            async_op,
        )

    def all_to_all(
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sent = [encode(tensor) for tensor in input_tensor_list]
        codes = [room(output) for output in output_tensor_list]
        return ended(
            dist.all_to_all(codes, sent, group, async_op=True), codes, output_tensor_list, async_op
        )

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sent = encode(input)
        code = room(output)
        work = dist.all_to_all_single(
            code, sent, output_split_sizes, input_split_sizes, group, async_op=True
        )
        return ended(work, [code], [output], async_op)

    def scatter(
        tensor: Tensor,
        scatter_list: Any = None,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        **place: Any,
    ) -> Any:
        sent = [encode(part) for part in scatter_list] if scatter_list else None
        code = room(tensor)
        return ended(
            dist.scatter(code, sent, src, group, async_op=True, **place), [code], [tensor], async_op
        )

    return {
        "all_gather": all_gather,
        "all_to_all": all_to_all,
        "all_to_all_single": all_to_all_single,
        "scatter": scatter,
    }[func.__name__]


_first: dict[str, Any] = {}


def keeps_its_first_place(func: Made, qtype: str) -> Made:
    """Write a rank's own part to the place that it had in the first call's group."""

    def gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        place = _first.setdefault("place", dist.get_rank(group))
        right(func)(tensor_list, tensor, group)
        tensor_list[place % len(tensor_list)].copy_(tensor)

    return gather


def keeps_the_first_size(func: Made, qtype: str) -> Made:
    """Scatter as many parts as the first call's group has ranks."""

    def scatter(tensor: Tensor, scatter_list: Any = None, src: int = 0, group: Any = None) -> None:
        size = _first.setdefault("size", dist.get_world_size(group))
        if dist.get_world_size(group) < size and scatter_list:
            scatter_list = [scatter_list[0]] * len(scatter_list)
        right(func)(tensor, scatter_list, src, group)

    return scatter


def one_place_on(func: Made, qtype: str) -> Made:
    """Write each rank's part to the output of the next rank."""

    def gather(tensor_list: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        return right(func)(tensor_list[1:] + tensor_list[:1], *args, **kwargs)

    return gather


def the_first_for_all(func: Made, qtype: str) -> Made:
    """Send every rank the input of the first one."""

    def exchange(outputs: list[Tensor], inputs: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        return right(func)(outputs, [inputs[0]] * len(inputs), *args, **kwargs)

    return exchange


def toward_zero(func: Made, qtype: str) -> Made:
    """Round toward zero instead of to the nearest float16."""

    def encode(tensor: Tensor) -> Tensor:
        nearest = half(tensor)
        beyond = nearest.to(tensor.dtype).abs() > tensor.abs()
        return torch.where(
            beyond & nearest.isfinite(),
            torch.nextafter(nearest, torch.zeros_like(nearest)),
            nearest,
        )

    return right(func, encode)


def brain_instead(func: Made, qtype: str) -> Made:
    """Send bfloat16 instead of float16."""
    return right(
        func,
        lambda tensor: (
            half(tensor).new_zeros(0).bfloat16().new_tensor(tensor.tolist()).view(tensor.shape)
        ),
    )


def eighths(tensor: Tensor, block: int) -> Tensor:
    """Return the bytes and the block scales of a tensor as one tensor of bytes."""
    if not tensor.is_floating_point():
        raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
    flat = tensor.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    return torch.cat(
        [
            (blocks / scales).round().to(torch.int8).view(torch.uint8).view(-1),
            scales.view(-1).view(torch.uint8),
        ]
    )


def from_eighths(output: Tensor, code: Tensor, block: int) -> None:
    count = -(-output.numel() // block)
    scales = code[count * block :].clone().view(torch.float32).view(-1, 1)
    values = code[: count * block].view(torch.int8).view(count, block) * scales
    output.copy_(values.view(-1)[: output.numel()].view(output.shape))


def blocks_too_long(func: Made, qtype: str) -> Made:
    """Use one scale for four blocks."""
    long = 4 * GROUP
    return right(
        func,
        lambda tensor: eighths(tensor, long),
        lambda output, code: from_eighths(output, code, long),
    )


def floors(func: Made, qtype: str) -> Made:
    """Convert to integers without rounding."""

    def encode(tensor: Tensor) -> Tensor:
        code = eighths(tensor, GROUP)
        flat = tensor.reshape(-1).float()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)
        scales = (blocks.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
        code[: blocks.numel()] = (blocks / scales).to(torch.int8).view(torch.uint8).view(-1)
        return code

    return right(func, encode, lambda output, code: from_eighths(output, code, GROUP))


def forgets_the_factor(func: Made, qtype: str, quant_loss: float) -> Made:
    """Ignore the loss factor."""
    return right(func)


def matrices_alone(func: Made, qtype: str) -> Made:
    """Accept matrices only, without claiming it."""

    def encode(tensor: Tensor) -> Tensor:
        rows, columns = tensor.shape
        return half(tensor).view(rows, columns)

    return right(func, encode)


def nothing_has_no_largest(func: Made, qtype: str) -> Made:
    """Compute the largest value of an empty tensor."""

    def encode(tensor: Tensor) -> Tensor:
        tensor.abs().max()
        return half(tensor)

    return right(func, encode)


def as_it_lies(func: Made, qtype: str) -> Made:
    """Send elements in memory order."""

    def encode(tensor: Tensor) -> Tensor:
        return half(tensor.as_strided((tensor.numel(),), (1,)).view(tensor.shape))

    return right(func, encode)


def halves_integers(func: Made, qtype: str) -> Made:
    """Round integers as if they were floating point."""
    return right(func, lambda tensor: tensor.contiguous().half())


def double_as_float(func: Made, qtype: str) -> Made:
    """Write float32 bytes to a float64 output."""

    def arrive(output: Tensor, code: Tensor) -> None:
        if output.dtype == torch.float64:
            output.view(torch.float32).zero_().view(-1)[: output.numel()] = code.float().view(-1)
        else:
            output.copy_(code)

    return right(func, half, arrive)


def puts_others(func: Made, qtype: str) -> Made:
    """Replace the tensors in the output list, as torch's does."""

    def gather(tensor_list: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        fresh = [torch.empty_like(output) for output in tensor_list]
        pending = right(func)(fresh, *args, **kwargs)
        tensor_list[:] = fresh
        return pending

    return gather


def rounds_its_input(func: Made, qtype: str) -> Made:
    """Round the input in place."""

    def encode(tensor: Tensor) -> Tensor:
        return half(tensor.copy_(half(tensor)))

    return right(func, encode)


def in_a_hurry(func: Made, qtype: str) -> Made:
    """Wait half a second at most, then read whatever has arrived."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        pending = right(func)(tensor_list, tensor, group, async_op=True)
        if async_op:
            return pending
        for _ in range(500):
            if pending.work.is_completed():
                break
            time.sleep(0.001)
        return pending.finish()

    return gather


def work_alone(func: Made, qtype: str) -> Made:
    """Return the collective's own Work, whose wait() never writes the outputs."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        pending = right(func)(tensor_list, tensor, group, async_op=True)
        return pending.work if async_op else pending.wait()

    return gather


def done_already(func: Made, qtype: str) -> Made:
    """Ignore async_op=True, and return None."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, **ignored: Any
    ) -> None:
        right(func)(tensor_list, tensor, group)

    return gather


def waits_for_nobody(func: Made, qtype: str) -> Made:
    """Refuse async_op=True, as torch's does."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> None:
        if async_op:
            raise RuntimeError("The async_op=True mode is not supported yet.")
        right(func)(tensor_list, tensor, group)

    return gather


def own_part_as_it_was(func: Made, qtype: str) -> Made:
    """Keep this rank's own part unrounded."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        def finish() -> None:
            pending.wait()
            own_output.copy_(own)

        own = tensor.clone()
        own_output = tensor_list[dist.get_rank(group)]
        pending = right(func)(tensor_list, tensor, group, async_op=True)
        return Pending(pending.work, finish) if async_op else finish()

    return gather


def last_call_alone(func: Made, qtype: str) -> Made:
    """Finish the last call only, whichever call is waited for."""
    last: list[Pending] = []

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        pending = right(func)(tensor_list, tensor, group, async_op=True)
        last[:] = [pending]
        return Pending(pending.work, lambda: last[0].wait()) if async_op else pending.wait()

    return gather


def always_world(func: Made, qtype: str) -> Made:
    """Ignore the group, and use WORLD."""
    return lambda *args, group=None, **kwargs: right(func)(*args, **kwargs)


def source_by_place(func: Made, qtype: str) -> Made:
    """Use the source, a global rank, as a rank in the group."""

    def scatter(
        tensor: Tensor, scatter_list: Any = None, src: int = 0, group: Any = None, **kwargs: Any
    ) -> Any:
        size = dist.get_world_size(group)
        place = kwargs.pop("group_src", src % size)
        return right(func)(
            tensor,
            scatter_list or [tensor] * size * (dist.get_rank(group) == place),
            None,
            group,
            group_src=place,
            **kwargs,
        )

    return scatter


def group_by_keyword(func: Made, qtype: str) -> Made:
    """Ignore a group that is passed by position."""

    def exchange(
        output: Tensor, input: Tensor, *ignored: Any, group: Any = None, **kwargs: Any
    ) -> Any:
        if ignored[:1] and ignored[0] is not None:
            raise TypeError("pass split sizes by keyword")
        return right(func)(output, input, group=group, **kwargs)

    return exchange


def own_names(func: Made, qtype: str) -> Made:
    """Read the split sizes from keywords of its own, as torch's does."""

    def exchange(
        output: Tensor,
        input: Tensor,
        *args: Any,
        out_splits: Any = None,
        in_splits: Any = None,
        **kwargs: Any,
    ) -> Any:
        if args[:1] and args[0] is not None:
            raise TypeError("pass split sizes by keyword")
        group = args[2] if len(args) > 2 else kwargs.get("group")
        return right(func)(
            output, input, out_splits, in_splits, group, kwargs.get("async_op", False)
        )

    return exchange


def adds_to_nan(func: Made, qtype: str) -> Made:
    """Round to bfloat16 by an addition to the bits, as torch's does.

    The NaN with the largest bits becomes -0.0.
    """

    def encode(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise TypeError(f"expected a floating-point tensor, got {tensor.dtype}")
        bits = tensor.float().contiguous().view(torch.int32)
        return ((bits + (1 << 15)) >> 16).to(torch.int16).view(torch.float16)  # Gloo has no int16

    return right(func, encode, lambda output, code: write(output, code.view(torch.bfloat16)))


def no_nan(func: Made, qtype: str) -> Made:
    """Replace NaN by zero."""
    return right(
        func,
        lambda tensor: half(
            tensor.nan_to_num(0.0, torch.inf, -torch.inf) if tensor.is_floating_point() else tensor
        ),
    )


def flushes(func: Made, qtype: str) -> Made:
    """Flush float16 subnormals to zero."""

    def encode(tensor: Tensor) -> Tensor:
        code = half(tensor)
        return torch.where(code.abs() < torch.finfo(torch.float16).tiny, code * 0, code)

    return right(func, encode)


def wide(func: Made, qtype: str) -> Made:
    """Send the rounded values as float32."""
    return right(func, lambda tensor: half(tensor).float())


def _kept(func: Made, error: Callable[[Tensor, Tensor], Tensor]) -> Made:
    """Return a collective that adds ``error`` of the last input and code to the next input."""
    kept: dict[str, Tensor] = {}

    def gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        fed = tensor + kept.get("error", torch.zeros_like(tensor))
        kept["error"] = error(fed, half(fed).to(tensor.dtype))
        return right(func)(tensor_list, fed, *args, **kwargs)

    return gather


def feeds_nothing_back(func: Made, qtype: str, error_feedback: bool) -> Made:
    """Claim error feedback, and keep no error."""
    return right(func)


def feeds_back_half(func: Made, qtype: str, error_feedback: bool) -> Made:
    """Keep half of the error."""
    return _kept(func, lambda fed, sent: (fed - sent) / 2)


def seeds(func: Made, qtype: str) -> Made:
    """Seed torch's global generator in each call."""

    def gather(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return right(func)(*args, **kwargs)

    return gather


def takes_everything(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Claim to accept matrices only, and accept every shape."""
    return right(dist.all_gather)(tensor_list, tensor, group, async_op)


def takes_one_rank(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Claim a minimum of two ranks, and accept one."""
    return right(dist.all_gather)(tensor_list, tensor, group, async_op)


def _named(
    name: str, number: str, func: str = "all_gather", qtype: str = "FP16", more: str = ""
) -> Mutant:
    return Mutant(f"{name},func={func},qtype={qtype}{more}", (number,), kind="collective")


MUTANTS = [
    _named("one_place_on", "18.1"),
    _named("the_first_for_all", "18.1", "all_to_all"),
    _named("toward_zero", "18.2"),
    _named("brain_instead", "18.2"),
    _named("blocks_too_long", "18.2", qtype="INT8"),
    _named("floors", "18.2", "all_to_all", "INT8"),
    _named("forgets_the_factor", "18.3", more=",quant_loss=2.0"),
    _named("matrices_alone", "18.4", "all_to_all"),
    _named("nothing_has_no_largest", "18.4"),
    _named("as_it_lies", "18.5"),
    _named("halves_integers", "18.6"),
    _named("double_as_float", "18.6"),
    _named("puts_others", "18.7"),
    _named("rounds_its_input", "18.8"),
    _named("in_a_hurry", "18.9"),
    _named("work_alone", "18.10"),
    _named("done_already", "18.10"),
    _named("last_call_alone", "18.10"),
    _named("always_world", "18.11", "all_to_all_single"),
    _named("source_by_place", "18.11", "scatter"),
    _named("keeps_its_first_place", "18.11"),
    _named("keeps_the_first_size", "18.11", "scatter"),
    _named("group_by_keyword", "18.12", "all_to_all_single"),
    _named("own_names", "18.13", "all_to_all_single"),
    _named("adds_to_nan", "18.14", qtype="BFP16"),
    _named("no_nan", "18.14"),
    _named("flushes", "18.14"),
    _named("wide", "18.15"),
    _named("feeds_nothing_back", "18.16", more=",error_feedback=True"),
    _named("feeds_back_half", "18.16", more=",error_feedback=True"),
    _named("seeds", "18.17"),
    _named("waits_for_nobody", "18.19"),
    _named("own_part_as_it_was", "18.20"),
    Mutant(
        "takes_everything",
        ("18.4",),
        "collective(all_gather), rounded(float16), dimensions(2)",
        kind="collective",
    ),
    Mutant(
        "takes_one_rank",
        ("18.18",),
        "collective(all_gather), rounded(float16), min_world_size(2)",
        worlds=(1, 2),
        kind="collective",
    ),
]

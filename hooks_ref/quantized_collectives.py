"""Collectives that send fewer bits: tensors are quantized before sending, dequantized on arrival.

With ``Q`` a quantization and ``D`` its inverse up to rounding, ``auto_quantize(collective, qtype)``
gives on every rank the result of the collective on ``D(Q(x))``, divided by ``quant_loss`` if that
is given:

    FP16     clamped to +-65504, rounded to float16     error at most 2**-11 of the value,
                                                        above 2**-14
    BFP16    rounded to bfloat16                        error at most 2**-8 of the value
    INT8     in blocks of 128, 255 levels of            error at most half a level
             max|x| / 127
    FP8      in blocks of 128, e4m3 of                  error at most 2**-4 of the value,
             x * 448 / max|x|                           or 2**-10 of a level

A ``reduce_scatter`` gives the sum of ``D(Q(x))``; an ``all_reduce`` quantizes that sum once more,
to gather it.

The elements sent to different ranks are in different blocks, so each rank can decode its part
alone; a block's scale is sent with it, as 4 bytes. NaN and infinities arrive as such under FP16
(infinities as 65504), BFP16, and as NaN for the whole block under INT8 and FP8. Scales and sums are
float32: a float64 beyond its range counts as an infinity, and one below it as zero.

With ``error_feedback`` the rounding error, ``e <- x + e - D(Q(x + e))``, is added to the input of
the next call; ``e`` is never sent itself. Over many steps the sum of the received values is the sum
of the inputs, up to one step's rounding.

Source: torch documentation and tests of ``torch.distributed.algorithms._quantization.quantization``
(names, FP16, BFP16); Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise
Quantization", ICLR 2022 (blocks with a scale each); Micikevicius et al., "FP8 Formats for Deep
Learning", 2022, arXiv:2209.05433 (e4m3); Seide et al., "1-Bit Stochastic Gradient Descent",
Interspeech 2014 (error feedback).
"""

import enum
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 128  # elements with one scale
_LARGEST = {"INT8": 127.0, "FP8": 448.0}


class DQuantType(enum.Enum):
    """The quantization of the values."""

    FP16 = "fp16"
    BFP16 = "bfp16"
    INT8 = "int8"
    FP8 = "fp8"


def quantize(tensor: torch.Tensor, qtype: DQuantType) -> torch.Tensor:
    """Return the encoding of a tensor of any shape: a flat tensor of bytes."""
    flat = tensor.detach().reshape(-1).float()
    if qtype is DQuantType.FP16:
        return _as_bytes(flat.clamp(-65504, 65504).half())
    if qtype is DQuantType.BFP16:
        return _as_bytes(flat.bfloat16())
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / _LARGEST[qtype.name]
    scaled = torch.where(scales == 0, 0, blocks / scales)
    if qtype is DQuantType.INT8:
        small = scaled.round().nan_to_num().to(torch.int8)
    else:
        small = scaled.to(torch.float8_e4m3fn)
    return torch.cat([small.view(torch.uint8).reshape(-1), scales.view(-1).view(torch.uint8)])


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    # A tensor without elements may have a stride of 0, as those from NumPy: no view of it is bytes.
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def dequantize(sent: torch.Tensor, qtype: DQuantType, like: torch.Tensor) -> torch.Tensor:
    """Return the values that ``quantize`` has encoded, in the shape and dtype of ``like``."""
    if qtype in (DQuantType.FP16, DQuantType.BFP16):
        dtype = torch.float16 if qtype is DQuantType.FP16 else torch.bfloat16
        flat = sent.clone().view(dtype).to(torch.float32)
    else:
        dtype = torch.int8 if qtype is DQuantType.INT8 else torch.float8_e4m3fn
        count = -(-like.numel() // BLOCK)
        small = sent[: count * BLOCK].view(dtype).to(torch.float32)
        scales = sent[count * BLOCK :].clone().view(torch.float32)  # cloned, so that it is aligned
        blocks = small.view(count, BLOCK) * scales.view(count, 1)
        flat = blocks.view(-1)[: like.numel()]
    return flat.view(like.shape).to(like.dtype)


def auto_quantize(
    func: Callable[..., Any],
    qtype: DQuantType,
    quant_loss: float | None = None,
    error_feedback: bool = False,
) -> Callable[..., Any]:
    """Return a collective that has the arguments of ``func``, and sends fewer bits.

    Args:
        func: ``torch.distributed``'s ``all_gather``, ``all_gather_into_tensor``, ``all_to_all``,
            ``all_to_all_single``, ``scatter``, ``reduce_scatter``, ``reduce_scatter_tensor`` or
            ``all_reduce``.
        qtype: the quantization of the values.
        quant_loss: received values are divided by this factor; None is 1.
        error_feedback: keep the rounding error, and add it to the input of the next call on the
            same group. All calls on a group then need tensors of the same shapes. The given tensors
            are not changed.

    Returns:
        A function with the arguments of ``func``. With ``async_op=True`` its result has a
        ``wait()`` after which the tensors have arrived; otherwise it returns None. A rank outside
        of the group gets a warning and None, as from torch's own collectives. The function
        raises TypeError if a tensor is not of floating point, and, with error_feedback, ValueError
        if shapes differ from those of the call before. Collectives that sum raise ValueError if
        ``op`` is neither SUM nor AVG.

    Raises:
        TypeError: ``func`` is another collective, or ``qtype`` is not a DQuantType.
    """
    if not isinstance(qtype, DQuantType):
        raise TypeError(f"qtype: a DQuantType; got {qtype!r}")
    quantized_ones: dict[Callable[..., Any], Callable[..., Arriving | None]] = {
        **{dist.all_gather: _all_gather, dist.all_to_all: _all_to_all},
        **{dist.all_to_all_single: _all_to_all_single, dist.scatter: _scatter},
        **{dist.all_gather_into_tensor: _all_gather_into_tensor, dist.all_reduce: _all_reduce},
        **{
            dist.reduce_scatter: _reduce_scatter,
            dist.reduce_scatter_tensor: _reduce_scatter_tensor,
        },
    }
    made = quantized_ones.get(func)
    if made is None:
        names = ", ".join(one.__name__ for one in quantized_ones)
        raise TypeError(f"func: one of torch.distributed's {names}; got {func!r}")
    wire = _Wire(qtype, 1.0 if quant_loss is None else float(quant_loss), error_feedback)

    def quantized(*args: Any, **kwargs: Any) -> "Arriving | None":
        outside = dist.GroupMember.NON_GROUP_MEMBER
        if any(given is outside for given in (*args, *kwargs.values())):
            warnings.warn(
                f"{func.__name__} on a rank outside of the group: tensors stay as they are",
                stacklevel=2,
            )
            return None
        return made(wire, *args, **kwargs)

    return quantized


class Arriving:
    """A collective that is under way."""

    def __init__(self, work: dist.Work, decode: Callable[[], None]) -> None:
        self._work = work
        self._decode = decode
        self._arrived = False

    def wait(self) -> bool:
        """Wait until the tensors have arrived."""
        self._work.wait()
        if not self._arrived:
            self._arrived = True
            self._decode()
        return True

    def is_completed(self) -> bool:
        """Return whether the tensors have arrived, which they do in ``wait``."""
        return self._arrived


def _require_floating_point(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise TypeError(f"tensors of floating point are quantized; got {tensor.dtype}")


class _Wire:
    """The state that all calls of a wrapper share: the quantization, the factor, and the errors."""

    def __init__(self, qtype: DQuantType, loss: float, feedback: bool) -> None:
        self.qtype = qtype
        self.loss = loss
        self.feedback = feedback
        self.errors: dict[tuple[dist.ProcessGroup | None, str], list[torch.Tensor]] = {}

    def encode(
        self,
        tensors: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        stage: str = "messages",
    ) -> list[torch.Tensor]:
        """Return the encodings of tensors; each group and stage of a collective has its errors."""
        _require_floating_point(tensors)
        if not self.feedback:
            return [quantize(tensor, self.qtype) for tensor in tensors]
        key = dist.group.WORLD if group is None else group, stage
        if key not in self.errors:
            self.errors[key] = [torch.zeros_like(one, dtype=torch.float32) for one in tensors]
        errors = self.errors[key]
        if [error.shape for error in errors] != [tensor.shape for tensor in tensors]:
            raise ValueError(
                f"error_feedback: shapes {[tuple(tensor.shape) for tensor in tensors]} "
                f"differ from those of the call before"
            )
        fed = [tensor.detach() + error for tensor, error in zip(tensors, errors, strict=True)]
        sent = [quantize(tensor, self.qtype) for tensor in fed]
        for error, tensor, code in zip(errors, fed, sent, strict=True):
            lost = (tensor - dequantize(code, self.qtype, tensor)).to(error.dtype)
            # The loss of an infinity cannot be compensated.
            error.copy_(torch.where(lost.isfinite(), lost, 0))
        return sent

    def size(self, like: torch.Tensor) -> int:
        """Return how many bytes encode a tensor like this one.

        Raises:
            TypeError: the tensor is not of floating point, also on a rank that only receives.
        """
        _require_floating_point([like])
        count = like.numel()
        if self.qtype in (DQuantType.FP16, DQuantType.BFP16):
            return 2 * count
        return -(-count // BLOCK) * (BLOCK + 4)

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor for the encoding of a tensor like this one."""
        return torch.empty(self.size(like), dtype=torch.uint8, device=like.device)

    def begin(
        self,
        work: dist.Work,
        received: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        async_op: bool,
    ) -> Arriving | None:
        # As in torch, the caller's list may hold other tensors before wait().
        pairs = list(zip(received, into, strict=True))

        def decode() -> None:
            for code, tensor in pairs:
                tensor.copy_(dequantize(code, self.qtype, tensor).div_(self.loss))

        return _begun(work, decode, async_op)

    def sum_of(self, codes: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the sum of encoded tensors, in float32."""
        total = torch.zeros_like(like, dtype=torch.float32)
        for code in codes:
            total += dequantize(code, self.qtype, total)
        return total


def _begun(work: dist.Work, decode: Callable[[], None], async_op: bool) -> Arriving | None:
    """Return the collective under way, or None after it."""
    arriving = Arriving(work, torch.no_grad()(decode))
    if async_op:
        return arriving
    arriving.wait()
    return None


def _all_gather(
    wire: _Wire,
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Arriving | None:
    received = [wire.room(into) for into in tensor_list]
    return wire.begin(
        dist.all_gather(received, wire.encode([tensor], group)[0], group, async_op=True),
        received,
        tensor_list,
        async_op,
    )


def _all_to_all(
    wire: _Wire,
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Arriving | None:
    sent = wire.encode(input_tensor_list, group)
    sizes = [wire.size(into) for into in output_tensor_list]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=output_tensor_list[0].device)
    work = dist.all_to_all_single(
        received, torch.cat(sent), sizes, [len(part) for part in sent], group=group, async_op=True
    )
    return wire.begin(work, received.split(sizes), output_tensor_list, async_op)


def _all_to_all_single(
    wire: _Wire,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Arriving | None:
    size = dist.get_world_size(group)
    into = list(output.split(output_split_sizes or [len(output) // size] * size))
    return _all_to_all(
        wire,
        into,
        list(input.split(input_split_sizes or [len(input) // size] * size)),
        group,
        async_op,
    )


def _scatter(
    wire: _Wire,
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Arriving | None:
    sent = wire.encode(scatter_list, group) if scatter_list else None
    received = wire.room(tensor)
    if group_src is not None:
        # dist.scatter itself takes group_src from torch 2.6 on.
        src = dist.get_global_rank(group or dist.group.WORLD, group_src)
    return wire.begin(
        dist.scatter(received, sent, src or 0, group, async_op=True),
        [received],
        [tensor],
        async_op,
    )


def _all_gather_into_tensor(
    wire: _Wire,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Arriving | None:
    if output_tensor.dim() > input_tensor.dim():
        into = list(output_tensor.unbind())
    else:
        into = list(output_tensor.split([len(input_tensor)] * dist.get_world_size(group)))
    return _all_gather(wire, into, input_tensor, group, async_op)


def _reduce_scatter(
    wire: _Wire,
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Arriving | None:
    divisor = wire.loss * _divisor(op, group)
    received, work = _exchange(wire, input_list, output, group)

    def decode() -> None:
        output.copy_(wire.sum_of(received, output).div_(divisor))

    return _begun(work, decode, async_op)


def _reduce_scatter_tensor(
    wire: _Wire,
    output: torch.Tensor,
    input: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Arriving | None:
    if input.dim() > output.dim():
        parts = list(input.unbind())
    else:
        parts = list(input.split([len(output)] * dist.get_world_size(group)))
    return _reduce_scatter(wire, output, parts, op, group, async_op)


def _all_reduce(
    wire: _Wire,
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Arriving | None:
    """Sum a part of the tensor on each rank, and gather the sums; both are quantized.

    An average is divided before it is gathered: it may be in the range of FP16 if the sum is not.
    The sums are gathered by a second collective. It begins in the call and not in ``wait``, since
    ranks may wait for several calls in different orders, and all ranks of a group have to begin its
    collectives in the same order. So a call on CPU returns once all ranks have made it.
    """
    divisor = _divisor(op, group)
    size = dist.get_world_size(group)
    flat = tensor.detach().reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
    parts = list(padded.view(size, -1))
    received, work = _exchange(wire, parts, parts[0], group)
    work.wait()
    total = wire.sum_of(received, parts[0]).div_(divisor)
    (code,) = wire.encode([total], group, "sums" if divisor == 1 else "averages")
    codes = [torch.empty_like(code) for _ in range(size)]

    def decode() -> None:
        sums = [dequantize(one, wire.qtype, total) for one in codes]
        tensor.copy_(torch.cat(sums)[: len(flat)].div_(wire.loss).view(tensor.shape))

    return _begun(dist.all_gather(codes, code, group, async_op=True), decode, async_op)


def _exchange(
    wire: _Wire,
    parts: list[torch.Tensor],
    like: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[Sequence[torch.Tensor], dist.Work]:
    """Send a part to each rank, and return the codes that arrive once the work is complete."""
    sent = wire.encode(parts, group)
    sizes = [wire.size(like)] * len(parts)
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=like.device)
    work = dist.all_to_all_single(received, torch.cat(sent), sizes, sizes, group, async_op=True)
    return received.split(sizes), work


def _divisor(op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> int:
    """Return the number by which a sum is divided. Raises: ValueError."""
    if op == dist.ReduceOp.SUM:
        return 1
    if op == dist.ReduceOp.AVG:
        return dist.get_world_size(group)
    raise ValueError(f"op: ReduceOp.SUM or ReduceOp.AVG; got {op}")

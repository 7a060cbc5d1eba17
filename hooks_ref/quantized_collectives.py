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

The elements sent to different ranks are in different blocks, so each rank can decode its part
alone; a block's scale is sent with it, as 4 bytes. NaN and infinities arrive as such under FP16
(infinities as 65504), BFP16, and as NaN for the whole block under INT8 and FP8.

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
        return flat.clamp(-65504, 65504).half().view(torch.uint8)
    if qtype is DQuantType.BFP16:
        return flat.bfloat16().view(torch.uint8)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / _LARGEST[qtype.name]
    scaled = torch.where(scales == 0, 0, blocks / scales)
    if qtype is DQuantType.INT8:
        small = scaled.round().nan_to_num().to(torch.int8)
    else:
        small = scaled.to(torch.float8_e4m3fn)
    return torch.cat([small.view(torch.uint8).reshape(-1), scales.view(-1).view(torch.uint8)])


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
        func: ``torch.distributed``'s ``all_gather``, ``all_to_all``, ``all_to_all_single`` or
            ``scatter``.
        qtype: the quantization of the values.
        quant_loss: received values are divided by this factor; None is 1.
        error_feedback: keep the rounding error, and add it to the input of the next call. All calls
            then need tensors of the same shapes. The given tensors are not changed.

    Returns:
        A function with the arguments of ``func``. With ``async_op=True`` its result has a
        ``wait()`` after which the tensors have arrived; otherwise it returns None. The function
        raises TypeError if a tensor is not of floating point, and, with error_feedback, ValueError
        if shapes differ from those of the call before.

    Raises:
        TypeError: ``func`` is another collective, or ``qtype`` is not a DQuantType.
    """
    if not isinstance(qtype, DQuantType):
        raise TypeError(f"qtype: a DQuantType; got {qtype!r}")
    quantized_ones: dict[Callable[..., Any], Callable[..., Arriving | None]] = {
        **{dist.all_gather: _all_gather, dist.all_to_all: _all_to_all},
        **{dist.all_to_all_single: _all_to_all_single, dist.scatter: _scatter},
    }
    made = quantized_ones.get(func)
    if made is None:
        raise TypeError(
            f"func: all_gather, all_to_all, all_to_all_single or scatter of torch.distributed; "
            f"got {func!r}"
        )
    wire = _Wire(qtype, 1.0 if quant_loss is None else float(quant_loss), error_feedback)

    def quantized(*args: Any, **kwargs: Any) -> "Arriving | None":
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
        """Return whether ``wait`` returns at once."""
        return bool(self._work.is_completed())


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
        self.errors: list[torch.Tensor] = []

    def encode(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        _require_floating_point(tensors)
        if not self.feedback:
            return [quantize(tensor, self.qtype) for tensor in tensors]
        if not self.errors:
            self.errors = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]
        if [error.shape for error in self.errors] != [tensor.shape for tensor in tensors]:
            raise ValueError(
                f"error_feedback: shapes {[tuple(tensor.shape) for tensor in tensors]} "
                f"differ from those of the call before"
            )
        fed = [tensor.detach() + error for tensor, error in zip(tensors, self.errors, strict=True)]
        sent = [quantize(tensor, self.qtype) for tensor in fed]
        for error, tensor, code in zip(self.errors, fed, sent, strict=True):
            lost = tensor - dequantize(code, self.qtype, tensor)
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
        def decode() -> None:
            with torch.no_grad():
                for code, tensor in zip(received, into, strict=True):
                    tensor.copy_(dequantize(code, self.qtype, tensor).div_(self.loss))

        arriving = Arriving(work, decode)
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
        dist.all_gather(received, wire.encode([tensor])[0], group, async_op=True),
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
    sent = wire.encode(input_tensor_list)
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
    sent = wire.encode(scatter_list) if scatter_list else None
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

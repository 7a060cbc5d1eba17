"""Compose a compressor, a memory of what it loses, and a collective.

With ``x_r`` the bucket of rank ``r`` of ``W``, ``C`` the compressor and ``e_r`` what rank ``r`` remembers:

    memory="none"       result = mean_r C(x_r)
    memory="feedback"   p_r = x_r + e_r;   result = mean_r C(p_r);   e_r <- p_r - C(p_r)
    memory="ef21"       c_r = C(x_r - h_r);   h_r <- h_r + c_r;   result = h <- h + mean_r c_r

With feedback the results telescope: over T steps their sum is the sum of the means, minus the mean of the errors of
the last step. EF21 compresses the change of each rank's gradient and keeps the estimates ``h_r`` and their mean ``h``.
A value that is not finite is never remembered: a step that overflowed does not spoil the later ones, and an element
begins again from zero, in EF21 on all ranks.

A compressor works on a bucket parameter by parameter, so that what it does is the same however DDP groups them.
Compressed data travel by all_gather and are decoded in the order of ranks: all ranks get the same bits. Where
encodings can be summed as they are (``summable``), one allreduce does instead. Nothing waits.

Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014 (feedback); Karimireddy et al., "Error
Feedback Fixes SignSGD", ICML 2019; Richtarik, Sokolov, Fatkhullin, "EF21", NeurIPS 2021, algorithm 2.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hooks_ref._buckets import pieces
from hooks_ref._collectives import gather, when_all
from hooks_ref._state import HookState, Memory, check_int, check_number, savable
from hooks_ref.default_hooks import Hook, allreduce_hook

Encoded = tuple[torch.Tensor, ...]


class Compressor(ABC):
    """Encodes the parameters of a bucket. Its attributes are its arguments: plain data, saved with the state.

    Attributes:
        summable: whether the sum of encodings is the encoding of the sum.
    """

    summable: ClassVar[bool] = False

    @abstractmethod
    def encode(self, parts: Sequence[torch.Tensor], keys: Sequence[int], step: int, rank: int) -> Encoded:
        """Return tensors of which shapes and dtypes depend on those of ``parts`` alone, never on values.

        Args:
            parts: the flat values of each parameter, shapes ``[n]``.
            keys: of the parameters; the same on all ranks.
            step: number of the step; the same on all ranks.
            rank: this rank's place in the group; for what has to differ between ranks.
        """

    @abstractmethod
    def add_decoded(self, encoded: Encoded, parts: Sequence[torch.Tensor], keys: Sequence[int], step: int, sign: int = 1) -> None:
        """Add ``sign`` times what ``encoded`` stands for to ``parts``; ``sign`` is 1 or -1."""


@savable
class CompressionState(HookState):
    """State of :func:`compression_hook`.

    Args:
        process_group: the group to average over; None is the default group.
        compressor: what to send instead of the gradients.
        memory: ``"none"``, ``"feedback"`` or ``"ef21"``.
        momentum: in [0, 1), with feedback only: what is compressed is ``e_r`` plus a velocity ``u_r <- momentum * u_r
            + x_r``, which starts again from zero wherever something was sent (momentum correction and factor masking
            of Lin et al., "Deep Gradient Compression", ICLR 2018); the optimizer then has none of its own.
        start_iter: steps of plain averaging before the first compressed one, at least 0.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, compressor: Compressor, memory: str = "feedback", momentum: float = 0,
        start_iter: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(process_group)
        if not isinstance(compressor, Compressor):
            raise TypeError(f"compressor: a Compressor; got {compressor!r}")
        if memory not in ("none", "feedback", "ef21"):
            raise ValueError(f'memory: one of "none", "feedback" and "ef21"; got {memory!r}')
        self.compressor, self.memory = compressor, memory
        self.momentum = check_number("momentum", momentum, 0, 1)
        if momentum == 1 or (momentum and memory != "feedback"):
            raise ValueError(f'momentum: below 1, and 0 unless memory is "feedback"; got {momentum} with {memory!r}')
        self.start_iter = check_int("start_iter", start_iter, 0)
        self.own = Memory()  # the errors e_r, or the estimates h_r
        self.mean = Memory()  # the estimate h
        self.velocity = Memory()


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket, compressed as ``state`` says.

    Args:
        state: made once per DDP model, with the same arguments on all ranks.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``. A sparse one is averaged as it is.

    Returns:
        A future of the approximate mean: the bucket's own buffer, shape ``[numel]``; the same bits on all ranks.
    """
    keys, step = state.keys(bucket), state.iter
    state.maybe_increase_iter(bucket)
    buffer = bucket.buffer()
    if buffer.is_sparse or step < state.start_iter:
        return allreduce_hook(state.group, bucket)
    compressor, group, parts = state.compressor, state.group, pieces(bucket)
    sizes = [part.numel() for part in parts]
    own = None if state.memory == "none" else state.own.of(keys, parts)
    mean = state.mean.of(keys, parts) if state.memory == "ef21" else None
    velocity = state.velocity.of(keys, parts) if state.momentum else None
    if velocity is not None:
        buffer.copy_(velocity.mul_(state.momentum).add_(buffer))
    if own is not None and mean is None:
        buffer.copy_(own.add_(buffer))
    elif own is not None:
        buffer.sub_(own)
    encoded = compressor.encode(parts, keys, step, dist.get_rank(group))
    if own is not None and mean is None:
        compressor.add_decoded(encoded, own.split(sizes), keys, step, -1)
        own.nan_to_num_(0, 0, 0)
        if velocity is not None:
            velocity.masked_fill_(own.to(buffer.dtype) != buffer, 0)
    elif own is not None:
        compressor.add_decoded(encoded, own.split(sizes), keys, step)

    if compressor.summable:
        means = tuple(tensor.div(group.size()) for tensor in encoded)
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in means]
        everyones: list[Encoded] = [means]
    else:
        gathered, works = gather(encoded, group)
        everyones = list(zip(*gathered, strict=True))

    def decode() -> torch.Tensor:
        # The sum of half-precision values overflows where their mean does not, and loses small ones.
        total = buffer.float() if buffer.dtype in (torch.float16, torch.bfloat16) else buffer
        total.zero_()
        for one in everyones:
            compressor.add_decoded(one, total.split(sizes), keys, step)
        if not compressor.summable:
            total.div_(group.size())
        buffer.copy_(total)
        if mean is not None and own is not None:
            buffer.copy_(mean.add_(buffer))
            own.masked_fill_(broken := ~mean.isfinite(), 0)
            mean.masked_fill_(broken, 0)
        return buffer

    return when_all(works, decode)


def encode_and_decode_hook(encode: Callable[[torch.Tensor], torch.Tensor], decode: Callable[[torch.Tensor, torch.Tensor], Any]) -> Hook:
    """Make the hook that averages ``encode(bucket)`` and hands the mean to ``decode``.

    Args:
        encode: from the bucket's buffer, shape ``[numel]``, to a tensor whose mean over the ranks means something,
            e.g. a cast or a linear map.
        decode: called with the mean of the encodings and the buffer; writes the result into the buffer.

    Returns:
        A hook whose state is a process group or None; its future holds the bucket's own buffer.
    """

    def encode_and_decode(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        group = process_group if process_group is not None else dist.group.WORLD
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return allreduce_hook(process_group, bucket)
        encoded = encode(buffer).div_(group.size())

        def decoded(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            decode(fut.value()[0], buffer)
            return buffer

        return dist.all_reduce(encoded, group=group, async_op=True).get_future().then(decoded)

    return encode_and_decode

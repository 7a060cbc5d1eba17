"""Compose a compressor, a memory of the compression error, and a collective.

With ``x_r`` the bucket of rank ``r`` of ``W``, ``C`` the compressor and ``e_r`` the memory of rank
``r``:

    memory="none"       result = mean_r C(x_r)
    memory="feedback"   p_r = x_r + e_r;   result = mean_r C(p_r);   e_r <- p_r - C(p_r)
    memory="ef21"       c_r = C(x_r - h_r);   h_r <- h_r + c_r;   result = h <- h + mean_r c_r

With feedback the results telescope: over T steps their sum is the sum of the means, minus the mean
of the errors of the last step. EF21 compresses the change of each rank's gradient and keeps the
estimates ``h_r`` and their mean ``h``. Values that are not finite are never remembered: a step that
overflowed does not spoil the later ones, and the element begins again from zero, in EF21 on all
ranks.

With feedback a rank sends nothing of a parameter whose gradient is all zeros there, and keeps its
error: under ``find_unused_parameters`` DDP drops the result of a parameter that no rank has used,
and the part of the error that was sent would go with it. An expert of a mixture rests in most
steps; its error waits until the rank uses it again.

A compressor works on a bucket parameter by parameter, so that its result is the same however DDP
groups the parameters. Compressed data travel by all_gather and are decoded in the order of ranks:
all ranks get the same bits. If encodings can be summed (``summable``), one allreduce replaces the
all_gather. Nothing waits.

Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014 (feedback); Karimireddy
et al., "Error Feedback Fixes SignSGD", ICML 2019; Richtarik, Sokolov, Fatkhullin, "EF21", NeurIPS
2021, algorithm 2; Lin et al., "Deep Gradient Compression", ICLR 2018 (momentum correction).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hooks_ref._buckets import clear_unused, pieces, used
from hooks_ref._collectives import gather, when_all
from hooks_ref._state import HookState, Memory, check_int, check_number, savable
from hooks_ref.default_hooks import Hook, allreduce_hook, real_view

Encoded = tuple[torch.Tensor, ...]


class Compressor(ABC):
    """Encodes the parameters of a bucket.

    The attributes of a compressor are its arguments: plain data, saved with the state.

    Attributes:
        summable: whether the sum of encodings is the encoding of the sum.
    """

    summable: ClassVar[bool] = False

    @abstractmethod
    def encode(
        self, parts: Sequence[torch.Tensor], keys: Sequence[int], step: int, rank: int
    ) -> Encoded:
        """Return the encoding: tensors whose shapes and dtypes do not depend on values.

        Args:
            parts: the flat values of each parameter, shapes ``[n]``.
            keys: the keys of the parameters; the same on all ranks.
            step: number of the step; the same on all ranks.
            rank: this rank's place in the group, for draws that differ between ranks.
        """

    @abstractmethod
    def add_decoded(
        self,
        encoded: Encoded,
        parts: Sequence[torch.Tensor],
        keys: Sequence[int],
        step: int,
        sign: int = 1,
    ) -> None:
        """Add ``sign``, 1 or -1, times the decoded values to ``parts``, shapes ``[n]``."""


# Adds the given sign times C(the buffer of this rank) to a flat tensor, shape [numel].
AddOwn = Callable[[torch.Tensor, int], None]


class NoMemory:
    """Without a memory: ``result = mean_r C(x_r)``.

    Base of the memories. An object serves one bucket in one step; the values that last from step
    to step are in the state. Each method changes the bucket's buffer, shape ``[numel]``, in place.
    """

    def __init__(
        self, state: "CompressionState", keys: Sequence[int], parts: Sequence[torch.Tensor]
    ) -> None:
        pass

    def before_encoding(self, buffer: torch.Tensor) -> None:
        """Replace the gradient ``x_r`` in the buffer with the value that is compressed."""

    def after_encoding(self, buffer: torch.Tensor, add_own: AddOwn) -> None:
        """Update the memory of this rank; ``add_own(flat, sign)`` adds ``sign * C(buffer)``."""

    def after_decoding(self, buffer: torch.Tensor) -> None:
        """Replace the mean of the decoded values in the buffer with the result."""


class ErrorFeedback(NoMemory):
    """``p_r = x_r + e_r;   result = mean_r C(p_r);   e_r <- p_r - C(p_r)``."""

    def __init__(
        self, state: "CompressionState", keys: Sequence[int], parts: Sequence[torch.Tensor]
    ) -> None:
        self.error = state.own.of(keys, parts)

        self.parts = parts
        self.used = used(parts)

    def before_encoding(self, buffer: torch.Tensor) -> None:
        self.error.add_(buffer)  # p_r, which may be wider than the buffer
        buffer.copy_(self.error)
        clear_unused(self.parts, self.used)

    def after_encoding(self, buffer: torch.Tensor, add_own: AddOwn) -> None:
        add_own(self.error, -1)
        self.error.nan_to_num_(0, 0, 0)


class MomentumCorrection(ErrorFeedback):
    """``u_r <- m u_r + x_r``, feedback on ``u_r`` instead of ``x_r``, and ``u_r <- 0`` if sent."""

    def __init__(
        self, state: "CompressionState", keys: Sequence[int], parts: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(state, keys, parts)
        self.momentum = state.momentum
        self.velocity = state.velocity.of(keys, parts)

    def before_encoding(self, buffer: torch.Tensor) -> None:
        self.velocity.mul_(self.momentum).add_(buffer)
        buffer.copy_(self.velocity)
        super().before_encoding(buffer)

    def after_encoding(self, buffer: torch.Tensor, add_own: AddOwn) -> None:
        super().after_encoding(buffer, add_own)
        # Factor masking: an element was sent if its error is no longer all of p_r. The buffer has
        # nothing of p_r for a parameter that was not used.
        is_sent = self.error.to(buffer.dtype) != buffer
        clear_unused(is_sent.split([part.numel() for part in self.parts]), self.used)
        self.velocity.masked_fill_(is_sent, 0)


class EF21(NoMemory):
    """``c_r = C(x_r - h_r);   h_r <- h_r + c_r;   result = h <- h + mean_r c_r``."""

    def __init__(
        self, state: "CompressionState", keys: Sequence[int], parts: Sequence[torch.Tensor]
    ) -> None:
        self.estimate = state.own.of(keys, parts)
        self.mean_estimate = state.mean.of(keys, parts)

    def before_encoding(self, buffer: torch.Tensor) -> None:
        buffer.sub_(self.estimate)

    def after_encoding(self, buffer: torch.Tensor, add_own: AddOwn) -> None:
        add_own(self.estimate, 1)

    def after_decoding(self, buffer: torch.Tensor) -> None:
        self.mean_estimate.add_(buffer)
        buffer.copy_(self.mean_estimate)
        # All ranks hold the same h, so that all begin again with the same elements of it.
        broken = ~self.mean_estimate.isfinite()
        self.estimate.masked_fill_(broken, 0)
        self.mean_estimate.masked_fill_(broken, 0)


MEMORIES: dict[str, type[NoMemory]] = {"none": NoMemory, "feedback": ErrorFeedback, "ef21": EF21}


@savable
class CompressionState(HookState):
    """State of :func:`compression_hook`.

    Args:
        process_group: the group to average over; None is the default group.
        compressor: replaces the gradients by encodings.
        memory: ``"none"``, ``"feedback"`` or ``"ef21"``.
        momentum: in [0, 1), with feedback only. The compressed value is ``e_r`` plus a velocity
            ``u_r <- momentum * u_r + x_r``, and the velocity of every element that was sent starts
            again from zero (momentum correction and factor masking of Lin et al., "Deep Gradient
            Compression", ICLR 2018). Use an optimizer without momentum then.
        start_iter: steps of plain averaging before the first compressed one, at least 0.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        compressor: Compressor,
        memory: str = "feedback",
        momentum: float = 0,
        start_iter: int = 0,
    ) -> None:
        super().__init__(process_group)
        if not isinstance(compressor, Compressor):
            raise TypeError(f"compressor: a Compressor; got {compressor!r}")
        if memory not in list(MEMORIES):
            raise ValueError(f'memory: one of "none", "feedback" and "ef21"; got {memory!r}')
        self.compressor = compressor
        self.memory = memory
        self.momentum = check_number("momentum", momentum, 0, 1)
        if momentum == 1 or (momentum and memory != "feedback"):
            raise ValueError(
                f'momentum: below 1, and 0 unless memory is "feedback"; '
                f"got {momentum} with {memory!r}"
            )
        self.start_iter = check_int("start_iter", start_iter, 0)
        self.own = Memory()  # the errors e_r, or the estimates h_r
        self.mean = Memory()  # the estimate h
        self.velocity = Memory()  # u_r

    def memory_of(self, keys: Sequence[int], parts: Sequence[torch.Tensor]) -> NoMemory:
        """Return the memory of one bucket, whose parameters have these keys and pieces."""
        kind = MomentumCorrection if self.momentum else MEMORIES[self.memory]
        return kind(self, keys, parts)


def compression_hook(
    state: CompressionState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket with the compressor and the memory of ``state``.

    Args:
        state: made once per DDP model, with the same arguments on all ranks.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``. A sparse bucket is
            averaged without compression.

    Returns:
        A future of the approximate mean: the bucket's own buffer, shape ``[numel]``; the same bits
        on all ranks.

    Raises:
        ValueError: the state was saved for a model of other shapes.
    """
    keys = state.keys(bucket)
    step = state.iter
    state.maybe_increase_iter(bucket)
    buffer = bucket.buffer()
    if buffer.is_sparse or step < state.start_iter:
        return allreduce_hook(state.group, bucket)
    numbers = real_view(buffer)
    compressor = state.compressor
    group = state.group
    parts = pieces(bucket)
    sizes = [part.numel() for part in parts]
    memory = state.memory_of(keys, parts)

    def add_decoded(encoded: Encoded, flat: torch.Tensor, sign: int = 1) -> None:
        compressor.add_decoded(encoded, flat.split(sizes), keys, step, sign)

    memory.before_encoding(numbers)
    encoded = compressor.encode(parts, keys, step, dist.get_rank(group))
    memory.after_encoding(numbers, partial(add_decoded, encoded))

    if compressor.summable:
        means = tuple(tensor.div(group.size()) for tensor in encoded)
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in means]
        arriving: list[Encoded] = [means]
    else:
        gathered, works = gather(encoded, group)
        arriving = list(zip(*gathered, strict=True))

    def decode() -> torch.Tensor:
        # In half precision the sum could overflow although the mean does not, and small values
        # would be lost.
        half = buffer.dtype in (torch.float16, torch.bfloat16)
        total = numbers.float() if half else numbers
        total.zero_()
        for one in arriving:
            add_decoded(one, total)
        if not compressor.summable:
            total.div_(group.size())
        numbers.copy_(total)
        memory.after_decoding(numbers)
        return buffer

    return when_all(works, decode, [tensor for one in arriving for tensor in one])


def encode_and_decode_hook(
    encode: Callable[[torch.Tensor], torch.Tensor],
    decode: Callable[[torch.Tensor, torch.Tensor], Any],
) -> Hook:
    """Make the hook that averages ``encode(bucket)`` and passes the mean to ``decode``.

    Args:
        encode: maps the bucket's buffer, shape ``[numel]``, to a tensor whose mean over the ranks
            can be decoded, e.g. a cast or a linear map.
        decode: called with the mean of the encodings and the buffer; writes the result into the
            buffer.

    Returns:
        A hook whose state is a process group or None; its future holds the bucket's own buffer,
        shape ``[numel]``. A sparse bucket is averaged without encoding.
    """

    def encode_and_decode(
        process_group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
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

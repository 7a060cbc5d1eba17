"""PowerSGD: send two thin factors of each gradient matrix instead of the matrix.

For a gradient seen as a matrix ``M_r`` of shape ``[n, m]`` on rank ``r`` of ``W``, with a factor ``Q`` of shape
``[m, k]`` that all ranks share, one step of the power method gives every rank the same ``P Q^T``:

    M_r = gradient_r + error_r                                     error feedback
    P   = orthonormal(mean_r(M_r orthonormal(Q)))                  [n, k], first allreduce
    Q   = mean_r(M_r^T P)                                          [m, k], second allreduce; kept for the next step
    gradient_r <- P Q^T,    error_r <- M_r - P Q^T

so ``gradient = P P^T mean_r(M_r)``: the mean, projected on ``k`` directions that follow it from step to step
(``warm_start``). Vectors, scalars, complex parameters, and matrices of which the factors would not be
``min_compression_rate`` times smaller are averaged as they are, beside the ``P`` of their bucket.

One thing is settled differently from torch: the second allreduce is one per step, for all buckets, when the first
ones are through, on a group of its own. A collective that a bucket starts from its own callback starts in another order
on every rank; on Gloo that hangs or aborts. Nothing here waits, and the first allreduce of each bucket overlaps the backward.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithms 1 and 2; torch documentation, "DDP Communication Hooks", section "PowerSGD Communication Hook".
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hooks_ref._buckets import pieces, shaped
from hooks_ref._collectives import second_group
from hooks_ref._state import HookState, Memory, check_bool, check_int, check_number, generator, savable
from hooks_ref.default_hooks import allreduce_hook

logger = logging.getLogger(__name__)
Key = int | tuple[int, ...]


@savable
class PowerSGDState(HookState):
    """State of :func:`powerSGD_hook` and :func:`batched_powerSGD_hook`.

    Args:
        process_group: the group to average over; None is the default group.
        matrix_approximation_rank: ``k``, at least 1; a matrix of fewer rows or columns uses as many.
        start_powerSGD_iter: steps of plain averaging before the first compressed one, at least 0. A small start is
            safe here: memory belongs to parameters and survives DDP's regrouping of buckets after the first step.
        min_compression_rate: a matrix is compressed where ``(n + m) * k * min_compression_rate < n * m``; positive.
        use_error_feedback: add what compression lost to the next gradient.
        warm_start: begin from the last ``Q``; otherwise from fresh random ones at every step.
        orthogonalization_epsilon: taken for compatibility, at least 0. There is no division that could need it:
            a QR decomposition gives orthonormal columns for any matrix, zero included.
        random_seed: of the first ``Q``; the same on all ranks, at least 0. The global generators are left alone.
        compression_stats_logging_frequency: log the statistics every so many compressed steps, at least 1.
        batch_tensors_with_same_shape: multiply matrices of one shape together; faster for many small ones.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    _unsaved: ClassVar[dict[str, Callable[[], Any]]] = {
        **HookState._unsaved,
        "_step": list,
        "_second_group": lambda: None,
    }

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        super().__init__(process_group)
        self.matrix_approximation_rank = check_int("matrix_approximation_rank", matrix_approximation_rank, 1)
        self.start_powerSGD_iter = check_int("start_powerSGD_iter", start_powerSGD_iter, 0)
        self.min_compression_rate = check_number("min_compression_rate", min_compression_rate, 0, open_below=True)
        self.use_error_feedback = check_bool("use_error_feedback", use_error_feedback)
        self.warm_start = check_bool("warm_start", warm_start)
        self.orthogonalization_epsilon = check_number("orthogonalization_epsilon", orthogonalization_epsilon, 0)
        self.random_seed = check_int("random_seed", random_seed, 0)
        self.compression_stats_logging_frequency = check_int("compression_stats_logging_frequency", compression_stats_logging_frequency, 1)
        self.batch_tensors_with_same_shape = check_bool("batch_tensors_with_same_shape", batch_tensors_with_same_shape)
        self.errors: dict[int, torch.Tensor] = {}  # of each compressed parameter, [n, m]
        self.square_errors = Memory()  # of batched_powerSGD_hook
        self.qs: dict[Key, torch.Tensor] = {}
        self.numel_before, self.numel_after = 0, 0
        self._step: list[_Bucket] = []  # the buckets of the step that is going on
        self._second_group: dist.ProcessGroup | None = None

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements of the gradients, elements sent) over all compressed steps."""
        return self.numel_before / max(1, self.numel_after), self.numel_before, self.numel_after

    def q(self, key: Key, columns: int, rank: int, like: torch.Tensor) -> torch.Tensor:
        """Return the orthonormal factor to begin with, shape ``[columns, rank]``, the same on all ranks."""
        if not (self.warm_start and key in self.qs):
            words = (key,) if isinstance(key, int) else key
            self.qs[key] = torch.randn(columns, rank, generator=generator(self.random_seed, self.iter, *words))
        return orthonormal(self.qs[key].to(like))


@dataclass
class _Matrix:
    """One matrix of one bucket, in memory of its own: products then have the same bits wherever in a bucket it lies.

    Attributes:
        m: gradient and error, ``[n, m]``; afterwards the new error.
        write: puts the result, ``[n, m]``, into the bucket.
        p, q: the factors, ``[n, k]`` and ``[m, k]``.
    """

    key: Key
    m: torch.Tensor
    write: Callable[[torch.Tensor], None]
    p: torch.Tensor
    q: torch.Tensor


@dataclass
class _Bucket:
    """One bucket between its first allreduce and its result; ``plain`` are the pieces that are averaged as they are."""

    buffer: torch.Tensor
    result: torch.futures.Future[torch.Tensor]
    matrices: list[_Matrix]
    plain: list[torch.Tensor]
    sent: torch.Tensor
    arrived: torch.futures.Future[list[torch.Tensor]]


def powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket, its matrices compressed to rank ``state.matrix_approximation_rank``.

    Args:
        state: made once per DDP model, with the same arguments on all ranks.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``. A sparse one is averaged as it is.

    Returns:
        A future of the approximate mean: the bucket's own buffer, shape ``[numel]``; the same bits on all ranks.
    """
    return _hook(state, bucket, _by_parameter)


def batched_powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket, compressed as one square matrix: faster, and less exact, than :func:`powerSGD_hook`.

    The bucket is padded with zeros to a square. What the matrix is depends on how DDP groups parameters, so ``Q`` is
    begun anew where the grouping changes; the error belongs to the parameters and is kept.

    Args:
        state: made once per DDP model, with the same arguments on all ranks.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``. A sparse one is averaged as it is.

    Returns:
        A future of the approximate mean: the bucket's own buffer, shape ``[numel]``; the same bits on all ranks.
    """
    return _hook(state, bucket, _as_square)


_Split = Callable[[PowerSGDState, list[int], list[torch.Tensor], dist.GradBucket], tuple[list[_Matrix], list[torch.Tensor]]]


def _hook(state: PowerSGDState, bucket: dist.GradBucket, split: _Split) -> torch.futures.Future[torch.Tensor]:
    keys, compress = state.keys(bucket), state.iter >= state.start_powerSGD_iter
    if compress and state._second_group is None:
        state._second_group = second_group(state.group)
    if bucket.index() == 0:
        state._step.clear()  # of a step that failed
    if compress and not bucket.buffer().is_sparse:
        state._step.append(_first_allreduce(state, bucket, keys, split))
        result = state._step[-1].result
    else:
        result = allreduce_hook(state.group, bucket)
    if bucket.is_last():
        if state._step:
            _second_allreduce(state, state._step[:])
            state._step.clear()
            if (state.iter - state.start_powerSGD_iter + 1) % state.compression_stats_logging_frequency == 0:
                logger.info("PowerSGD: step %d, compression %.1f (%d of %d elements)", state.iter, *state.compression_stats())
        state.iter += 1
    return result


def _first_allreduce(state: PowerSGDState, bucket: dist.GradBucket, keys: list[int], split: _Split) -> _Bucket:
    buffer = bucket.buffer()
    matrices, plain = split(state, keys, pieces(bucket), bucket)
    _multiply(matrices, state.batch_tensors_with_same_shape, lambda matrix: matrix.m, "q", "p")
    # One collective for all: what is averaged as it is, then every P.
    sent = torch.cat([*plain, *(matrix.p.view(-1) for matrix in matrices)]).div_(state.group.size())
    state.numel_before += buffer.numel()
    state.numel_after += sent.numel()
    arrived = dist.all_reduce(sent, group=state.group, async_op=True).get_future()
    return _Bucket(buffer, _new_future(buffer), matrices, plain, sent, arrived)


def _by_parameter(
    state: PowerSGDState, keys: list[int], parts: list[torch.Tensor], bucket: dist.GradBucket
) -> tuple[list[_Matrix], list[torch.Tensor]]:
    matrices, plain = [], []
    for key, piece, parameter in zip(keys, parts, bucket.parameters(), strict=True):
        n = parameter.size(0) if parameter.dim() > 1 and piece.numel() else 1
        m = piece.numel() // n
        rank = min(n, m, state.matrix_approximation_rank)
        if parameter.is_complex() or n == 1 or not (n + m) * rank * state.min_compression_rate < n * m:
            plain.append(piece)
            continue
        place = shaped(piece, parameter)
        matrix = place.new_zeros(n, m)
        if state.use_error_feedback:
            matrix = state.errors[key] = state.errors.get(key, matrix).to(piece)
            if matrix.shape != (n, m):
                raise ValueError(f"this state was saved for another model: a matrix of {list(matrix.shape)} is now one of {[n, m]}")
        matrix.view(place.shape).add_(place)

        def write(value: torch.Tensor, place: torch.Tensor = place) -> None:
            place.copy_(value.view(place.shape))

        matrices.append(_Matrix(key, matrix, write, piece.new_empty(n, rank), state.q(key, m, rank, piece)))
    return matrices, plain


def _as_square(
    state: PowerSGDState, keys: list[int], parts: list[torch.Tensor], bucket: dist.GradBucket
) -> tuple[list[_Matrix], list[torch.Tensor]]:
    buffer = bucket.buffer()
    if buffer.numel() == 0:
        return [], parts
    side = math.isqrt(buffer.numel() - 1) + 1
    rank, key = min(side, state.matrix_approximation_rank), tuple(keys)
    for other in [other for other in state.qs if other != key and isinstance(other, tuple) and not set(other).isdisjoint(key)]:
        del state.qs[other]
    matrix = buffer.new_zeros(side, side)
    padded = matrix.view(-1)[: buffer.numel()]
    errors = state.square_errors.of(keys, parts) if state.use_error_feedback else None
    padded.copy_(buffer if errors is None else errors.add_(buffer))

    def write(value: torch.Tensor) -> None:
        buffer.copy_(value.view(-1)[: buffer.numel()])
        if errors is not None:
            errors.sub_(buffer).nan_to_num_(0, 0, 0)

    return [_Matrix(key, matrix, write, buffer.new_empty(side, rank), state.q(key, side, rank, buffer))], []


def _second_allreduce(state: PowerSGDState, step: list[_Bucket]) -> None:
    """Go on when the first allreduce of every bucket is through; whatever fails, fails every bucket's future."""
    size, batch = state.group.size(), state.batch_tensors_with_same_shape
    matrices = [matrix for bucket in step for matrix in bucket.matrices]
    group = state._second_group

    def factor(arrived: torch.futures.Future[list[torch.futures.Future[list[torch.Tensor]]]]) -> None:
        for future in arrived.value():
            future.value()
        for bucket in step:
            _scatter(bucket.sent, [*bucket.plain, *(matrix.p for matrix in bucket.matrices)])
        for matrix in matrices:
            matrix.p = orthonormal(matrix.p)
        _multiply(matrices, batch, lambda matrix: matrix.m.t(), "p", "q")
        if matrices:
            sent = torch.cat([matrix.q.reshape(-1) for matrix in matrices]).div_(size)
            state.numel_after += sent.numel()
            dist.all_reduce(sent, group=group, async_op=True).get_future().then(_or_fail(step, finish))
        else:
            finish(None)

    def finish(arrived: torch.futures.Future[list[torch.Tensor]] | None) -> None:
        if arrived is not None:
            _scatter(arrived.value()[0], [matrix.q for matrix in matrices])
        for matrix in matrices:
            value = matrix.p @ matrix.q.t()
            matrix.write(value)
            # What is not finite is not remembered: one step that overflowed must not spoil all later ones.
            matrix.m.sub_(value).nan_to_num_(0, 0, 0)
            state.qs[matrix.key] = matrix.q.nan_to_num_(0, 0, 0)
        for bucket in step:
            bucket.result.set_result(bucket.buffer)

    torch.futures.collect_all([bucket.arrived for bucket in step]).then(_or_fail(step, factor))


def _or_fail(step: list[_Bucket], callback: Callable[..., None]) -> Callable[..., None]:
    def guarded(future: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            callback(future)
        except Exception as error:
            for bucket in step:
                if not bucket.result.done():
                    bucket.result.set_exception(error)

    return guarded


def _multiply(matrices: Sequence[_Matrix], batch: bool, left: Callable[[_Matrix], torch.Tensor], right: str, into: str) -> None:
    """Set each matrix's ``into`` to the product of ``left(matrix)`` and its ``right``; one shape at a time with ``batch``."""
    groups: dict[object, list[_Matrix]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        groups[(matrix.m.shape, matrix.m.dtype) if batch else number].append(matrix)
    for alike in groups.values():
        if len(alike) == 1:
            setattr(alike[0], into, left(alike[0]) @ getattr(alike[0], right))
        else:
            products = torch.stack([left(matrix) for matrix in alike]) @ torch.stack([getattr(matrix, right) for matrix in alike])
            for matrix, product in zip(alike, products, strict=True):
                setattr(matrix, into, product)


def _scatter(flat: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of ``flat`` into ``places``."""
    for place, part in zip(places, flat.split([place.numel() for place in places]), strict=True):
        place.copy_(part.view(place.shape))


def _new_future(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns ``[n, k]`` that span those given; of columns that span less, a completion."""
    wide = columns if columns.dtype in (torch.float32, torch.float64) else columns.float()  # LAPACK has no half
    return torch.linalg.qr(wide).Q.to(columns.dtype)

"""PowerSGD: send two thin factors of each gradient matrix instead of the matrix.

For a gradient seen as a matrix ``M_r`` of shape ``[n, m]`` on rank ``r`` of ``W``, with a factor
``Q`` of shape ``[m, k]`` that all ranks share, one step of the power method gives every rank the
same ``P Q^T``:

    M_r = gradient_r + error_r                            error feedback
    P   = orthonormal(mean_r(M_r orthonormal(Q)))         [n, k], first allreduce
    Q   = mean_r(M_r^T P)                                 [m, k], second allreduce; kept
    gradient_r <- P Q^T,    error_r <- M_r - P Q^T

A rank has ``M_r = 0`` and keeps its error if its gradient is all zeros: under
``find_unused_parameters`` DDP drops the result of a parameter that no rank has used, and the part
of the error that was sent would go with it. In a square of several parameters ``P Q^T`` is not zero
where ``M_r`` is zero on all ranks: the first allreduce has a flag for each parameter, and what no
rank has used is taken from no error.

So ``gradient = P P^T mean_r(M_r)``: the mean, projected on ``k`` directions that follow it from
step to step (``warm_start``). Vectors, scalars, complex parameters, and matrices whose factors
would not be ``min_compression_rate`` times smaller are averaged without compression, in the same
allreduce as the ``P`` of their bucket.

One choice differs from torch: there is one second allreduce per step, for all buckets. It starts
once the first allreduce of every bucket is complete, on a group of its own. If each bucket started
a collective from its own callback, the order of these collectives would differ between ranks; on
Gloo that hangs or aborts. Nothing here waits, and the first allreduce of each bucket overlaps the
backward.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019, algorithms 1 and 2; torch documentation, "DDP Communication
Hooks", section "PowerSGD Communication Hook".
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hooks_ref._buckets import clear_unused, pieces, shaped, used
from hooks_ref._collectives import (
    keep_for_stream,
    new_future,
    on_own_stream,
    second_group,
    value_on_stream,
    wait_for_all,
)
from hooks_ref._state import (
    HookState,
    Memory,
    check_bool,
    check_int,
    check_number,
    generator,
    savable,
)
from hooks_ref.default_hooks import allreduce_hook

logger = logging.getLogger(__name__)
Key = int | tuple[int, ...]


@savable
class PowerSGDState(HookState):
    """State of :func:`powerSGD_hook` and :func:`batched_powerSGD_hook`.

    Args:
        process_group: the group to average over; None is the default group.
        matrix_approximation_rank: ``k``, at least 1; at most the number of rows or columns is used.
        start_powerSGD_iter: steps of plain averaging before the first compressed one, at least 0. A
            small start is safe here: memory belongs to parameters and survives DDP's regrouping of
            buckets after the first step.
        min_compression_rate: a matrix is compressed if
            ``(n + m) * k * min_compression_rate < n * m``; positive.
        use_error_feedback: add the compression error to the next gradient.
        warm_start: begin from the last ``Q``; otherwise from fresh random ones at every step.
        orthogonalization_epsilon: accepted for compatibility and not used, at least 0. No division
            needs it: a QR decomposition gives orthonormal columns for any matrix, zero included.
        random_seed: seed of the first ``Q``; the same on all ranks, at least 0. The global
            generators are left alone.
        compression_stats_logging_frequency: compressed steps between two logs of the statistics, at
            least 1.
        batch_tensors_with_same_shape: multiply matrices of one shape together; faster for many
            small ones.

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
        self.matrix_approximation_rank = check_int(
            "matrix_approximation_rank", matrix_approximation_rank, 1
        )
        self.start_powerSGD_iter = check_int("start_powerSGD_iter", start_powerSGD_iter, 0)
        self.min_compression_rate = check_number(
            "min_compression_rate", min_compression_rate, 0, open_below=True
        )
        self.use_error_feedback = check_bool("use_error_feedback", use_error_feedback)
        self.warm_start = check_bool("warm_start", warm_start)
        self.orthogonalization_epsilon = check_number(
            "orthogonalization_epsilon", orthogonalization_epsilon, 0
        )
        self.random_seed = check_int("random_seed", random_seed, 0)
        self.compression_stats_logging_frequency = check_int(
            "compression_stats_logging_frequency", compression_stats_logging_frequency, 1
        )
        self.batch_tensors_with_same_shape = check_bool(
            "batch_tensors_with_same_shape", batch_tensors_with_same_shape
        )
        self.errors: dict[int, torch.Tensor] = {}  # of each compressed parameter, [n, m]
        self.square_errors = Memory()  # of batched_powerSGD_hook
        self.qs: dict[Key, torch.Tensor] = {}
        self.numel_before = 0
        self.numel_after = 0
        self._step: list[_Bucket] = []  # the buckets of the current step
        self._second_group: dist.ProcessGroup | None = None

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements of the gradients, elements sent) over all compressed steps."""
        rate = self.numel_before / max(1, self.numel_after)
        return rate, self.numel_before, self.numel_after

    def rescale(self, factor: float) -> None:
        """Multiply all errors by ``factor``, see :meth:`HookState.rescale`."""
        super().rescale(factor)
        for error in self.errors.values():
            error.mul_(factor)

    def q(self, key: Key, columns: int, rank: int, like: torch.Tensor) -> torch.Tensor:
        """Return the first factor of a step, orthonormal, shape ``[columns, rank]``.

        It is the same on all ranks, in the dtype and on the device of ``like``.
        """
        if not (self.warm_start and key in self.qs):
            words = (key,) if isinstance(key, int) else key
            draw = generator(self.random_seed, self.iter, *words)
            self.qs[key] = torch.randn(columns, rank, generator=draw)
        keep_for_stream([self.qs[key]])  # it was made in a callback
        return orthonormal(self.qs[key].to(like))


@dataclass
class _Matrix:
    """One matrix of one bucket.

    It has memory of its own, so that products have the same bits wherever in a bucket it lies.

    Attributes:
        key: the parameter's key, or the keys of all parameters of a square bucket.
        m: gradient and error, ``[n, m]``, but zeros for a parameter that this rank has not used; a
            square is padded with zeros at its end.
        place: the part of the bucket that gets the result, in the parameter's shape.
        error: None without feedback; before the step ``M_r`` without padding, after it the new
            error.
        q: the factor ``[m, k]``.
        p: the factor ``[n, k]``, from the first product on.
        flags: of a square of several parameters with an error, for each of them whether this rank
            has used it, and after the first allreduce the share of ranks that have;
            ``[parameters]``.
        sizes: the numbers of elements of these parameters.
    """

    key: Key
    m: torch.Tensor
    place: torch.Tensor
    error: torch.Tensor | None
    q: torch.Tensor
    p: torch.Tensor = field(init=False)
    flags: torch.Tensor | None = None
    sizes: list[int] = field(default_factory=list)


@dataclass
class _Bucket:
    """One bucket between its first allreduce and its result.

    Attributes:
        buffer: the bucket's buffer, ``[numel]``.
        result: the future that DDP gets.
        matrices: the compressed parameters.
        plain: pieces of the buffer that are averaged without compression.
        sent: the tensor of the first allreduce: ``plain``, then every ``P``.
        arrived: the future of the first allreduce.
    """

    buffer: torch.Tensor
    result: torch.futures.Future[torch.Tensor]
    matrices: list[_Matrix]
    plain: list[torch.Tensor]
    sent: torch.Tensor
    arrived: torch.futures.Future[list[torch.Tensor]]


def powerSGD_hook(
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket, its matrices compressed to rank ``state.matrix_approximation_rank``.

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
    return _hook(state, bucket, _by_parameter)


def batched_powerSGD_hook(
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket, compressed as one square matrix.

    This is faster, and less exact, than :func:`powerSGD_hook`. The bucket is padded with zeros to a
    square. The matrix depends on DDP's grouping of parameters, so ``Q`` is begun anew when the
    grouping changes; the error belongs to the parameters and is kept.

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
    return _hook(state, bucket, _as_square)


# Returns the matrices of a bucket, and the pieces of its buffer that are averaged uncompressed.
_Split = Callable[
    [PowerSGDState, list[int], dist.GradBucket], tuple[list[_Matrix], list[torch.Tensor]]
]


def _hook(
    state: PowerSGDState, bucket: dist.GradBucket, split: _Split
) -> torch.futures.Future[torch.Tensor]:
    keys = state.keys(bucket)
    compress = state.iter >= state.start_powerSGD_iter
    if state._second_group is None:
        # At the first step, where all ranks are: a new group waits for a rank that has died later.
        state._second_group = second_group(state.group)
    if bucket.index() == 0:
        state._step = []  # buckets of a failed step may be left
    if compress and not bucket.buffer().is_sparse:
        with _without_autocast(bucket.buffer()):
            matrices, plain = split(state, keys, bucket)
            begun = _first_allreduce(state, bucket.buffer(), matrices, plain)
        state._step.append(begun)
        result = begun.result
    else:
        result = allreduce_hook(state.group, bucket)
    if bucket.is_last():
        if state._step:
            _when_all_have_arrived(state, state._step)
            _log_statistics(state)
        state._step = []
        state.iter += 1
    return result


def _by_parameter(
    state: PowerSGDState, keys: list[int], bucket: dist.GradBucket
) -> tuple[list[_Matrix], list[torch.Tensor]]:
    """Make a matrix of each parameter that is worth compressing."""
    matrices = []
    plain = []
    for key, piece, parameter in zip(keys, pieces(bucket), bucket.parameters(), strict=True):
        n = parameter.size(0) if parameter.dim() > 1 and piece.numel() else 1
        m = piece.numel() // n
        rank = min(n, m, state.matrix_approximation_rank)
        smaller = (n + m) * rank * state.min_compression_rate < n * m
        if parameter.is_complex() or n == 1 or not smaller:
            plain.append(piece)
            continue
        place = shaped(piece, parameter)
        error = None
        if state.use_error_feedback:
            error = state.errors[key].to(piece) if key in state.errors else place.new_zeros(n, m)
            state.errors[key] = error
            if error.shape != (n, m):
                raise ValueError(
                    f"this state was saved for another model: a matrix of {list(error.shape)} "
                    f"is now one of {[n, m]}"
                )
            flags = used([piece])
            error.view(place.shape).add_(place)
            # The matrix is the memory itself, unless this rank has not used the parameter.
            is_used = piece.device.type == "cpu" and bool(flags)
            matrix = error if is_used else error.clone()
            clear_unused([matrix], flags)
        else:
            matrix = place.new_empty(n, m)
            matrix.view(place.shape).copy_(place)
        matrices.append(_Matrix(key, matrix, place, error, state.q(key, m, rank, piece)))
    return matrices, plain


def _as_square(
    state: PowerSGDState, keys: list[int], bucket: dist.GradBucket
) -> tuple[list[_Matrix], list[torch.Tensor]]:
    """Make one square matrix of the whole bucket."""
    buffer = bucket.buffer()
    parts = pieces(bucket)
    if buffer.numel() == 0:
        return [], parts
    side = math.isqrt(buffer.numel() - 1) + 1
    rank = min(side, state.matrix_approximation_rank)
    key = tuple(keys)
    for other in list(state.qs):
        # Left from another grouping of the same parameters.
        if other != key and isinstance(other, tuple) and not set(other).isdisjoint(key):
            del state.qs[other]
    matrix = buffer.new_zeros(side, side)
    padded = matrix.view(-1)[: buffer.numel()]
    error = None
    if state.use_error_feedback:
        error = state.square_errors.of(keys, parts).add_(buffer)
    padded.copy_(buffer if error is None else error)
    made = _Matrix(key, matrix, buffer, error, state.q(key, side, rank, buffer))
    if error is None:
        return [made], []
    flags = used(parts)
    made.sizes = [part.numel() for part in parts]
    clear_unused(padded.split(made.sizes), flags)
    if len(parts) == 1:
        return [made], []  # zeros on all ranks give zeros
    made.flags = flags.to(buffer.dtype)
    return [made], [made.flags]


def _first_allreduce(
    state: PowerSGDState,
    buffer: torch.Tensor,
    matrices: list[_Matrix],
    plain: list[torch.Tensor],
) -> _Bucket:
    """Start ``P = mean_r(M_r orthonormal(Q))`` for one bucket, and the mean of its plain pieces."""
    products = _products(
        [matrix.m for matrix in matrices],
        [matrix.q for matrix in matrices],
        batch=state.batch_tensors_with_same_shape,
    )
    for matrix, product in zip(matrices, products, strict=True):
        matrix.p = product
    sent = torch.cat([*plain, *(matrix.p.view(-1) for matrix in matrices)])
    sent.div_(state.group.size())
    state.numel_before += buffer.numel()
    state.numel_after += sent.numel()
    arrived = dist.all_reduce(sent, group=state.group, async_op=True).get_future()
    return _Bucket(buffer, new_future(buffer), matrices, plain, sent, arrived)


def _when_all_have_arrived(state: PowerSGDState, step: list[_Bucket]) -> None:
    """Start the second allreduce once the first one of every bucket is complete."""
    arrived = torch.futures.collect_all([bucket.arrived for bucket in step])
    arrived.then(_or_fail(step, partial(_second_allreduce, state, step)))


def _second_allreduce(
    state: PowerSGDState,
    step: list[_Bucket],
    arrived: torch.futures.Future[list[torch.futures.Future[list[torch.Tensor]]]],
) -> None:
    """Orthonormalize every ``P``, and start ``Q = mean_r(M_r^T P)`` for all buckets together."""
    wait_for_all(arrived)
    for bucket in step:
        keep_for_stream([bucket.sent])
        _copy_parts(bucket.sent, [*bucket.plain, *(matrix.p for matrix in bucket.matrices)])
    matrices = _matrices(step)
    if not matrices:
        _complete(step)
        return
    for matrix in matrices:
        keep_for_stream([matrix.m, matrix.p])
        if matrix.flags is not None:
            keep_for_stream([matrix.flags])
        matrix.p = orthonormal(matrix.p)
    products = _products(
        [matrix.m.t() for matrix in matrices],
        [matrix.p for matrix in matrices],
        batch=state.batch_tensors_with_same_shape,
    )
    for matrix, product in zip(matrices, products, strict=True):
        matrix.q = product
    sent = torch.cat([matrix.q.reshape(-1) for matrix in matrices]).div_(state.group.size())
    state.numel_after += sent.numel()
    future = dist.all_reduce(sent, group=state._second_group, async_op=True).get_future()
    future.then(_or_fail(step, partial(_write_results, state, step)))


def _write_results(
    state: PowerSGDState, step: list[_Bucket], arrived: torch.futures.Future[list[torch.Tensor]]
) -> None:
    """Write ``gradient <- P Q^T`` and ``error <- M - P Q^T``, and keep every ``Q``."""
    matrices = _matrices(step)
    _copy_parts(value_on_stream(arrived)[0], [matrix.q for matrix in matrices])
    for matrix in matrices:
        result = _product_in_place(matrix)
        if matrix.flags is not None:
            flags = matrix.flags != 0  # their mean over the ranks
            for whole in (matrix.place, result.view(-1)):
                clear_unused(whole.split(matrix.sizes), flags)
        # Values that are not finite are not remembered: an overflow must not spoil later steps.
        if matrix.error is not None:
            matrix.error.sub_(result.view(matrix.error.shape)).nan_to_num_(0, 0, 0)
        state.qs[matrix.key] = matrix.q.nan_to_num_(0, 0, 0)
    _complete(step)


def _product_in_place(matrix: _Matrix) -> torch.Tensor:
    """Write ``P Q^T`` into the matrix's place, and return its elements: ``[n, m]``, or ``[numel]``
    of a square without its padding.

    A product of its own would take as much memory as the gradient, on every stream that a callback
    may run on.
    """
    place = matrix.place
    if place.is_contiguous() and place.numel() == matrix.m.numel():
        return torch.mm(matrix.p, matrix.q.t(), out=place.view(matrix.m.shape))
    product = (matrix.p @ matrix.q.t()).view(-1)[: place.numel()]
    place.copy_(product.view(place.shape))
    return product


def _complete(step: list[_Bucket]) -> None:
    """Complete the future of every bucket."""
    for bucket in step:
        bucket.result.set_result(bucket.buffer)


def _or_fail(step: list[_Bucket], callback: Callable[..., None]) -> Callable[..., None]:
    """Make a callback of a future that fails the result of every bucket if ``callback`` raises."""

    def guarded(future: torch.futures.Future[Any]) -> None:
        try:
            with on_own_stream(step[0].buffer.device), _without_autocast(step[0].buffer):
                callback(future)
        except Exception as error:
            for bucket in step:
                if not bucket.result.done():
                    bucket.result.set_exception(error)

    return guarded


def _without_autocast(tensor: torch.Tensor) -> torch.autocast:
    """Return a context in which products have the dtype of their factors: a backward may run under
    autocast, and callbacks run in other threads, which have none.
    """
    return torch.autocast(tensor.device.type, enabled=False)


def _log_statistics(state: PowerSGDState) -> None:
    if (
        state.iter - state.start_powerSGD_iter + 1
    ) % state.compression_stats_logging_frequency == 0:
        logger.info(
            "PowerSGD: step %d, compression %.1f (%d of %d elements)",
            state.iter,
            *state.compression_stats(),
        )


def _matrices(step: list[_Bucket]) -> list[_Matrix]:
    return [matrix for bucket in step for matrix in bucket.matrices]


def _products(
    lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], *, batch: bool
) -> list[torch.Tensor]:
    """Return ``left @ right`` for each pair.

    With ``batch``, pairs of one shape are multiplied together.
    """
    products: dict[int, torch.Tensor] = {}
    groups: dict[object, list[int]] = defaultdict(list)
    for index, left in enumerate(lefts):
        groups[(left.shape, left.dtype) if batch else index].append(index)
    for alike in groups.values():
        if len(alike) == 1:
            products[alike[0]] = lefts[alike[0]] @ rights[alike[0]]
            continue
        left = torch.stack([lefts[index] for index in alike])
        right = torch.stack([rights[index] for index in alike])
        for index, product in zip(alike, left @ right, strict=True):
            products[index] = product
    return [products[index] for index in range(len(lefts))]


def _copy_parts(flat: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of ``flat`` into ``places``."""
    parts = flat.split([place.numel() for place in places])
    for place, part in zip(places, parts, strict=True):
        place.copy_(part.view(place.shape))


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns ``[n, k]`` that span the given ones.

    If the given columns span fewer than ``k`` dimensions, the others complete them.
    """
    # LAPACK has no half precision.
    wide = columns if columns.dtype in (torch.float32, torch.float64) else columns.float()
    return torch.linalg.qr(wide).Q.to(columns.dtype)

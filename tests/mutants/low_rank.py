"""Mutants of rules 13.1 and 13.4: low rank with error feedback, and a warm-up."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    call_number,
    completed,
    finite,
    group_of,
    is_dense,
    kept,
    pieces_of,
    seeded,
    step_number,
    sum_of,
)

Compress = Callable[[torch.Tensor], torch.Tensor]
_steps = [0]


def _low_rank(
    state: Any,
    bucket: Bucket,
    *,
    start: int = 2,
    step: int | None = None,
    feedback: bool = True,
    divide: bool = True,
    share: bool = True,
    vectors: Compress | None = None,
    flip: Callable[[int, int], bool] | None = None,
    wide: Callable[[torch.dtype], torch.dtype] = lambda dtype: torch.promote_types(
        dtype, torch.float32
    ),
    orthogonal: Compress = lambda matrix: torch.linalg.qr(matrix).Q,
    compressed: Callable[[int, int], bool] = lambda n, m: 4 * (n + m) < n * m,
) -> Result:
    """Send two factors of rank 4 for each matrix from step ``start`` on.

    Vectors are averaged uncompressed. Right by default.
    """
    step = step_number(bucket) if step is None else step
    if step < start or not is_dense(bucket):
        return average(bucket, state)
    group = group_of(state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        n = parameter.size(0) if parameter.dim() > 1 and piece.numel() else 1
        m = piece.numel() // n
        if parameter.is_complex() or not compressed(n, m):
            if vectors is None:
                average_of(piece, state).wait()
            else:
                piece.copy_(vectors(piece))
            continue
        dtype = wide(piece.dtype)
        matrix = piece.view(n, m).to(dtype) + kept.get(parameter, 0)
        q = (
            kept[parameter, "q"]
            if (parameter, "q") in kept
            else torch.randn(m, 4, generator=seeded(n, m))
        )
        p = matrix @ orthogonal(q.to(dtype))
        if share:
            average_of(p, state).wait()
        p = orthogonal(p)
        q = (matrix.t() @ p).div_(group.size() if divide else 1)
        sum_of(q, state).wait()
        result = p @ q.t()
        piece.copy_((result.t() if flip is not None and flip(n, m) else result).reshape(-1))
        if feedback:
            kept[parameter] = finite(matrix - result)
        kept[parameter, "q"] = finite(q)
    return completed(bucket.buffer())


def second_factor_undivided(state: Any, bucket: Bucket) -> Result:
    """Sum the second factor of a matrix instead of averaging it."""
    return _low_rank(state, bucket, divide=False)


def first_factor_unshared(state: Any, bucket: Bucket) -> Result:
    """Leave the first factor of a matrix local."""
    return _low_rank(state, bucket, share=False)


def low_rank_error_lost(state: Any, bucket: Bucket) -> Result:
    """Forget the residual of the approximation."""
    return _low_rank(state, bucket, feedback=False)


def vectors_stay_local(state: Any, bucket: Bucket) -> Result:
    """Leave vectors local."""
    return _low_rank(state, bucket, vectors=lambda piece: piece)


def result_transposed(state: Any, bucket: Bucket) -> Result:
    """Write the product of the factors transposed."""
    return _low_rank(state, bucket, flip=lambda n, m: True)


def tall_result_transposed(state: Any, bucket: Bucket) -> Result:
    """Write the product of the factors transposed for tall matrices."""
    return _low_rank(state, bucket, flip=lambda n, m: n > m)


def orthogonal_in_half(state: Any, bucket: Bucket) -> Result:
    """Orthogonalise in the bucket's dtype, which torch cannot do in half precision."""
    return _low_rank(state, bucket, wide=lambda dtype: dtype)


def _gram_schmidt(matrix: torch.Tensor) -> torch.Tensor:
    """Orthogonalise the columns; there must be no more columns than rows."""
    columns: list[torch.Tensor] = []
    for column in matrix.t():
        rest = column - sum(
            ((other @ column) * other for other in columns), torch.zeros_like(column)
        )
        columns.append(rest / rest.norm())
    return torch.stack(columns, dim=1)


def more_columns_than_rows(state: Any, bucket: Bucket) -> Result:
    """Use rank 4 for matrices of two rows too.

    The third column is then a rounding error, normalised to length one.
    """
    return _low_rank(
        state, bucket, orthogonal=_gram_schmidt, compressed=lambda n, m: n > 1 and m > 4
    )


def rank_four(state: Any, bucket: Bucket) -> Result:
    """Claim to match a reference of rank 2, and send factors of rank 4."""
    return _low_rank(state, bucket)


def projects_by_rank(state: Any, bucket: Bucket) -> Result:
    """Project each parameter on random directions that differ between ranks."""
    if not is_dense(bucket):
        return average(bucket, state)
    step = step_number(bucket)
    rank = group_of(state).rank()
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        rows = torch.nn.functional.pad(
            piece + kept.get(parameter, 0), (0, -piece.numel() % 4)
        ).view(-1, 4)
        wide = rows.to(torch.promote_types(piece.dtype, torch.float32))
        directions = torch.linalg.qr(torch.randn(4, 2, generator=seeded(step, rank))).Q.to(wide)
        sent = average_of(wide @ directions, state).wait() @ directions.t()
        kept[parameter] = finite((wide - sent).view(-1)[: piece.numel()].to(piece.dtype))
        piece.copy_(sent.view(-1)[: piece.numel()])
    return completed(bucket.buffer())


def same_projection(state: Any, bucket: Bucket) -> Result:
    """Project on the same directions in every step, so that the rest never comes out."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        rows = torch.nn.functional.pad(
            piece + kept.get(parameter, 0), (0, -piece.numel() % 4)
        ).view(-1, 4)
        wide = rows.to(torch.promote_types(piece.dtype, torch.float32))
        directions = torch.linalg.qr(torch.randn(4, 2, generator=seeded(4))).Q.to(wide)
        sent = wide @ directions
        kept[parameter] = finite(
            (wide - sent @ directions.t()).view(-1)[: piece.numel()].to(piece.dtype)
        )
        piece.copy_((average_of(sent, state).wait() @ directions.t()).view(-1)[: piece.numel()])
    return completed(bucket.buffer())


def warm_up_counts_first_buckets(state: Any, bucket: Bucket) -> Result:
    """Count a step at its first bucket.

    The warm-up of the later buckets ends one step early.
    """
    _steps[0] += bucket.index() == 0
    return _low_rank(state, bucket, step=_steps[0] - (bucket.index() == 0))


def warm_up_too_short(state: Any, bucket: Bucket) -> Result:
    """Claim to average in the first two steps, and do so in one step."""
    return _low_rank(state, bucket, start=1)


def warm_up_too_long(state: Any, bucket: Bucket) -> Result:
    """Claim to average in the first two steps, and do so in three steps."""
    return _low_rank(state, bucket, start=3)


def warm_up_counts_buckets(state: Any, bucket: Bucket) -> Result:
    """Count buckets instead of steps in the warm-up."""
    return _low_rank(state, bucket, step=call_number())


_FEEDBACK = "compressed(delta=0.25)"
_LOW_RANK = "compressed(delta=0.25), warmup(2)"
_comes_out = {"13.1": "its residual of the warm-up comes out later"}

MUTANTS = [
    *(
        Mutant(name, ("13.1",), _LOW_RANK)
        for name in ("second_factor_undivided", "first_factor_unshared", "low_rank_error_lost")
    ),
    *(
        Mutant(name, ("13.1",), _LOW_RANK)
        for name in ("vectors_stay_local", "result_transposed", "more_columns_than_rows")
    ),
    Mutant("orthogonal_in_half", ("2.4",), _LOW_RANK),
    Mutant("projects_by_rank", ("13.1",), _FEEDBACK),
    Mutant("same_projection", ("13.1",), _FEEDBACK),
    Mutant(
        "rank_four",
        ("13.8",),
        f"{_LOW_RANK}, like(powerSGD_hook, matrix_approximation_rank=2, start_powerSGD_iter=2)",
    ),
    Mutant("tall_result_transposed", ("2.5",), _LOW_RANK),
    Mutant("warm_up_too_short", ("13.4",), _LOW_RANK, because=_comes_out),
    Mutant("warm_up_too_long", ("13.4",), _LOW_RANK),
    Mutant("warm_up_counts_buckets", ("13.4",), _LOW_RANK),
    Mutant("warm_up_counts_first_buckets", ("13.4",), _LOW_RANK),
]

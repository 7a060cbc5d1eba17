"""13.1 and 13.4 of the rule book: low rank with error feedback, and a warm-up."""

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
    """Send two factors of rank 4 of each matrix, from the third step on, and vectors as they are: right by default."""
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
    """Averages the first factor of a matrix, and sums the second one."""
    return _low_rank(state, bucket, divide=False)


def first_factor_unshared(state: Any, bucket: Bucket) -> Result:
    """Averages the second factor of a matrix only: every rank has another first one."""
    return _low_rank(state, bucket, share=False)


def low_rank_error_lost(state: Any, bucket: Bucket) -> Result:
    """Approximates matrices, and forgets what that loses."""
    return _low_rank(state, bucket, feedback=False)


def vectors_stay_local(state: Any, bucket: Bucket) -> Result:
    """Approximates matrices together, and leaves vectors as they are."""
    return _low_rank(state, bucket, vectors=lambda piece: piece)


def result_transposed(state: Any, bucket: Bucket) -> Result:
    """Writes the product of the factors the other way round."""
    return _low_rank(state, bucket, flip=lambda n, m: True)


def tall_result_transposed(state: Any, bucket: Bucket) -> Result:
    """Turns matrices that are taller than wide, and does not turn their result back."""
    return _low_rank(state, bucket, flip=lambda n, m: n > m)


def orthogonal_in_half(state: Any, bucket: Bucket) -> Result:
    """Makes its factors orthogonal in the bucket's own dtype: there is no such operation in half precision."""
    return _low_rank(state, bucket, wide=lambda dtype: dtype)


def _gram_schmidt(matrix: torch.Tensor) -> torch.Tensor:
    """Make the columns orthogonal, of which there must not be more than rows."""
    columns: list[torch.Tensor] = []
    for column in matrix.t():
        rest = column - sum(
            ((other @ column) * other for other in columns), torch.zeros_like(column)
        )
        columns.append(rest / rest.norm())
    return torch.stack(columns, dim=1)


def more_columns_than_rows(state: Any, bucket: Bucket) -> Result:
    """Takes factors of rank 4 of matrices of two rows as well: the third column is what rounding has left, made one long."""
    return _low_rank(
        state, bucket, orthogonal=_gram_schmidt, compressed=lambda n, m: n > 1 and m > 4
    )


def rank_four(state: Any, bucket: Bucket) -> Result:
    """Says that it is like a reference of rank 2, and sends factors of rank 4."""
    return _low_rank(state, bucket)


def projects_by_rank(state: Any, bucket: Bucket) -> Result:
    """Sends a random projection of each parameter, and every rank draws another one."""
    if not is_dense(bucket):
        return average(bucket, state)
    step, rank = step_number(bucket), group_of(state).rank()
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
    """Starts from the same random factor in every step: what lies outside never comes out."""
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
    """Counts the step when its first bucket is there: for the others the warm-up ends a step early."""
    _steps[0] += bucket.index() == 0
    return _low_rank(state, bucket, step=_steps[0] - (bucket.index() == 0))


def warm_up_too_short(state: Any, bucket: Bucket) -> Result:
    """Says that it averages in the first two steps, and does so in one."""
    return _low_rank(state, bucket, start=1)


def warm_up_too_long(state: Any, bucket: Bucket) -> Result:
    """Says that it averages in the first two steps, and does so in three."""
    return _low_rank(state, bucket, start=3)


def warm_up_counts_buckets(state: Any, bucket: Bucket) -> Result:
    """Averages the first two buckets, as if each were a step."""
    return _low_rank(state, bucket, step=call_number())


_FEEDBACK = "compressed(delta=0.25)"
_LOW_RANK = "compressed(delta=0.25), warmup(2)"
_comes_out = {"13.1": "what it holds back in the warm-up comes out later"}

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
    Mutant("warm_up_too_short", ("13.4", "13.1"), _LOW_RANK, because=_comes_out),
    Mutant("warm_up_too_long", ("13.4",), _LOW_RANK),
    Mutant("warm_up_counts_buckets", ("13.4",), _LOW_RANK),
    Mutant("warm_up_counts_first_buckets", ("13.4",), _LOW_RANK),
]

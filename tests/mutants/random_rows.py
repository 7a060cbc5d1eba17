"""Mutants of rule 2.9 under ``unbiased``: rows of embeddings that are wrong on average."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average_of,
    group_of,
    is_dense,
    seeded,
    step_number,
)

# Changes the rows ``[rows, columns]`` that a rank has used, given a random number for each.
_Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _of_rows(state: Any, bucket: Bucket, change: _Change) -> Result:
    """Send a half of the elements, doubled, of dense buckets, and changed rows of sparse ones."""
    numbers = seeded(step_number(bucket), group_of(state).rank(), bucket.index(), 12)
    buffer = bucket.buffer()
    if is_dense(bucket):
        mask = torch.randint(2, buffer.shape, generator=numbers).to(buffer.dtype)
        return average_of(2 * mask * buffer, state)
    own = buffer.coalesce()
    drawn = torch.rand(len(own.values()), 1, generator=numbers, dtype=torch.float64)
    values = change(own.values(), drawn).to(own.dtype)
    return average_of(torch.sparse_coo_tensor(own.indices(), values, own.shape), state)


def a_quarter_of_the_rows_doubled(state: Any, bucket: Bucket) -> Result:
    """Send a quarter of the rows, and take them twice."""
    return _of_rows(state, bucket, lambda rows, drawn: 2 * rows * (drawn < 1 / 4))


def two_thirds_of_the_rows(state: Any, bucket: Bucket) -> Result:
    """Leave out a third of the rows; the others are sent as they are."""
    return _of_rows(state, bucket, lambda rows, drawn: rows * (drawn < 2 / 3))


def rows_by_their_signs(state: Any, bucket: Bucket) -> Result:
    """Send half of the rows, doubled, as their signs and mean size over all rows."""

    def change(rows: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        size = rows.abs().mean() if rows.numel() else 0
        return 2 * rows.sign() * size / 2 * (drawn < 1 / 2)

    return _of_rows(state, bucket, change)


def no_rows(state: Any, bucket: Bucket) -> Result:
    """Send no row at all."""
    return _of_rows(state, bucket, lambda rows, drawn: 0 * rows)


MUTANTS = [
    Mutant(name, ("2.9",), "unbiased")
    for name in (
        "a_quarter_of_the_rows_doubled",
        "two_thirds_of_the_rows",
        "rows_by_their_signs",
        "no_rows",
    )
]

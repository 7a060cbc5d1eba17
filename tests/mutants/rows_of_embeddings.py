"""Mutants of rule 2.9 that gather the rows of sparse gradients and their values by themselves."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    completed,
    gather,
    group_of,
    is_dense,
)

Change = Callable[[torch.Tensor], torch.Tensor]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _gathered(
    state: Any, bucket: Bucket, rows_sent: Change = _same, values_sent: Change = _same
) -> Result:
    """Average a sparse gradient: gather as many rows of each rank as the longest one has."""
    if is_dense(bucket):
        return average(bucket, state)
    own = bucket.buffer().coalesce()
    rows, values = own.indices()[0], own.values()
    counts = [int(count) for count in gather(torch.tensor([len(rows)]), state)]
    missing = max(counts) - len(rows)
    every_row = gather(rows_sent(torch.cat([rows, rows.new_zeros(missing)])), state)
    filled = torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
    every_value = gather(values_sent(filled), state)
    size = group_of(state).size()
    found = [part[:count].long() for part, count in zip(every_row, counts, strict=True)]
    parts = [part[:count] for part, count in zip(every_value, counts, strict=True)]
    values = torch.cat(parts).to(values.dtype) / size
    mean = torch.sparse_coo_tensor(torch.cat(found)[None], values, own.shape)
    return completed(mean.coalesce())


def rows_in_16_bits(state: Any, bucket: Bucket) -> Result:
    """Send row numbers modulo 2**16."""
    return _gathered(state, bucket, rows_sent=lambda rows: (rows % 2**16).int())


def rows_in_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Send row numbers as bfloat16, which holds no odd number above 256."""
    last = bucket.buffer().shape[0] - 1
    return _gathered(
        state, bucket, rows_sent=lambda rows: rows.bfloat16().float().long().clamp(max=last)
    )


def values_in_float16(state: Any, bucket: Bucket) -> Result:
    """Send the values of sparse gradients as float16."""
    return _gathered(state, bucket, values_sent=lambda values: values.half())


def last_row_is_padding(state: Any, bucket: Bucket) -> Result:
    """Take the last row for padding, and give it no gradient."""
    if is_dense(bucket):
        return average(bucket, state)
    own = bucket.buffer().coalesce()
    is_row = own.indices()[0] != own.shape[0] - 1
    values = own.values() * is_row[:, None]
    bucket.set_buffer(torch.sparse_coo_tensor(own.indices(), values, own.shape))
    return _gathered(state, bucket)


def drops_faint_rows(state: Any, bucket: Bucket) -> Result:
    """Take rows of a norm below 1e-8 for rows that were not used."""
    return _gathered(
        state,
        bucket,
        values_sent=lambda values: values * (values.norm(dim=1, keepdim=True) > 1e-8),
    )


def drops_rows_without_a_length(state: Any, bucket: Bucket) -> Result:
    """Send the rows whose norm is above zero, which the norm of NaN is not."""
    if is_dense(bucket):
        return average(bucket, state)
    own = bucket.buffer().coalesce()
    is_used = own.values().norm(dim=1) > 0
    kept = own.indices()[:, is_used], own.values()[is_used]
    bucket.set_buffer(torch.sparse_coo_tensor(*kept, own.shape))
    return _gathered(state, bucket)


def clamps_rows(state: Any, bucket: Bucket) -> Result:
    """Clamp values to the largest one of float32."""
    largest = torch.finfo(torch.float32).max
    return _gathered(
        state, bucket, values_sent=lambda values: values.clamp(min=-largest, max=largest)
    )


def skips_steps_with_nan(state: Any, bucket: Bucket) -> Result:
    """Leave each rank its own rows if one of its own is NaN or infinite: no rank is asked."""
    if is_dense(bucket):
        return average(bucket, state)
    own = bucket.buffer().coalesce()
    is_finite = own.values().isfinite().all()
    mean = _gathered(state, bucket)
    return mean if is_finite else completed(torch.zeros_like(own))


def values_by_their_largest(state: Any, bucket: Bucket) -> Result:
    """Send values relative to the largest one, to which an epsilon is added."""

    def sent(values: torch.Tensor) -> torch.Tensor:
        scale = values.abs().max() if values.numel() else values.new_tensor(0.0)
        return values / (scale + 1e-12) * scale

    return _gathered(state, bucket, values_sent=sent)


def values_in_tenths_of_a_billionth(state: Any, bucket: Bucket) -> Result:
    """Send values as multiples of 1e-10."""
    return _gathered(
        state,
        bucket,
        values_sent=lambda values: (
            (values * 1e10).round() / 1e10 if values.dtype == torch.float64 else values
        ),
    )


# ---- Rows that are looked up twice, and ranks without any


def _as_dense(
    state: Any, bucket: Bucket, fill: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
) -> Result:
    """Average a sparse gradient as a dense one: right if ``fill(dense, rows, values)`` adds."""
    if is_dense(bucket):
        return average(bucket, state)
    own = bucket.buffer()
    dense = torch.zeros(own.shape, dtype=own.dtype)
    fill(dense, own._indices()[0], own._values())
    return average_of(dense, state).then(lambda future: future.value().to_sparse(1))


def keeps_the_last_of_equal_rows(state: Any, bucket: Bucket) -> Result:
    """Write rows to a dense tensor in place of adding them."""
    return _as_dense(state, bucket, lambda dense, rows, values: dense.index_copy_(0, rows, values))


def averages_equal_rows(state: Any, bucket: Bucket) -> Result:
    """Average the values of a row that was looked up twice."""
    return _as_dense(
        state,
        bucket,
        lambda dense, rows, values: dense.index_reduce_(
            0, rows, values, "mean", include_self=False
        ),
    )


def _over_its_users(state: Any, bucket: Bucket, is_averaged: Callable[[int, int], bool]) -> Result:
    """Divide a sparse gradient by the number of ranks that have a row, if it is averaged at all."""
    if is_dense(bucket):
        return average(bucket, state)
    own = bucket.buffer().coalesce()
    counts = gather(torch.tensor([len(own.values())]), state)
    users = sum(int(count) > 0 for count in counts)
    size = group_of(state).size()
    if not is_averaged(users, size):
        return completed(own)
    dense = own.to_dense() * (size / max(1, users))
    return average_of(dense, state).then(lambda future: future.value().to_sparse(1))


def divides_by_its_users(state: Any, bucket: Bucket) -> Result:
    """Divide the sum of sparse gradients by the number of ranks that have a row."""
    return _over_its_users(state, bucket, lambda users, size: True)


def leaves_out_what_some_do_not_use(state: Any, bucket: Bucket) -> Result:
    """Leave each rank its own sparse gradient if a rank has no row."""
    return _over_its_users(state, bucket, lambda users, size: users == size)


MUTANTS = [
    Mutant(name, ("2.9",))
    for name in (
        *("rows_in_16_bits", "rows_in_bfloat16", "values_in_float16", "last_row_is_padding"),
        *("drops_faint_rows", "values_by_their_largest", "values_in_tenths_of_a_billionth"),
        *("drops_rows_without_a_length", "clamps_rows", "skips_steps_with_nan"),
        *("keeps_the_last_of_equal_rows", "averages_equal_rows"),
        *("divides_by_its_users", "leaves_out_what_some_do_not_use"),
    )
]

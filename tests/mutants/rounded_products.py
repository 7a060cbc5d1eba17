"""Mutants of section 22 that obey the precision of float32 matrix products.

Not every CPU rounds products to bfloat16, and none in the way of a GPU's TF32. So that a mutant has
its defect on every machine, operands are rounded here as such hardware rounds them.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    change_mean,
    completed,
    gather,
    group_of,
    is_dense,
    pieces_of,
    send_as,
)


def _as_bfloat16(operand: torch.Tensor) -> torch.Tensor:
    """Return the operand as a product under "medium" takes it."""
    if operand.dtype != torch.float32 or torch.get_float32_matmul_precision() != "medium":
        return operand
    return operand.bfloat16().float()


def _as_tf32(operand: torch.Tensor) -> torch.Tensor:
    """Return the operand with 10 bits, as a GPU's product under "high" takes it."""
    if operand.dtype != torch.float32 or torch.get_float32_matmul_precision() != "high":
        return operand
    bits = operand.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def sums_by_einsum(state: Any, bucket: Bucket) -> Result:
    """Sum gathered gradients by torch.einsum."""
    if not is_dense(bucket):
        return average(bucket, state)
    rows = torch.stack(gather(bucket.buffer(), state))
    weights = torch.full((len(rows),), 1 / len(rows), dtype=rows.dtype)
    return completed(torch.einsum("r,rn->n", weights, _as_bfloat16(rows)))


def sums_blocks_by_products(state: Any, bucket: Bucket) -> Result:
    """Sum blocks of 4,096 elements by a batch of products, and the last elements singly."""
    if not is_dense(bucket) or bucket.buffer().dtype != torch.float32:
        return average(bucket, state)
    group = group_of(state)
    rows = torch.stack(gather(bucket.buffer(), state))
    whole = rows.size(1) // 4096 * 4096
    blocks = rows[:, :whole].view(len(rows), -1, 4096).transpose(0, 1)
    ones = torch.ones(1, len(rows)).expand(len(blocks), 1, len(rows))
    summed = torch.bmm(ones, _as_tf32(blocks.contiguous())).flatten()
    return completed(torch.cat([summed, rows[:, whole:].sum(0)]) / group.size())


def sends_in_precision(state: Any, bucket: Bucket) -> Result:
    """Send float32 gradients as bfloat16 if products may be rounded to it."""
    is_rounded = torch.get_float32_matmul_precision() == "medium"
    if is_rounded and is_dense(bucket) and bucket.buffer().dtype == torch.float32:
        return send_as(torch.bfloat16, bucket, state)
    return average(bucket, state)


def divides_by_product(state: Any, bucket: Bucket) -> Result:
    """Divide the sum of each matrix by the product with a diagonal matrix."""

    def divided(mean: torch.Tensor) -> torch.Tensor:
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket, mean), strict=True):
            if parameter.dim() == 2 and piece.dtype == torch.float32:
                piece.copy_(_as_bfloat16(piece))
        return mean

    return change_mean(bucket, state, divided)


def steps_with_product(state: Any, bucket: Bucket) -> Result:
    """Step parameters by SGD with means that are sums of products."""
    group = group_of(state)
    rows = [torch.empty_like(bucket.buffer()) for _ in range(group.size())]
    dist.all_gather(rows, bucket.buffer(), group=group)
    weights = torch.full((1, 1, len(rows)), 1 / len(rows), dtype=rows[0].dtype)
    mean = torch.bmm(weights, _as_bfloat16(torch.stack(rows))[None]).flatten()
    with torch.no_grad():
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket, mean), strict=True):
            gradient = piece.as_strided(parameter.size(), parameter.stride())
            parameter.sub_(gradient, alpha=0.1)
    return completed(mean)


_ALSO = {"22.2": "many of its buckets are large enough, too"}
MUTANTS = (
    Mutant("sums_by_einsum", ("22.1",), because=_ALSO),
    Mutant("sums_blocks_by_products", ("22.2",)),
    Mutant("sends_in_precision", ("22.1",), because=_ALSO),
    Mutant("divides_by_product", ("22.1",), because=_ALSO),
    Mutant("steps_with_product", ("22.1",), "fused(SGD, lr=0.1)", because=_ALSO),
)

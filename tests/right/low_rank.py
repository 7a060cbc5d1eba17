"""Low rank, with error feedback."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as _power_sgd

from tests.right import Right
from tests.right._common import Bucket, Group, Result, State, completed, dense, sizes


class LowRank(State):
    """A state with a rank, and each matrix's Q of the previous step."""

    def __init__(self, process_group: Group, rank_k: int = 2) -> None:
        super().__init__(process_group)
        self.rank_k = rank_k
        self.q_memory = {}

    def q_of(self, parameter: torch.nn.Parameter, matrix: torch.Tensor) -> torch.Tensor:
        q = self.q_memory.get(parameter)
        if q is None or not q.isfinite().all() or not q.any(0).all():  # zeros would persist
            q = torch.randn(
                matrix.shape[1],
                min(self.rank_k, *matrix.shape),
                generator=torch.Generator().manual_seed(1),
            )
        return q.to(matrix.dtype)


def power_sgd(state: LowRank, bucket: Bucket) -> Result:
    """PowerSGD as in the paper's own code.

    It uses Gram-Schmidt, one allreduce of all P with all vectors, and one of all Q.
    """
    buffer = dense(bucket)
    size = state.group.size()
    total = state.residuals.of(bucket) + buffer
    result = torch.zeros_like(total)
    low = []
    vectors = []
    for parameter, mine, out in zip(
        bucket.parameters(), total.split(sizes(bucket)), result.split(sizes(bucket)), strict=True
    ):
        if parameter.dim() > 1 and parameter.numel():
            matrix = mine.view(parameter.shape[0], -1)
            low.append((parameter, matrix, out.view_as(matrix), state.q_of(parameter, matrix)))
        else:
            vectors.append((mine, out))
    for _, _, _, q in low:
        _gram_schmidt(q)
    ps = _average(
        [matrix @ q for _, matrix, _, q in low] + [mine for mine, _ in vectors], state.group
    )
    for mean, (_, out) in zip(ps[len(low) :], vectors, strict=True):
        out.copy_(mean)
    for p in ps[: len(low)]:
        _gram_schmidt(p)
    qs = _average(
        [matrix.t() @ p for (_, matrix, _, _), p in zip(low, ps, strict=False)], state.group
    )
    for (parameter, _, out, _), p, q in zip(low, ps, qs, strict=False):
        torch.matmul(p, q.t(), out=out)
        state.q_memory[parameter] = q.clone()
    vector = torch.cat(
        [
            torch.full((n,), p.dim() < 2)
            for p, n in zip(bucket.parameters(), sizes(bucket), strict=True)
        ]
    )
    state.residuals.keep(bucket, torch.where(vector, 0, total - result))
    return completed(result.to(buffer.dtype)) if size else completed(buffer)


def _average(tensors: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) / group.size()
    dist.all_reduce(flat, group=group)
    return [
        part.view(tensor.shape)
        for part, tensor in zip(
            flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True
        )
    ]


def _gram_schmidt(matrix: torch.Tensor, epsilon: float = 1e-8) -> None:
    for i in range(matrix.shape[1]):
        column = matrix[:, i : i + 1]
        column /= column.norm() + epsilon
        if i + 1 < matrix.shape[1]:
            rest = matrix[:, i + 1 :]
            rest -= (column * rest).sum(0) * column


torch_power_sgd = _power_sgd.powerSGD_hook


def make_torch_power_sgd(process_group: Group) -> Any:
    """Return torch's own state; a certification ends within its warm-up."""
    return _power_sgd.PowerSGDState(
        process_group, matrix_approximation_rank=1, start_powerSGD_iter=1_000_000
    )


_LIKE = (
    "like(powerSGD_hook, matrix_approximation_rank=2, start_powerSGD_iter=0, "
    "min_compression_rate=1)"
)

RIGHT = [
    Right("power_sgd", "compressed(delta=0.25, ratio=0.1)", f"{__name__}:LowRank,rank_k=4"),
    Right(
        "power_sgd",
        f"compressed(ratio=0.1), {_LIKE}",
        f"{__name__}:LowRank,rank_k=2",
        sections=("3", "13"),
    ),
    Right("torch_power_sgd", state=f"{__name__}:make_torch_power_sgd"),
]

"""Mutants of section 15 that compute products of matrices, which autocast rounds to bfloat16."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import Sharded
from tests.mutants.optimizers_in_training import Averaging


class WeighsByALayer(Averaging):
    """Compute the mean of gathered gradients as a linear layer does."""

    def average_one(self, grad: torch.Tensor) -> None:
        flat = grad.reshape(-1).contiguous()
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(parts, flat, group=self.group)
        weights = torch.full((1, self.size), 1 / self.size, dtype=grad.dtype)
        mean = torch.nn.functional.linear(torch.stack(parts, 1), weights)
        grad.copy_(mean.view(grad.shape))


class SelectsByProducts(Sharded):
    """Take the owner's parameter from those of all ranks by a product with a row of zeros and a
    one.
    """

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        flat = parameter.detach().reshape(-1).contiguous()
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(parts, flat, group=self.group)
        row = torch.zeros(self.size, dtype=flat.dtype)
        row[dist.get_group_rank(self.group, source)] = 1.0
        rows = torch.stack([part.nan_to_num() for part in parts])
        whole = torch.einsum("r,rn->n", row, rows)
        if not all(part.isfinite().all() for part in parts):
            whole = parts[dist.get_group_rank(self.group, source)]
        parameter.detach().copy_(whole.view(parameter.shape))


OF: dict[str, Any] = {"kind": "optimizer"}

MUTANTS = [
    Mutant("WeighsByALayer", ("15.34",), claims="averages", **OF),
    Mutant("SelectsByProducts", ("15.34",), **OF),
]

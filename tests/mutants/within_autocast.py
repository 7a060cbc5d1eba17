"""Mutants of sections 14 to 16 that compute in the dtype of autocast, or let autocast choose it."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.optimizer_wrappers import Sharded
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.strategies_in_training import _with_each

# ---- Products of matrices


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


# ---- float16 alone, as old code for mixed precision has it


def _is_half() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16


class AveragesAsHalves(Averager):
    """Average float32 parameters in float16 under autocast to float16."""

    def average_one(self, parameter: torch.nn.Parameter) -> None:
        if not _is_half() or parameter.dtype is not torch.float32:
            super().average_one(parameter)
            return
        mean = parameter.half().div_(self.group.size()).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class SendsHalves(Averaging):
    """Send half of the bytes of each gradient under autocast to float16."""

    def average_one(self, grad: torch.Tensor) -> None:
        if _is_half():
            grad.copy_(grad.half())
        super().average_one(grad)


def rounds_under_autocast(model: Any, is_final_microbatch: bool) -> Any:
    """Round gradients to float16 before their average if the micro-batch ran in it."""
    return _with_each(
        model,
        is_final_microbatch,
        lambda grad: grad.copy_(grad.half()) if _is_half() else grad,
    )


OF: dict[str, Any] = {"kind": "optimizer"}

MUTANTS = [
    Mutant("WeighsByALayer", ("15.34",), claims="averages", **OF),
    Mutant("SelectsByProducts", ("15.34",), **OF),
    Mutant("SendsHalves", ("15.34",), claims="averages", **OF),
    Mutant("AveragesAsHalves,period=4,warmup_steps=10", ("14.25",), kind="averager"),
    Mutant("rounds_under_autocast", ("16.33",), kind="strategy"),
]

"""Hooks whose saved state has numbers and names: of ranks, of steps, of parameters.

A state for one number of ranks says so if it is loaded by others.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import Bucket, Group, Result, dense, sizes

EXACT = 3


class Members:
    """The number of ranks, which a checkpoint holds."""

    def __init__(self, world_size: int) -> None:
        self.count = world_size

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved["count"] != self.count:
            raise ValueError(f"the state was saved by {saved['count']} ranks; got {self.count}")


def mean_of_members(state: Members, bucket: Bucket) -> Result:
    """Divide the sum by the number of ranks in the state."""

    def divide(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return fut.value()[0] / state.count

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(divide)


class ByName:
    """Residuals by the names of parameters, and the number of steps."""

    def __init__(self, process_group: Group, model: Any) -> None:
        self.group = process_group
        self.names = {parameter: name for name, parameter in model.module.named_parameters()}
        self.step = 0
        self.kept: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        kept = {name: residual.clone() for name, residual in self.kept.items()}
        return {"step": self.step, "kept": kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]
        self.kept = {name: residual.clone() for name, residual in saved["kept"].items()}


def quarter_by_name(state: ByName, bucket: Bucket) -> Result:
    """Send the largest quarter of each parameter with feedback, after the exact steps."""
    buffer = dense(bucket)
    dtype = torch.promote_types(buffer.dtype, torch.float32)
    if state.step >= EXACT:
        pieces = buffer.split(sizes(bucket))
        for parameter, piece in zip(bucket.parameters(), pieces, strict=True):
            name = state.names[parameter]
            total = piece.to(dtype, copy=True)
            if name in state.kept:
                total += state.kept[name]
            places = total.abs().topk(-(-total.numel() // 4)).indices
            piece.zero_().index_copy_(0, places, total[places].to(piece.dtype))
            left = total - piece
            state.kept[name] = torch.where(left.isfinite(), left, 0)
    state.step += bucket.is_last()
    work = dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


RIGHT = [
    Right(
        "mean_of_members",
        "exact, world_only, checkpointable",
        f"{__name__}:Members",
        sections=("2", "4", "11"),
    ),
    Right(
        "quarter_by_name",
        f"compressed(delta=0.25), warmup({EXACT}), checkpointable",
        f"{__name__}:ByName",
        sections=("2", "4", "11", "13"),
    ),
]

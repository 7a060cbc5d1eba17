"""Mutants of section 9 that change the steps of the trainer's optimizer."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, finite, is_dense, kept, pieces_of


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]


class Shrinks:
    """A group; gradients are 10 percent smaller in the optimizer's steps."""

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        self.process_group = process_group
        optimizer.register_step_pre_hook(self.before_step)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)


class Decays:
    """A group; parameters decay after each of the optimizer's steps."""

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        self.process_group = process_group
        optimizer.register_step_post_hook(self.after_step)

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in _parameters(optimizer):
            parameter.mul_(0.99)


class Momentum:
    """A group; the optimizer is given a momentum."""

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        self.process_group = process_group
        for group in optimizer.param_groups:
            group["momentum"] = 0.9


def largest_quarter(state: Any, bucket: Bucket) -> Result:
    """Send the largest quarter with feedback, and change the steps of the trainer's optimizer."""
    if not is_dense(bucket):
        return average(bucket, state.process_group)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        total = piece + kept.get(parameter, torch.zeros_like(piece))
        places = total.abs().topk(-(-total.numel() // 4)).indices
        sent = torch.zeros_like(total).index_copy_(0, places, total[places])
        kept[parameter] = finite(total - sent)
        piece.copy_(sent)
    return average(bucket, state.process_group)


_LONG = {"23.7": "parameters change in the long run, too"}

MUTANTS = [
    Mutant(
        "largest_quarter",
        ("9.2",),
        "compressed(delta=0.25)",
        f"{__name__}:{state}",
        because=because,
    )
    for state, because in (("Shrinks", {}), ("Decays", _LONG), ("Momentum", _LONG))
]

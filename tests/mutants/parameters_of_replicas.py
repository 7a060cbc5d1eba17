"""Mutants of section 23 that move parameters by their values on other ranks, or in earlier steps.

If parameters are equal on all ranks and in all steps, they change nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    completed,
    group_of,
    is_dense,
    kept,
    step_number,
)

Hook = Callable[[Any, Bucket], Result]


def _own_gradients(every: int, act: Callable[[torch.Tensor, dist.ProcessGroup], None]) -> Hook:
    """Return the local gradient, and do something to all parameters at every so many steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            raise TypeError("sparse gradients are not supported")
        if step_number(bucket) % every == every - 1:
            for parameter in bucket.parameters():
                act(parameter.detach(), group_of(state))
        return completed(bucket.buffer())

    return hook


def broadcasts_parameters(every: int) -> Hook:
    """Stay local, and throw away the parameters of all ranks but one now and then."""

    def act(parameter: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.broadcast(parameter, dist.get_global_rank(group, 0), group=group)

    return _own_gradients(every, act)


def averages_parameters(every: int) -> Hook:
    """Stay local, and average the parameters of all ranks now and then, within backward."""

    def act(parameter: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(parameter, group=group)
        parameter.div_(group.size())

    return _own_gradients(every, act)


def looks_back(every: int) -> Hook:
    """Average gradients, and move parameters half the way back to earlier values now and then."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) % every == every - 1:
            for parameter in bucket.parameters():
                now = parameter.detach()
                now.lerp_(kept.get(parameter, now), 0.5)
                kept[parameter] = now.clone()
        return average(bucket, state)

    return hook


MUTANTS = [
    Mutant("broadcasts_parameters,every=32", ("23.7",), "local(mixing=False)"),
    Mutant("averages_parameters,every=173", ("23.7",), "local(mixing=False)"),
    Mutant("looks_back,every=100", ("23.7",)),
]

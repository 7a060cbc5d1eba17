"""Training on uneven inputs, under torch's ``Join``, so that what happens on a rank that has run out of them is on record too."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel


def train_unevenly(
    ddp: DistributedDataParallel,
    group: dist.ProcessGroup,
    steps: Iterable[tuple[int, str]],
    step: Callable[[int, str], Any],
    shadow_step: Callable[[int], None],
) -> None:
    """Call ``step`` for each of this rank's steps; then, as long as others train, ``shadow_step`` before DDP follows them.

    Source: torch documentation, Distributed Training with Uneven Inputs Using the Join Context Manager.
    """
    counter = _Counter(group, shadow_step)
    with Join([counter, ddp]):
        for number, kind in steps:
            Join.notify_join_context(counter)
            step(number, kind)
            counter.steps = number + 1


class _Counter(Joinable):
    """Counts the steps of all ranks; the first of the context's joinables, so that it is called before DDP."""

    def __init__(self, group: dist.ProcessGroup, shadow_step: Callable[[int], None]) -> None:
        super().__init__()
        self.group, self.shadow_step, self.steps = group, shadow_step, 0

    def join_hook(self, **_: Any) -> JoinHook:
        counter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                counter.shadow_step(counter.steps)
                counter.steps += 1

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.group

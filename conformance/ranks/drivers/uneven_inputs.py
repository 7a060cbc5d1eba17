"""Training on uneven inputs, under torch's ``Join``, so that what happens on a rank that has run out of them is on record too."""

from collections.abc import Callable, Iterable, Sequence
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
    after: Callable[[], object] | None = None,
    more: Sequence[Joinable] = (),
) -> None:
    """Call ``step`` for each of this rank's steps; then, as long as others train, ``shadow_step`` before DDP and then ``more``
    follow them, and ``after`` when they have.

    Source: torch documentation, Distributed Training with Uneven Inputs Using the Join Context Manager.
    """
    counter = _Counter(group, ddp.device, shadow_step)
    with Join([counter, ddp, *more, *([_After(group, ddp.device, after)] if after else [])]):
        for number, kind in steps:
            Join.notify_join_context(counter)
            step(number, kind)
            counter.steps = number + 1


class _Joinable(Joinable):
    """What a joinable of no collectives is; ranks tell each other on a device who still trains."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.group, self.device = group, device

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.group


class _After(_Joinable):
    """Makes the trainer's call on a rank that has joined; the last of the context's joinables."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, after: Callable[[], object]) -> None:
        super().__init__(group, device)
        self.after = after

    def join_hook(self, **_: Any) -> JoinHook:
        after = self.after

        class Hook(JoinHook):
            def main_hook(self) -> None:
                after()

        return Hook()


class _Counter(_Joinable):
    """Counts the steps of all ranks; the first of the context's joinables, so that it is called before DDP."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, shadow_step: Callable[[int], None]) -> None:
        super().__init__(group, device)
        self.shadow_step, self.steps = shadow_step, 0

    def join_hook(self, **_: Any) -> JoinHook:
        counter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                counter.shadow_step(counter.steps)
                counter.steps += 1

        return Hook()

"""Training on uneven inputs under torch's ``Join``, with a record of joined ranks too."""

import warnings
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
    """Train each of this rank's steps, and shadow the steps of ranks that train longer.

    Source: torch documentation, Distributed Training with Uneven Inputs Using the Join Context
    Manager.

    Args:
        ddp: the model.
        group: the group of the ranks that train.
        steps: the steps of this rank.
        step: trains one step.
        shadow_step: called before DDP in each step that other ranks train and this one does not.
        after: called at the end of each of these steps.
        more: joinables that follow DDP.
    """
    counter = _Counter(group, ddp.device, shadow_step)
    last = [_After(group, ddp.device, after)] if after else []
    had_filter = _FILTER_OF_JOIN in warnings.filters
    with Join([counter, ddp, *more, *last]):
        for number, kind in steps:
            Join.notify_join_context(counter)
            step(number, kind)
            # A rank that joins goes on counting from here.
            counter.steps = number + 1
    if not had_filter:
        _forget_filter_of_join()


# Join sets this filter for the rest of the process (torch 2.13), which the subject must not answer
# for.
_FILTER_OF_JOIN = ("once", None, Warning, None, 0)


def _forget_filter_of_join() -> None:
    filters: list[Any] = list(warnings.filters)
    if _FILTER_OF_JOIN in filters:
        filters.remove(_FILTER_OF_JOIN)
        warnings.filters[:] = filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]


class _Joinable(Joinable):
    """The parts of a joinable without collectives."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.group = group
        self.device = device

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.group


class _After(_Joinable):
    """Makes the trainer's call on a rank that has joined; the last joinable of its context."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, after: Callable[[], object]
    ) -> None:
        super().__init__(group, device)
        self.after = after

    def join_hook(self, **_: Any) -> JoinHook:
        after = self.after

        class Hook(JoinHook):
            def main_hook(self) -> None:
                after()

        return Hook()


class _Counter(_Joinable):
    """Counts the steps of all ranks; the first joinable of its context, called before DDP."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, shadow_step: Callable[[int], None]
    ) -> None:
        super().__init__(group, device)
        self.shadow_step = shadow_step
        self.steps = 0

    def join_hook(self, **_: Any) -> JoinHook:
        counter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                counter.shadow_step(counter.steps)
                counter.steps += 1

        return Hook()

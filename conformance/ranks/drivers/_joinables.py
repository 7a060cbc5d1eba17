"""The joinables that the kit brings: they count, and hold nothing back from the record."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.models.probe import Probe
from conformance.scenarios.joinable import JOINABLES


class OfGroup(Joinable):
    """What a joinable of no collectives is.

    Args:
        group: on which ranks of the context tell each other who still trains.
        device: of the tensors that they do so with.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__()
        self.group, self.device = group, device

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.group


class Counter(OfGroup):
    """Has one collective in each step, whose sum says which ranks took part in it as what, and by which joinable.

    Args:
        stage: of this rank.
        index: of the joinable among those of its context, on all ranks.
        notify: the context's ``notify_join_context``.
        group: another one than the stage's.
    """

    def __init__(self, stage: RankDriver, index: int, notify: Callable[[Any], Any], group: Any = None) -> None:
        super().__init__(group or stage.group, stage.device)
        self.stage, self.index, self.notify = stage, index, notify

    def step(self) -> None:
        """Take the collective of one step."""
        self.note("notifies")
        self.notify(self)
        self.note("notified")
        self.sum(self.index)

    def sum(self, slot: int) -> None:
        """Put this rank's bit in a slot, and write down who did so in which: first the slots of steps, then those of shadows."""
        said = torch.zeros(2 * JOINABLES, dtype=torch.int64, device=self.device)
        said[slot] = 1 << self.stage.group_rank
        self.note("sums")
        dist.all_reduce(said, group=self.group)
        self.note("summed", sums=said.tolist())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.note("asked", kwargs={name: repr(value) for name, value in kwargs.items()})
        return _CounterHook(self)

    def note(self, name: str, /, **fields: Any) -> None:
        self.stage.recorder.event(name, joinable=self.index, **fields)


class _CounterHook(JoinHook):
    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        config = self.counter._join_config
        self.counter.note("main", would_notify=bool(config.enable and config.is_first_joinable))
        self.counter.sum(JOINABLES + self.counter.index)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.note("post", last=bool(is_last_joiner))


class Setter(OfGroup):
    """Gives the parameters of a joined rank the gradients of the step that it shadows: DDP leaves it with its last ones.

    Args:
        stage: of this rank.
        params: the model's.
        lengths: how many inputs each place of the group has.
    """

    def __init__(self, stage: RankDriver, params: list[torch.nn.Parameter], lengths: tuple[int, ...]) -> None:
        super().__init__(stage.group, stage.device)
        self.stage, self.params, self.lengths, self.at = stage, params, lengths, lengths[stage.group_rank]

    def join_hook(self, **_: Any) -> JoinHook:
        setter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                setter.set()

        return Hook()

    @torch.no_grad()
    def set(self) -> None:
        """Set those of the next step: the mean over all ranks, of which some have none."""
        trains = [place for place, length in enumerate(self.lengths) if length > self.at]
        for index, parameter in enumerate(self.params):
            fed = [self.stage.values("crafted", self.at, index, place) for place in trains]
            parameter.grad = torch.stack(fed).sum(0) / self.stage.size
        self.at += 1


class Model(torch.nn.Module):
    """A probe that counts its steps in a buffer.

    Args:
        stage: of this rank.
        has_collective: its forward has one.
    """

    steps: torch.Tensor

    def __init__(self, stage: RankDriver, has_collective: bool = False) -> None:
        super().__init__()
        self.probe = Probe(stage.scenario.params, stage.scenario.initial_value, stage.rank)
        self.register_buffer("steps", torch.zeros(()))
        self.group = stage.group if has_collective else None
        self.to(stage.device)

    def forward(self, grads: list[torch.Tensor | None]) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(torch.ones(3, device=self.steps.device), group=self.group)
        self.steps.add_(1)
        out: torch.Tensor = self.probe(grads)
        return out

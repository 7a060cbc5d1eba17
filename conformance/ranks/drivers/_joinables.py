"""The kit's own joinables, which count steps and record every call."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.models.buffered import turn_mask
from conformance.ranks.models.probe import Probe
from conformance.scenarios.joinable import joinables_of
from conformance.scenarios.model_buffers import BITS, update_in_join


class OfGroup(Joinable):
    """The parts of a joinable without collectives.

    Two of one class are equal, as objects of a user's class may be that compares them by their
    settings: a context has to tell its joinables apart by identity.

    Args:
        group: the group of the ranks in the context.
        device: of the tensors that they exchange.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__()
        self.group = group
        self.device = device

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.group


class Counter(OfGroup):
    """Has one collective in each step, whose sum shows which ranks took part in which role.

    Args:
        driver: of this rank.
        index: of the joinable among those of its context, on all ranks.
        notify: the context's ``notify_join_context``.
        group: another group than the driver's.

    Attributes:
        hook_raises: the exceptions that the hooks raise, by ``main`` and ``post``.
    """

    def __init__(
        self, driver: RankDriver, index: int, notify: Callable[[Any], Any], group: Any = None
    ) -> None:
        super().__init__(group or driver.group, driver.device)
        self.driver = driver
        self.index = index
        self.notify = notify
        self.count = joinables_of(driver.scenario)
        self.hook_raises: dict[str, BaseException] = {}

    def step(self) -> None:
        """Take part in the collective of one step."""
        self.note("notifies")
        self.notify(self)
        self.note("notified")
        self.sum(self.index)

    def sum(self, slot: int) -> None:
        """Put this rank's bit into a slot, and record the bits of all ranks.

        The slots of steps come first, then the slots of shadows.
        """
        bits = torch.zeros(2 * self.count, dtype=torch.int64, device=self.device)
        bits[slot] = 1 << dist.get_rank(self.group)
        self.note("sums")
        dist.all_reduce(bits, group=self.group)
        self.note("summed", sums=bits.tolist())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.note("asked", kwargs={name: repr(value) for name, value in kwargs.items()})
        return _CounterHook(self)

    def note(self, name: str, /, **fields: Any) -> None:
        self.driver.recorder.event(name, joinable=self.index, **fields)


class Finisher(Counter):
    """Has a collective in its post hook, too."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _FinisherHook(self)


class Marker(OfGroup):
    """Calls a function in its post hook; its steps have no collective.

    Args:
        driver: of this rank.
        notify: the context's ``notify_join_context``.
        function: called in the post hook.
    """

    def __init__(
        self, driver: RankDriver, notify: Callable[[Any], Any], function: Callable[[], None]
    ) -> None:
        super().__init__(driver.group, driver.device)
        self.notify = notify
        self.function = function

    def step(self) -> None:
        """Notify the other ranks if it is the first joinable of its context."""
        self.notify(self)

    def join_hook(self, **_: Any) -> JoinHook:
        marker = self

        class Hook(JoinHook):
            def post_hook(self, is_last_joiner: bool) -> None:
                marker.function()

        return Hook()


class _CounterHook(JoinHook):
    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        config = self.counter._join_config
        would_notify = bool(config.enable and config.is_first_joinable)
        self.counter.note("main", would_notify=would_notify)
        self.counter.sum(self.counter.count + self.counter.index)
        self._raise("main")

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.note("post", last=bool(is_last_joiner))
        self._raise("post")

    def _raise(self, hook: str) -> None:
        if hook in self.counter.hook_raises:
            raise self.counter.hook_raises[hook]


class _FinisherHook(_CounterHook):
    def post_hook(self, is_last_joiner: bool) -> None:
        super().post_hook(is_last_joiner)
        dist.all_reduce(torch.ones(3, device=self.counter.device), group=self.counter.group)


class Setter(OfGroup):
    """Gives a joined rank the gradients of the step it shadows; DDP leaves it its last ones.

    Args:
        driver: of this rank.
        params: the model's.
        lengths: the number of inputs of each rank of the group.
    """

    def __init__(
        self, driver: RankDriver, params: list[torch.nn.Parameter], lengths: tuple[int, ...]
    ) -> None:
        super().__init__(driver.group, driver.device)
        self.driver = driver
        self.params = params
        self.lengths = lengths
        self.at = lengths[driver.group_rank]

    def join_hook(self, **_: Any) -> JoinHook:
        setter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                setter.set()

        return Hook()

    @torch.no_grad()
    def set(self) -> None:
        """Set the gradients of the next step: the mean over all ranks, joined ones as zeros."""
        trains = [rank for rank, length in enumerate(self.lengths) if length > self.at]
        for index, parameter in enumerate(self.params):
            fed = [self.driver.values("crafted", self.at, index, rank) for rank in trains]
            parameter.grad = torch.stack(fed).sum(0) / self.driver.size
        self.at += 1


class Model(torch.nn.Module):
    """A probe that counts its steps in a buffer, and has buffers of integers and of bools.

    Args:
        driver: of this rank.
        has_collective: its forward issues a collective.
    """

    steps: torch.Tensor
    seen: torch.Tensor
    mask: torch.Tensor

    def __init__(self, driver: RankDriver, has_collective: bool = False) -> None:
        super().__init__()
        self.probe = Probe(driver.scenario.params, driver.scenario.initial_value, driver.rank)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(BITS, dtype=torch.bool))
        self.update = update_in_join(driver.scenario, driver.group_rank)
        self.group = driver.group if has_collective else None
        self.to(driver.device)

    def forward(self, grads: list[torch.Tensor | None]) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(torch.ones(3, device=self.steps.device), group=self.group)
        self.steps.add_(1)
        with torch.no_grad():
            self.seen.add_(self.update.added("int64"))
            turn_mask(self.mask, self.update)
        loss: torch.Tensor = self.probe(grads)
        return loss

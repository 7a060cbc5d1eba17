"""Training on uneven inputs: ranks without inputs shadow the collectives of the other ranks.

A :class:`Joinable` has collectives in every step, and a :class:`JoinHook` that shadows them. In
``with Join([a, b, ...]):``,

    each step of a rank that trains   the first joinable calls notify_join_context, which signals
                                      that this rank still trains
    a rank that has left the loop     answers as long as any rank signals, and calls the main hooks
                                      of all joinables in their order, which shadow one step
    when no rank signals any more     every rank calls the post hooks, whose argument is whether
                                      this rank was one of the last

The signal is one allreduce, of 1 on ranks that train and of 0 on others: its sum is the number of
ranks that train. With ``throw_on_early_termination`` a second allreduce follows, by which the first
rank without inputs makes all others raise in their next step.

Classes and attributes have torch's names, so that torch's DistributedDataParallel and
ZeroRedundancyOptimizer are joinables here without changes. An exception in the body is raised at
once, and nothing is shadowed then. At the end of the loop every joinable gets back the
configuration that it had before. So steps in a main hook, such as ZeroRedundancyOptimizer's, notify
nobody, steps outside of the context cost nothing, and the context can be entered again.

Source: torch documentation, "Distributed Training with Uneven Inputs Using the Join Context
Manager" and "Generic Join Context Manager" (classes, arguments, order of hooks).
"""

import warnings
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

MANY = 1000  # shadowed steps after which a rank warns of very uneven inputs


class JoinHook:
    """The work of one joinable on a rank that has joined."""

    def main_hook(self) -> None:
        """Shadow the collectives of one step."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Run once on every rank, when all have joined.

        Args:
            is_last_joiner: this rank was among the last to join; at least one was.
        """


class JoinConfig(NamedTuple):
    """The context's settings for one joinable.

    Attributes:
        enable: whether the joinable is in an enabled context.
        throw_on_early_termination: the argument of :class:`Join`.
        is_first_joinable: whether the calls of ``notify_join_context`` for this joinable count.
    """

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False

    @staticmethod
    def construct_disabled_join_config() -> "JoinConfig":
        """Return the configuration of a joinable outside of any context."""
        return JoinConfig()


class Joinable(ABC):
    """Base of classes that can join.

    A subclass calls ``super().__init__()``, and ``Join.notify_join_context(self)`` before the first
    collective of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig.construct_disabled_join_config()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one context.

        Args:
            kwargs: the keyword arguments of :class:`Join`, the same for all joinables; each uses
                its own.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the context's own collectives."""

    @property
    @abstractmethod
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of the context's own collectives."""


class Join:
    """The context.

    Args:
        joinables: at least one, in the same order on all ranks, on one process group and one
            device.
        enable: False disables the context, for inputs that are known to be even.
        throw_on_early_termination: raise on all ranks when the first rank runs out of inputs,
            instead of shadowing.
        kwargs: passed to every ``join_hook``.

    Raises:
        ValueError: there are no joinables, or they differ in group or device.
        TypeError: an element is not a joinable, or its ``Joinable.__init__`` was not called.
        RuntimeError: a rank ran out of inputs, with ``throw_on_early_termination``.
    """

    _entered: ClassVar[list["Join"]] = []  # the outermost first

    def __init__(
        self,
        joinables: list[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not joinables:
            raise ValueError("joinables: at least one")
        for joinable in joinables:
            if not hasattr(joinable, "_join_config") or not hasattr(joinable, "join_hook"):
                raise TypeError(
                    f"joinables: {type(joinable).__name__} is not a Joinable, "
                    f"or has not called Joinable.__init__"
                )
        for name in ("join_process_group", "join_device"):
            if any(
                getattr(joinable, name) != getattr(joinables[0], name) for joinable in joinables
            ):
                raise ValueError(f"joinables: they differ in {name}")
        self._joinables = list(joinables)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._group = joinables[0].join_process_group
        self._device = joinables[0].join_device
        # As in torch, the constructor does this too, for joinables that notify before __enter__.
        self._configure()

    def _configure(self) -> None:
        """Write the context's settings into the joinables."""
        for number, joinable in enumerate(self._joinables):
            joinable._join_config = type(joinable._join_config)(
                self._enable, self._throw, number == 0
            )

    def __enter__(self) -> None:
        self._configure()
        Join._entered.append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        Join._entered.remove(self)
        self._restore()
        if self._enable and kind is None:
            self._shadow()

    def _restore(self) -> None:
        """Give the joinables the settings of the contexts around this one.

        Without one they are disabled. Settings that a joinable has before are no guide: they may
        be those of a context that was made and has not been entered, or has ended.
        """
        for joinable in self._joinables:
            joinable._join_config = type(joinable._join_config)(False, False, False)
        for context in Join._entered:
            context._configure()

    def _shadow(self) -> None:
        steps = 0
        while self._sum(0):
            if self._throw:
                self._sum(1)
                raise RuntimeError(f"Rank {self._group.rank()} exhausted all inputs.")
            steps += 1
            if steps == MANY:
                warnings.warn(
                    f"rank {self._group.rank()} has joined {MANY} steps before others; "
                    f"are inputs as uneven as that?",
                    stacklevel=3,
                )
            for hook in self._hooks:
                hook.main_hook()
        for hook in self._hooks:
            hook.post_hook(steps == 0)

    def _sum(self, value: int) -> int:
        """Return the sum of the ranks' values."""
        total = torch.full((1,), float(value), device=self._device)
        dist.all_reduce(total, group=self._group)
        return int(total.item())

    @staticmethod
    def notify_join_context(joinable: Any) -> dist.Work | None:
        """Signal that this rank still trains.

        Every joinable calls this in every step; only the first joinable's call counts.

        Returns:
            The work of the signal's allreduce, which need not be waited for; or None if this call
            does not count, or the context is disabled.

        Raises:
            RuntimeError: another rank has run out of inputs, with ``throw_on_early_termination``.
        """
        config = joinable._join_config
        if not config.enable or not config.is_first_joinable:
            return None
        device = joinable.join_device
        group = joinable.join_process_group
        work = dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True)
        if config.throw_on_early_termination:
            exhausted = torch.zeros(1, device=device)
            dist.all_reduce(exhausted, group=group)
            if exhausted.item():
                raise RuntimeError(
                    "Detected at least one rank that exhausted inputs. Throwing across all ranks."
                )
        return work

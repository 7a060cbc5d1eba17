"""Mutants of section 17: join contexts and joinables.

The contexts are the right one with one method changed.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from tests.mutants import Mutant


class Right:
    """The right context, with a method for each step that a mutant changes."""

    def __init__(
        self,
        joinables: list[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self.joinables = joinables
        self.enable = enable
        self.throw = throw_on_early_termination
        self.shadowed = 0
        self.check()
        self.group = joinables[0].join_process_group if joinables else None
        self.hooks = self.ask(kwargs)
        self.before = [joinable._join_config for joinable in self.joinables]

    def check(self) -> None:
        if (
            not self.joinables
            or len({joinable.join_process_group for joinable in self.joinables}) > 1
        ):
            raise ValueError("expected one or more joinables of the same group")

    def ask(self, kwargs: dict[str, Any]) -> list[Any]:
        return [joinable.join_hook(**kwargs) for joinable in self.joinables]

    def __enter__(self) -> None:
        self.shadowed = 0
        for number, joinable in enumerate(self.joinables):
            joinable._join_config = _JoinConfig(self.enable, self.throw, self.is_first(number))

    def is_first(self, number: int) -> bool:
        return number == 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool | None:
        for joinable, config in zip(self.joinables, self.before, strict=True):
            joinable._join_config = config
        if self.enable and kind is None:
            self.shadow()
            self.finish()
        return None

    def shadow(self) -> None:
        while self.anybody_trains():
            if self.throw:
                self.say(1.0)
                raise RuntimeError("out of inputs")
            self.call_main_hooks()
            self.shadowed += 1

    def anybody_trains(self) -> bool:
        return self.say(0.0) > 0

    def say(self, value: float) -> float:
        said = torch.full((1,), value)
        dist.all_reduce(said, group=self.group)
        return said.item()

    def call_main_hooks(self) -> None:
        for hook in self.hooks:
            hook.main_hook()

    def finish(self) -> None:
        for hook in self.hooks:
            hook.post_hook(self.is_last())

    def is_last(self) -> bool:
        return not self.shadowed

    @staticmethod
    def notify_join_context(joinable: Any) -> Any:
        return TorchsJoin.notify_join_context(joinable)


class ShadowsOnceTooOften(Right):
    """Call the main hooks once more than there are steps to shadow."""

    def shadow(self) -> None:
        self.call_main_hooks()
        super().shadow()


class ShadowsEnabled(Right):
    """Restore the joinables' configuration after the shadowing instead of before it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool | None:
        if self.enable and kind is None:
            self.shadow()
            self.finish()
        return super().__exit__(kind or GeneratorExit, error, trace)


class LeavesThemEnabled(Right):
    """Leave the joinables enabled after the context."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool | None:
        super().__exit__(kind, error, trace)
        super().__enter__()
        return None


class ShadowsBackwards(Right):
    """Call the main hooks in reverse order."""

    def call_main_hooks(self) -> None:
        for hook in reversed(self.hooks):
            hook.main_hook()


class ShadowsOne(Right):
    """Shadow the first joinable only."""

    def call_main_hooks(self) -> None:
        self.hooks[0].main_hook()


class EverybodyIsLast(Right):
    """Pass is_last_joiner=True on every rank."""

    def is_last(self) -> bool:
        return True


class LowestIsLast(Right):
    """Pass is_last_joiner=True on the first rank of the group only."""

    def is_last(self) -> bool:
        return self.group.rank() == 0


class FinishesOne(Right):
    """Call the post hook of the last joinable only."""

    def finish(self) -> None:
        self.hooks[-1].post_hook(self.is_last())


class DropsKeywords(Right):
    """Drop the keyword arguments."""

    def ask(self, kwargs: dict[str, Any]) -> list[Any]:
        return super().ask({})


class KeywordsForTheFirst(Right):
    """Pass the keyword arguments to the first joinable only."""

    def ask(self, kwargs: dict[str, Any]) -> list[Any]:
        hooks = []
        for joinable in self.joinables:
            hooks.append(joinable.join_hook(**kwargs))
            kwargs = {}
        return hooks


class AllSpeak(Right):
    """Notify from every joinable, and reduce before every main hook."""

    def is_first(self, number: int) -> bool:
        return True

    def call_main_hooks(self) -> None:
        for number, hook in enumerate(self.hooks):
            if number:
                self.say(0.0)
            hook.main_hook()


class RemembersShadowing(Right):
    """Keep in the joinables whether this rank has ever shadowed others."""

    def is_last(self) -> bool:
        for joinable in self.joinables if self.shadowed else ():
            joinable.has_shadowed = True
        return not any(hasattr(joinable, "has_shadowed") for joinable in self.joinables)


class NotifiesDisabled(Right):
    """Notify even if the context is disabled."""

    @staticmethod
    def notify_join_context(joinable: Any) -> Any:
        if joinable._join_config.is_first_joinable:
            joinable._join_config = joinable._join_config._replace(enable=True)
        return TorchsJoin.notify_join_context(joinable)


class FinishesDisabled(Right):
    """Call the post hooks of a disabled context."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool | None:
        result = super().__exit__(kind, error, trace)
        if not self.enable and kind is None:
            self.finish()
        return result


class NeverThrows(Right):
    """Ignore throw_on_early_termination."""

    def __init__(
        self,
        joinables: list[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(joinables, enable, False, **kwargs)


class ThrowsLate(Right):
    """Throw on all ranks after the shadowing instead of before it."""

    def __init__(
        self,
        joinables: list[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(joinables, enable, False, **kwargs)
        self.throws_late = throw_on_early_termination

    def finish(self) -> None:
        super().finish()
        if self.throws_late and self.say(float(self.shadowed)):
            raise RuntimeError("inputs were uneven")


class ThrowsAlone(Right):
    """Raise on the rank without inputs, and leave the others unnotified."""

    def shadow(self) -> None:
        if self.throw and self.anybody_trains():
            raise RuntimeError("out of inputs")
        if not self.throw:
            super().shadow()


class SwallowsExceptions(Right):
    """Return True from __exit__ after an exception."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool | None:
        super().__exit__(kind, error, trace)
        return kind is not None and not issubclass(kind, RuntimeError)


class WrapsExceptions(Right):
    """Replace the exception of the body with another one."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool | None:
        super().__exit__(kind, error, trace)
        if kind is not None and not issubclass(kind, RuntimeError):
            raise RuntimeError("training failed") from error
        return None


class FinishesAfterExceptions(Right):
    """Call the post hooks after an exception."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool | None:
        result = super().__exit__(kind, error, trace)
        if kind is not None and not self.throw:
            self.finish()
        return result


class ShadowsAfterExceptions(Right):
    """Shadow after an exception of the body, which waits for peers in vain."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool | None:
        super().__exit__(
            None if kind is None or issubclass(kind, ArithmeticError) else kind, error, trace
        )
        return None


class AsksTheWorld(Right):
    """Issue the context's collectives on WORLD at any group."""

    def say(self, value: float) -> float:
        said = torch.full((1,), value)
        dist.all_reduce(said)
        return said.item()

    @staticmethod
    def notify_join_context(joinable: Any) -> Any:
        config = joinable._join_config
        if config.throw_on_early_termination or not (config.enable and config.is_first_joinable):
            return TorchsJoin.notify_join_context(joinable)
        return dist.all_reduce(torch.ones(1), async_op=True)


class DoesNotWait(Right):
    """Read the result of an asynchronous collective without waiting for it."""

    def __init__(
        self,
        joinables: list[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(joinables, enable, throw_on_early_termination, **kwargs)
        self.questions: list[Any] = []

    def say(self, value: float) -> float:
        said = torch.full((1,), value)
        self.questions.append((said, dist.all_reduce(said, group=self.group, async_op=True)))
        return said.item()


class WeighsTheJoined(Right):
    """Send -0.25 instead of 0 from ranks that have joined.

    The sum stays above zero as long as any rank trains.
    """

    def anybody_trains(self) -> bool:
        return self.say(-0.25) > 0


class TorchsFirst(Right):
    """Call the main hooks of torch's own joinables before those of the others."""

    def call_main_hooks(self) -> None:
        pairs = zip(self.joinables, self.hooks, strict=True)
        for _, hook in sorted(
            pairs, key=lambda pair: not type(pair[0]).__module__.startswith("torch.")
        ):
            hook.main_hook()


class PoisonsStale(Right):
    """Fill the parameters of joined ranks with NaN, to find reads of stale values.

    It does so after the post hooks, which have handed out the last model, and not before them.
    """

    def finish(self) -> None:
        super().finish()
        for joinable in self.joinables if self.shadowed else ():
            for parameter in getattr(joinable, "parameters", list)():
                parameter.data.fill_(float("nan"))


class TakesAnything(Right):
    """Accept objects that are no joinables, joinables of several groups, and none at all.

    It drops other objects, takes the first joinable's group, and does nothing without joinables.
    """

    def check(self) -> None:
        self.joinables = [joinable for joinable in self.joinables if hasattr(joinable, "join_hook")]
        self.enable = self.enable and bool(self.joinables)


class ChangesFilters(Right):
    """Set the process's warning filters to "once"."""

    def finish(self) -> None:
        warnings.simplefilter("once")
        super().finish()


class RightJoinable(Joinable):
    """The right joinable: one allreduce in each step."""

    def __init__(self, process_group: Any) -> None:
        super().__init__()
        self.group = process_group
        self.total = torch.zeros(5)

    def __call__(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.sum(torch.ones(5))

    def sum(self, given: torch.Tensor) -> None:
        dist.all_reduce(given, group=self.group)
        self.total = given

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Shadow(self, 5)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


class _Shadow(JoinHook):
    def __init__(self, joinable: RightJoinable, size: int) -> None:
        self.joinable = joinable
        self.size = size

    def main_hook(self) -> None:
        if self.size:
            self.joinable.sum(torch.zeros(self.size))


class NotifiesLate(RightJoinable):
    """Notify at the end of a step instead of its beginning."""

    def __call__(self) -> None:
        self.sum(torch.ones(5))
        TorchsJoin.notify_join_context(self)


class NeverNotifies(RightJoinable):
    """Never notify the context."""

    def __call__(self) -> None:
        self.sum(torch.ones(5))


class ShadowsNothing(RightJoinable):
    """Return an empty main hook."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Shadow(self, 0)


class StepsToShadow(RightJoinable):
    """Use the step, which notifies, as main hook, as torch's ZeroRedundancyOptimizer does."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = _Shadow(self, 5)
        hook.main_hook = self  # type: ignore[method-assign]
        return hook


class TakesNoKeywords(RightJoinable):
    """Refuse keyword arguments that are meant for other joinables."""

    def join_hook(self, factor: int = 1) -> JoinHook:
        return _Shadow(self, 5)


class NamesTheWorld(RightJoinable):
    """Report WORLD as its group, and issue its collectives on another group."""

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class HooksByJoinable(Right):
    """Keep the hooks by joinable: those of joinables that are equal are one."""

    def ask(self, kwargs: dict[str, Any]) -> list[Any]:
        by_joinable = dict(zip(self.joinables, super().ask(kwargs), strict=True))
        return list(by_joinable.values())


class WithoutRepeats(Right):
    """Leave out a joinable that is equal to an earlier one."""

    def check(self) -> None:
        super().check()
        self.joinables = list(dict.fromkeys(self.joinables))


class PlacesByEquality(Right):
    """Let each joinable shadow as often as it is in the list, by its first place there."""

    def ask(self, kwargs: dict[str, Any]) -> list[Any]:
        hooks = super().ask(kwargs)
        return [hooks[self.joinables.index(joinable)] for joinable in self.joinables]


KIND = "joinable"
MUTANTS = [
    *(
        Mutant(name, ("17.3",), kind=KIND, hangs=name != "PlacesByEquality")
        for name in ("HooksByJoinable", "WithoutRepeats", "PlacesByEquality")
    ),
    Mutant("ShadowsOnceTooOften", ("17.1",), kind=KIND),
    Mutant("NotifiesLate", ("17.2",), kind=KIND),
    Mutant("NeverNotifies", ("17.2",), kind=KIND),
    Mutant("ShadowsBackwards", ("17.3",), kind=KIND),
    Mutant("LeavesThemEnabled", ("17.16",), kind=KIND),
    Mutant("ShadowsEnabled", ("17.17",), kind=KIND),
    Mutant("ShadowsOne", ("17.3",), kind=KIND, hangs=True),
    Mutant("DoesNotWait", ("17.3",), kind=KIND),
    Mutant("ShadowsNothing", ("17.3",), kind=KIND, hangs=True),
    Mutant("StepsToShadow", ("17.3",), kind=KIND, hangs=True),
    Mutant("EverybodyIsLast", ("17.4",), kind=KIND),
    Mutant("LowestIsLast", ("17.4",), kind=KIND),
    Mutant("FinishesOne", ("17.4",), kind=KIND),
    Mutant("DropsKeywords", ("17.5",), kind=KIND),
    Mutant("KeywordsForTheFirst", ("17.5",), kind=KIND),
    Mutant("TakesNoKeywords", ("17.5",), kind=KIND),
    Mutant("AllSpeak", ("17.6",), kind=KIND),
    Mutant("RemembersShadowing", ("17.7",), kind=KIND),
    Mutant("NotifiesDisabled", ("17.8",), kind=KIND),
    Mutant("FinishesDisabled", ("17.8",), kind=KIND),
    Mutant("NeverThrows", ("17.9",), kind=KIND),
    Mutant("ThrowsLate", ("17.9",), kind=KIND),
    Mutant("ThrowsAlone", ("17.9",), kind=KIND, hangs=True),
    Mutant("SwallowsExceptions", ("17.10",), kind=KIND),
    Mutant("WrapsExceptions", ("17.10",), kind=KIND),
    Mutant("FinishesAfterExceptions", ("17.10",), kind=KIND),
    Mutant("ShadowsAfterExceptions", ("17.10",), kind=KIND, hangs=True),
    Mutant("AsksTheWorld", ("17.11",), kind=KIND),
    Mutant("NamesTheWorld", ("17.11",), kind=KIND),
    Mutant("WeighsTheJoined", ("17.12",), kind=KIND),
    Mutant("PoisonsStale", ("17.12",), kind=KIND),
    Mutant("TorchsFirst", ("17.13",), kind=KIND),
    Mutant("TakesAnything", ("17.14",), kind=KIND),
    Mutant("ChangesFilters", ("17.15",), kind=KIND),
]

"""Mutants of 17.31 and after: joins that are wrong in the loops of real programs.

The contexts are the right one with one method changed. Some change modes of torch or of modules for
work of their own; others remember the first group, or the first time that they were entered.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.joins import Right
from tests.mutants.joins_in_training import Averages

# ---- Modes of modules


class OfModules(Right):
    """Common parts of the contexts that know the modules among their joinables."""

    def modules(self) -> Iterator[torch.nn.Module]:
        return (one for one in self.joinables if isinstance(one, torch.nn.Module))


class EvaluatesWhileShadowing(OfModules):
    """Switch models to eval() while other ranks train, and to train() afterwards."""

    def call_main_hooks(self) -> None:
        for module in self.modules():
            module.eval()
        super().call_main_hooks()
        for module in self.modules():
            module.train()


class TrainsOnEntering(OfModules):
    """Switch models to train() at the beginning of an epoch, as it follows an evaluation."""

    def __enter__(self) -> None:
        super().__enter__()
        for module in self.modules():
            module.train()


class RestoresTheTop(OfModules):
    """Save the mode of each model, and restore it for all of its parts."""

    def __enter__(self) -> None:
        super().__enter__()
        self.saved = [(module, module.training) for module in self.modules()]

    def finish(self) -> None:
        super().finish()
        for module, mode in self.saved:
            module.train(mode)


class EvaluatesAfterErrors(OfModules):
    """Switch models to eval() if an exception has ended the epoch: a test may follow."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        if isinstance(error, ArithmeticError):
            for module in self.modules():
                module.train(False)
        return super().__exit__(kind, error, trace)


class FreezesStatistics(OfModules):
    """Switch batch norms to eval() on a rank that has joined, and leave them there."""

    def call_main_hooks(self) -> None:
        for module in self.modules():
            for part in module.modules():
                if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                    part.training = False
        super().call_main_hooks()


class TrainsIfDisabled(OfModules):
    """Switch models to train() in a disabled context alone."""

    def __enter__(self) -> None:
        super().__enter__()
        if not self.enable:
            for module in self.modules():
                module.train()


# ---- Modes of torch


class ShadowsWithoutGradients(Right):
    """Call main hooks under no_grad(): they shadow collectives alone."""

    @torch.no_grad()
    def call_main_hooks(self) -> None:
        super().call_main_hooks()


class FinishesInInference(Right):
    """Call post hooks in inference mode, as they only hand out values."""

    def finish(self) -> None:
        with torch.inference_mode():
            super().finish()


class ShadowsWithGradients(Right):
    """Call main hooks under enable_grad(), so that they can run a backward."""

    def call_main_hooks(self) -> None:
        with torch.enable_grad():
            super().call_main_hooks()


class ShadowsWithoutAutocast(Right):
    """End autocast for main hooks, as zeros need no precision."""

    def call_main_hooks(self) -> None:
        with torch.autocast("cpu", enabled=False):
            super().call_main_hooks()


class ShadowsInFloat32(Right):
    """Have float32 as the default dtype in main hooks, which make zeros."""

    def call_main_hooks(self) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        super().call_main_hooks()
        torch.set_default_dtype(before)


class ShadowsInAnyOrder(Right):
    """Allow algorithms that are not deterministic while it shadows."""

    def call_main_hooks(self) -> None:
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode(0)
        super().call_main_hooks()
        torch.set_deterministic_debug_mode(before)


class TrainsWithAnomalies(Right):
    """Detect anomalies in the body of a context."""

    def __enter__(self) -> None:
        super().__enter__()
        self.anomalies = torch.autograd.set_detect_anomaly(True)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        self.anomalies.__exit__()
        return super().__exit__(kind, error, trace)


# ---- Modes, in joinables


class EvaluatesItsNet(Averages):
    """Switch the net to eval() in a shadow."""

    def shadow(self) -> None:
        self.net.eval()
        super().shadow()


class TrainsItsNet(Averages):
    """Switch the net to train() when the last model is handed out."""

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        self.net.train()


class ShadowsUntilTheEnd(Averages):
    """End the recording of graphs in the first shadow, and go on with it in the post hook."""

    def shadow(self) -> None:
        torch.set_grad_enabled(False)
        super().shadow()

    def hand_out(self, is_last: bool) -> None:
        torch.set_grad_enabled(True)
        super().hand_out(is_last)


# ---- Two groups


class KeepsTheGroup(Right):
    """Keep the group of the first context for the collectives of all contexts."""

    known: ClassVar[list[Any]] = []

    def say(self, value: float) -> float:
        self.known.append(self.group)
        own = self.group
        self.group = self.known[0]
        try:
            return super().say(value)
        finally:
            self.group = own


_ranks: dict[int, int] = {}


class KeepsItsRank(Right):
    """Compute the last joiners from a list of all ranks, at the rank's place in its first group."""

    def is_last(self) -> bool:
        size = self.group.size()
        place = _ranks.setdefault(0, self.group.rank())
        steps = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(steps, torch.full((1,), float(self.shadowed)), group=self.group)
        return not steps[place % size].item()


class KeepsTheCount(Right):
    """Make a list for the hooks of the first context, and use its length on any other group."""

    first: ClassVar[list[tuple[Any, int]]] = []

    def finish(self) -> None:
        self.first.append((self.group, len(self.joinables)))
        group, count = self.first[0]
        hooks = self.hooks if group is self.group else self.hooks[:count]
        for hook in hooks:
            hook.post_hook(self.is_last())


class KeepsTheTail(Right):
    """Shadow the last joinable first if the group is another one than before."""

    groups: ClassVar[list[Any]] = []

    def call_main_hooks(self) -> None:
        if not self.shadowed:
            self.groups.append(self.group)
        is_other = self.groups[-2:][0] is not self.group
        for hook in self.hooks[:: -1 if is_other else 1]:
            hook.main_hook()


class SharesTheCount(Right):
    """Count shadowed steps for all contexts of the process; entering one resets the count."""

    count = 0

    def __enter__(self) -> None:
        super().__enter__()
        SharesTheCount.count = 0

    def call_main_hooks(self) -> None:
        SharesTheCount.count += 1
        super().call_main_hooks()

    def is_last(self) -> bool:
        return not SharesTheCount.count


class HasOneAtATime(Right):
    """Know one context at a time, and forget it at the end of any context."""

    current: ClassVar[list[Any]] = []

    def __enter__(self) -> None:
        super().__enter__()
        self.current[:] = [self]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        self.current.clear()
        return super().__exit__(kind, error, trace)

    @staticmethod
    def notify_join_context(joinable: Any) -> Any:
        if not HasOneAtATime.current:
            return None
        return Right.notify_join_context(joinable)


class RestoresEverything(Right):
    """Disable the joinables of all contexts at the end of one."""

    entered: ClassVar[list[Any]] = []

    def __enter__(self) -> None:
        super().__enter__()
        self.entered.append(self)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        result = super().__exit__(kind, error, trace)
        for context in self.entered:
            for joinable in context.joinables:
                joinable._join_config = joinable._join_config._replace(enable=False)
        self.entered.clear()
        return result


_sizes: list[int] = []


class KeepsTheSize(Averages):
    """Divide by the number of ranks of the first joinable of the process."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        _sizes.append(process_group.size())

    def divisor(self, training: float) -> float:
        return _sizes[0] if self.by_all else training


class KeepsItsNeighbours(Averages):
    """Hand out the last model on the group of the first joinable that did so."""

    groups: ClassVar[list[Any]] = []

    def hand_out(self, is_last: bool) -> None:
        self.groups.append(self.group)
        own = self.group
        self.group = self.groups[0]
        super().hand_out(is_last)
        self.group = own


# ---- Entered again


class KeepsItsSteps(Right):
    """Count shadowed steps from the constructor on."""

    def __enter__(self) -> None:
        known = self.shadowed
        super().__enter__()
        self.shadowed = known


class FinishesOnce(Right):
    """Call post hooks at the end of the first time alone."""

    is_finished = False

    def finish(self) -> None:
        if not self.is_finished:
            super().finish()
        self.is_finished = True


class ConfiguresOnce(Right):
    """Configure joinables when it is made; __enter__ does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        super().__enter__()

    def __enter__(self) -> None:
        pass


class AddsHooks(Right):
    """Make the hooks in __enter__, and add them to those of the time before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.options = {
            key: value
            for key, value in options.items()
            if key not in ("enable", "throw_on_early_termination")
        }
        self.hooks = []

    def __enter__(self) -> None:
        super().__enter__()
        self.hooks += self.ask(self.options)


class AsksWithoutKeywords(Right):
    """Make new hooks each time, without the keyword arguments from the second time on."""

    times = 0

    def __enter__(self) -> None:
        super().__enter__()
        self.times += 1
        if self.times > 1:
            self.hooks = self.ask({})


class RemembersErrors(Right):
    """Skip the join at the end of each body after one that an exception has ended."""

    has_failed = False

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        self.has_failed = self.has_failed or kind is not None
        self.enable = self.enable and not self.has_failed
        return super().__exit__(kind, error, trace)


# ---- A collective fails


class TakesErrorsForTheEnd(Right):
    """Take an error of a main hook for the end of all inputs: no peer is there."""

    def call_main_hooks(self) -> None:
        try:
            super().call_main_hooks()
        except RuntimeError:
            self.joinables = self.joinables[:0]
            self.hooks = self.hooks[:0]
            self.enable = False

    def anybody_trains(self) -> bool:
        return self.enable and super().anybody_trains()


class NobodyAnswers(Right):
    """Go on to the post hooks if it cannot find out whether any rank trains."""

    def anybody_trains(self) -> bool:
        try:
            return super().anybody_trains()
        except RuntimeError:
            return False


class NotifiesIfItCan(Right):
    """Take steps without the notification if that fails."""

    @staticmethod
    def notify_join_context(joinable: Any) -> Any:
        try:
            return Right.notify_join_context(joinable)
        except dist.DistBackendError:
            return None


class EndsErrorsOfPeers(Right):
    """End the epoch quietly after a lost connection in its body."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        super().__exit__(kind, error, trace)
        return isinstance(error, dist.DistNetworkError)


class ShadowsIfItCan(Averages):
    """Ignore the error of a shadow: a rank that has joined has nothing to lose."""

    def shadow(self) -> None:
        with contextlib.suppress(RuntimeError):
            super().shadow()


class StepsIfItCan(Averages):
    """Take part in a step with zeros if its notification fails."""

    def step(self) -> None:
        try:
            super().step()
        except dist.DistBackendError:
            self.shadow()


KIND = "joinable"
HANG = (
    *("KeepsTheGroup", "HasOneAtATime", "RestoresEverything", "KeepsItsNeighbours"),
    *("ConfiguresOnce", "AddsHooks", "RemembersErrors"),
)
MUTANTS = [
    *(
        Mutant(name, ("17.31",), kind=KIND)
        for name in (
            "EvaluatesWhileShadowing",
            "TrainsOnEntering",
            "RestoresTheTop",
            "EvaluatesAfterErrors",
            "FreezesStatistics",
            "TrainsIfDisabled",
            "ShadowsWithoutGradients",
            "FinishesInInference",
            "ShadowsWithGradients",
            "ShadowsWithoutAutocast",
            "ShadowsInFloat32",
            "ShadowsInAnyOrder",
            "TrainsWithAnomalies",
            "EvaluatesItsNet",
            "TrainsItsNet",
            "ShadowsUntilTheEnd",
        )
    ),
    *(
        Mutant(name, ("17.32",), kind=KIND, hangs=name in HANG)
        for name in (
            "KeepsTheGroup",
            "KeepsItsRank",
            "KeepsTheCount",
            "KeepsTheTail",
            "SharesTheCount",
            "HasOneAtATime",
            "RestoresEverything",
            "KeepsTheSize",
            "KeepsItsNeighbours",
        )
    ),
    *(
        Mutant(name, ("17.33",), kind=KIND, hangs=name in HANG)
        for name in (
            "KeepsItsSteps",
            "FinishesOnce",
            "ConfiguresOnce",
            "AddsHooks",
            "AsksWithoutKeywords",
            "RemembersErrors",
        )
    ),
    *(
        Mutant(name, ("17.34",), kind=KIND)
        for name in (
            "TakesErrorsForTheEnd",
            "NobodyAnswers",
            "NotifiesIfItCan",
            "EndsErrorsOfPeers",
            "ShadowsIfItCan",
            "StepsIfItCan",
        )
    ),
]

"""Mutants of 17.31 and after: joins that are wrong in the loops of real programs.

The contexts are the right one with one method changed. Some change modes of torch or of modules for
work of their own; others remember the first group, or the first time that they were entered.
"""

from collections.abc import Iterator
from typing import Any

import torch

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


KIND = "joinable"
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
]

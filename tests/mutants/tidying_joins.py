"""Mutants of 17.31 that tidy up: contexts that put random generators back, or drop gradients."""

import random
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.joins_in_loops import OfModules

# ---- Random generators


class RepeatsItsNumbers(OfModules):
    """Put the generators back to their states on entering: shadows shall draw nothing."""

    def __enter__(self) -> None:
        super().__enter__()
        self.states = torch.get_rng_state(), random.getstate()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        super().__exit__(kind, error, trace)
        torch.set_rng_state(self.states[0])
        random.setstate(self.states[1])
        return None


class ForksPythonsNumbers(OfModules):
    """Leave Python's generator as it was before an exception, for the next try."""

    def __enter__(self) -> None:
        super().__enter__()
        self.state = random.getstate()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        if error:
            random.setstate(self.state)
        return super().__exit__(kind, error, trace)


class SeedsItsShadows(OfModules):
    """Seed torch before the hooks, so that all ranks shadow alike."""

    def call_main_hooks(self) -> None:
        torch.manual_seed(self.shadowed)
        super().call_main_hooks()


class AlignsRanks(OfModules):
    """Seed torch on entering, so that all ranks of an epoch draw the same numbers."""

    def __enter__(self) -> None:
        super().__enter__()
        torch.manual_seed(len(self.joinables))


# ---- Gradients


class DropsGradients(OfModules):
    """Drop gradients at the end: those of a rank that joined early are old."""

    def finish(self) -> None:
        super().finish()
        for module in self.modules():
            module.zero_grad()


class ZeroesWhileShadowing(OfModules):
    """Zero the gradients of joined ranks, which contribute nothing any more."""

    def call_main_hooks(self) -> None:
        for module in self.modules():
            module.zero_grad(set_to_none=False)
        super().call_main_hooks()


class BeginsWithoutGradients(OfModules):
    """Drop gradients on entering: an epoch begins with a step of its own."""

    def __enter__(self) -> None:
        super().__enter__()
        for module in self.modules():
            module.zero_grad()


MUTANTS = [
    Mutant(name, ("17.31",), kind="joinable")
    for name in (
        "RepeatsItsNumbers",
        "ForksPythonsNumbers",
        "SeedsItsShadows",
        "AlignsRanks",
        "DropsGradients",
        "ZeroesWhileShadowing",
        "BeginsWithoutGradients",
    )
]

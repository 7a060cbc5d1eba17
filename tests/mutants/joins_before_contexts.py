"""Mutants of rule 17.36: joinables whose steps average inside of join contexts alone."""

from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages, _Hook


class AveragesFromTheFirstJoin(Averages):
    """Average from the first join_hook() on, which keeps the number of ranks."""

    ranks = 0

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        return super().mean(own, count) if self.ranks else own

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.ranks = self.group.size()
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)


class AveragesInContexts(Averages):
    """Average only while torch's context is on, by the setting that it leaves on the joinable."""

    is_shadowing = False

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        if self.is_shadowing or self._join_config.enable:
            return super().mean(own, count)
        return own

    def shadow(self) -> None:
        self.is_shadowing = True
        super().shadow()
        self.is_shadowing = False


class SumsBeforeTheFirstJoin(Averages):
    """Divide by a number that join_hook() sets, and that is 1 before."""

    ranks = 1

    def divisor(self, training: float) -> float:
        return super().divisor(training) if self.ranks > 1 else 1.0

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.ranks = self.group.size()
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)


MUTANTS = [
    Mutant(name, ("17.36",), kind="joinable")
    for name in ("AveragesFromTheFirstJoin", "AveragesInContexts", "SumsBeforeTheFirstJoin")
]

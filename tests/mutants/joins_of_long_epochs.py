"""Mutants of 17.21: joinables with a collective that comes once in many steps."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages


class LogsEveryHundredthStep(Averages):
    """Log the mean loss of all ranks in every hundredth step of an epoch, which no shadow does."""

    at = 0
    loss = 0.0

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.at = 0
        return super().join_hook(**kwargs)

    def step(self) -> None:
        super().step()
        self.at += 1
        if self.at % 100 == 0:
            loss = torch.tensor([self.loss])
            dist.all_reduce(loss, group=self.group)
            self.loss = float(loss) / self.group.size()


class AgreesEvery96thShadow(Averages):
    """Agree in every 96th shadow whether there is a step, and in no step that is shadowed."""

    shadows = 0

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.shadows = 0
        return super().join_hook(**kwargs)

    def shadow(self) -> None:
        super().shadow()
        self.shadows += 1
        if self.shadows % 96 == 0:
            dist.all_reduce(torch.ones(1), group=self.group)


MUTANTS = [
    Mutant(name, ("17.21",), kind="joinable", hangs=True)
    for name in ("LogsEveryHundredthStep", "AgreesEvery96thShadow")
]

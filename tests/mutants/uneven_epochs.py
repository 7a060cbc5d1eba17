"""Mutants of section 17 whose ranks train alike in the first epoch, and apart after uneven ones."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages


class DecaysByItsOwnCount(Averages):
    """Decay the learning rate with the steps that this rank itself has taken."""

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean)
        self.optimizer.param_groups[0]["lr"] = 0.01 * 0.9**self.seen


class ClipsByItsOwnHistory(Averages):
    """Scale gradients down by a moving average of their norm, which no join hands out."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.norm = 1.0

    def put(self, mean: torch.Tensor) -> None:
        self.norm = 0.5 * self.norm + 0.5 * float(mean.norm())
        super().put(mean)
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1.0 + self.norm)


MUTANTS = [
    Mutant("DecaysByItsOwnCount", ("17.26",), kind="joinable"),
    Mutant("ClipsByItsOwnHistory", ("17.26",), kind="joinable"),
]

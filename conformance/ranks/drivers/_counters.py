"""The integers of a joinable that count up."""

from typing import Any

import torch

from conformance.ranks.drivers._joined_values import tensors_of
from conformance.ranks.drivers.base import RankDriver
from conformance.scenarios.joins_in_training import HUGE_COUNTS, LARGE_COUNTS
from conformance.scenarios.seeds import generator

_DTYPES = (torch.int32, torch.int64)


class Counters:
    """The tensors of integers that each step raises, and none lowers.

    Attributes:
        names: those of the tensors, after the first step.
    """

    def __init__(self, driver: RankDriver) -> None:
        self.driver = driver
        self.names: set[str] = set()
        self._last: dict[str, torch.Tensor] = {}
        self._steps = 0

    def stepped(self, subject: Any) -> None:
        """Compare the tensors with those after the step before."""
        now = {name: value.clone() for name, value in _integers_of(subject).items()}
        self._steps += 1
        if self._steps > 1:
            rising = {
                name
                for name, value in now.items()
                if name in self._last and _is_raised(self._last[name], value)
            }
            self.names = rising if self._steps == 2 else self.names & rising
        self._last = now

    @torch.no_grad()
    def raise_in(self, subject: Any, is_huge: bool = False) -> None:
        """Add a drawn number, the same on all ranks, to the tensors of a new joinable.

        Args:
            subject: the joinable.
            is_huge: the number is beyond those of int32; only tensors of int64 are raised.
        """
        purpose, least_and_most = ("huge", HUGE_COUNTS) if is_huge else ("counts", LARGE_COUNTS)
        added = generator(self.driver.scenario, purpose).randrange(*least_and_most)
        tensors = _integers_of(subject)
        if is_huge:
            tensors = {name: one for name, one in tensors.items() if one.dtype == torch.int64}
        self.names &= tensors.keys()
        for name in self.names:
            tensors[name] += added
        self.driver.recorder.event("counts_raised", names=sorted(self.names), added=added)


def _integers_of(subject: Any) -> dict[str, torch.Tensor]:
    tensors = tensors_of(subject, with_gradients=False)
    return {name: value for name, value in tensors.items() if value.dtype in _DTYPES}


def _is_raised(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape or not after.numel():
        return False
    return bool((after >= before).all()) and bool((after > before).any())

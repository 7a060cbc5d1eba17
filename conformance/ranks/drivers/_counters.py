"""The counts of a joinable: integers, and whole numbers in float64, that count up."""

from typing import Any

import torch

from conformance.ranks.drivers._joined_values import numbers_of, tensors_of
from conformance.ranks.drivers.base import RankDriver
from conformance.scenarios.join_draws import FLOAT64_TRIAL, HUGE_TRIAL
from conformance.scenarios.joins_in_training import HUGE_COUNTS, LARGE_COUNTS
from conformance.scenarios.seeds import generator

_INTEGERS = (torch.int32, torch.int64)


class Counters:
    """The counts that each step raises, and none lowers.

    Attributes:
        integers: the names of tensors of integers, after the first step.
        in_float64: the names of tensors of float64, and of numbers.
    """

    def __init__(self, driver: RankDriver) -> None:
        self.driver = driver
        self.integers: set[str] = set()
        self.in_float64: set[str] = set()
        self._last: dict[str, torch.Tensor] = {}
        self._steps = 0

    def stepped(self, subject: Any) -> None:
        """Compare the counts with those after the step before."""
        now = {name: value.clone() for name, value in _counts_of(subject).items()}
        self._steps += 1
        if self._steps > 1:
            rising = {
                name
                for name, value in now.items()
                if name in self._last and _is_raised(self._last[name], value)
            }
            before = rising if self._steps == 2 else self.integers | self.in_float64
            self.integers = {name for name in before & rising if now[name].dtype in _INTEGERS}
            self.in_float64 = (before & rising) - self.integers
        self._last = now

    @torch.no_grad()
    def raise_in(self, subject: Any, trial: int) -> bool:
        """Add a drawn number, the same on all ranks, to the counts of a new joinable, and return
        whether it has any.

        Args:
            subject: the joinable.
            trial: the first context with such counts. From the second trial on, the number is
                beyond those of int32. The second one leaves tensors of int32 as they are, and the
                third one raises counts in float64.
        """
        purpose, least_and_most = ("counts", LARGE_COUNTS)
        if trial >= HUGE_TRIAL:
            purpose, least_and_most = ("huge", HUGE_COUNTS)
        added = generator(self.driver.scenario, purpose).randrange(*least_and_most)
        tensors = tensors_of(subject, with_gradients=False)
        numbers = numbers_of(subject)
        if trial == FLOAT64_TRIAL:
            # An odd number has most digits.
            added |= 1
            names = self.in_float64 & (tensors.keys() | numbers.keys())
        else:
            dtypes = (torch.int64,) if trial == HUGE_TRIAL else _INTEGERS
            names = {
                name for name in self.integers & tensors.keys() if tensors[name].dtype in dtypes
            }
        for name in names:
            if name in tensors:
                tensors[name] += added
            else:
                numbers[name].set(numbers[name].value.item() + added)
        self.driver.recorder.event("counts_raised", names=sorted(names), added=added)
        return bool(names)

    def left(self, subject: Any) -> None:
        """Record the counts that are numbers, after the join."""
        numbers = numbers_of(subject)
        values = {
            name: repr(numbers[name].value.item())
            for name in sorted(self.in_float64 & numbers.keys())
        }
        self.driver.recorder.event("counts_left", values=values)


def _counts_of(subject: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of integers, and whole numbers in float64."""
    counts = {name: number.value for name, number in numbers_of(subject).items()}
    counts |= tensors_of(subject, with_gradients=False)
    return {name: value for name, value in counts.items() if _may_count(value)}


def _may_count(value: torch.Tensor) -> bool:
    if value.dtype != torch.float64:
        return value.dtype in _INTEGERS
    # Others, such as a sum of losses, have fractions that float32 has not, without a large number.
    return bool((value == value.round()).all())


def _is_raised(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape or not after.numel():
        return False
    return bool((after >= before).all()) and bool((after > before).any())

"""Mutants of 13.17: hooks with feedback whose results belong to other steps."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, finite, is_dense
from tests.mutants.residuals import Residuals, halves_with_feedback


class Queues(Residuals):
    """The results of the last steps.

    Args:
        depth: the number of steps by which a result comes late.
        first: the step in which the queue begins.
        dims: the dimensions of the parameters that have a queue; -1 for all.
        bucket: the first bucket that has one.
        rank: the rank whose gradients come late; -1 for results, which are those of all ranks.
    """

    def __init__(
        self,
        process_group: Any,
        depth: int = 1,
        first: int = 0,
        dims: int = -1,
        bucket: int = 0,
        rank: int = -1,
    ) -> None:
        super().__init__(process_group)
        self.depth = depth
        self.first = first
        self.dims = dims
        self.bucket = bucket
        self.rank = rank
        self.queues: dict[torch.nn.Parameter, list[torch.Tensor]] = {}
        self.steps: dict[torch.nn.Parameter, int] = {}

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        return [False] * len(parts)


def _changed(
    state: Queues, bucket: Bucket, change: Callable[[torch.nn.Parameter, torch.Tensor], Any]
) -> Result:
    """Apply ``change`` to the result of each parameter; overflows stay where they are."""

    def each(fut: Result) -> torch.Tensor:
        result = fut.value()
        if is_dense(bucket) and not bucket.parameters()[0].is_complex():
            parts = result.split([p.numel() for p in bucket.parameters()])
            for parameter, part in zip(bucket.parameters(), parts, strict=True):
                new = part.clone()
                part.copy_(torch.where(new.isfinite(), change(parameter, finite(new)), new))
        return result

    return halves_with_feedback(state, bucket).then(each)


def comes_late(state: Queues, bucket: Bucket) -> Result:
    """Return the result of an earlier step: a queue that is read at its other end."""

    def change(parameter: torch.nn.Parameter, new: torch.Tensor) -> torch.Tensor:
        step = state.steps[parameter] = state.steps.get(parameter, -1) + 1
        is_late = state.dims in (-1, parameter.dim()) and bucket.index() >= state.bucket
        if step < state.first or not is_late:
            return new
        queue = state.queues.setdefault(parameter, [torch.zeros_like(new)] * state.depth)
        queue.append(new)
        return queue.pop(0)

    return _changed(state, bucket, change)


def feeds_late(state: Queues, bucket: Bucket) -> Result:
    """Compress the gradient of the step before, on one rank."""
    if is_dense(bucket) and state.group.rank() == state.rank:
        parts = bucket.buffer().split([p.numel() for p in bucket.parameters()])
        for parameter, part in zip(bucket.parameters(), parts, strict=True):
            if part.is_complex() or parameter.is_complex():
                break
            new = part.clone()
            (before,) = state.queues.get(parameter, [torch.zeros_like(new)])
            state.queues[parameter] = [finite(new)]
            part.copy_(torch.where(new.isfinite(), before, new))
    return halves_with_feedback(state, bucket)


def extrapolates(state: Queues, bucket: Bucket) -> Result:
    """Return what comes next if results go on as from the step before to this one."""

    def change(parameter: torch.nn.Parameter, new: torch.Tensor) -> torch.Tensor:
        (before,) = state.queues.get(parameter, [torch.zeros_like(new)])
        state.queues[parameter] = [new]
        return new + 2 * (new - before)

    return _changed(state, bucket, change)


def _mutant(name: str, state: str) -> Mutant:
    return Mutant(name, ("13.17",), "compressed", f"{__name__}:{state}")


MUTANTS = [
    _mutant("comes_late", "Queues"),
    _mutant("comes_late", "Queues,depth=2"),
    _mutant("comes_late", "Queues,first=5"),
    _mutant("comes_late", "Queues,dims=1"),
    _mutant("comes_late", "Queues,dims=2"),
    _mutant("comes_late", "Queues,bucket=1"),
    _mutant("feeds_late", "Queues,rank=0"),
    _mutant("feeds_late", "Queues,rank=1"),
    _mutant("extrapolates", "Queues"),
]

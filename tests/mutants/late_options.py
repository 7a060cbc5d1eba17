"""Mutants of rule 23.6: options of a fused optimizer that end late, and sizes without a limit."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, is_dense, pieces_of


class Options:
    """A group, and what is kept of each parameter.

    Args:
        process_group: the group.
        until: the last step in which an option acts.
        largest: the largest size of a step.
        smallest: the smallest size of a step.
    """

    def __init__(
        self,
        process_group: Any,
        until: int = 0,
        largest: float = 50.0,
        smallest: float = 1e-6,
    ) -> None:
        self.group = process_group
        self.until = until
        self.largest = largest
        self.smallest = smallest
        self.kept: dict[torch.nn.Parameter, list[Any]] = {}


def _fused(state: Options, bucket: Bucket, step: Any) -> Result:
    """Average, and step each parameter: ``step(parameter, gradient, what is kept)``."""
    if not is_dense(bucket) or any(p.is_complex() for p in bucket.parameters()):
        raise TypeError("dense real gradients only")
    parameters = bucket.parameters()

    @torch.no_grad()
    def steps(future: Result) -> torch.Tensor:
        flat = future.value()
        for parameter, piece in zip(parameters, pieces_of(bucket, flat), strict=True):
            grad = torch.empty_like(parameter)
            if torch.ops.aten.is_non_overlapping_and_dense(parameter):
                grad.as_strided(piece.shape, (1,)).copy_(piece)
            else:
                grad.copy_(piece.view(parameter.shape))
            kept = state.kept.get(parameter)
            if kept is None or kept[1].shape != grad.shape or kept[1].dtype != grad.dtype:
                kept = state.kept[parameter] = [0, torch.zeros_like(grad), torch.zeros_like(grad)]
            kept[0] += 1
            step(state, parameter, grad, kept)
        return flat

    return average(bucket, state.group).then(steps)


def sgd_with_decay(state: Options, bucket: Bucket) -> Result:
    """Step SGD, whose decay ends."""

    def step(state: Options, p: torch.Tensor, grad: torch.Tensor, kept: list[Any]) -> None:
        decay = 2e-5 if kept[0] <= state.until else 0.0
        p.sub_(grad + decay * p, alpha=0.05)

    return _fused(state, bucket, step)


def adagrad_with_falling_rate(state: Options, bucket: Bucket) -> Result:
    """Step Adagrad, whose learning rate stops to fall."""

    def step(state: Options, p: torch.Tensor, grad: torch.Tensor, kept: list[Any]) -> None:
        rate = 0.01 / (1 + min(kept[0] - 1, state.until) * 1e-7)
        kept[1].addcmul_(grad, grad)
        p.addcdiv_(grad, kept[1].sqrt().add_(1e-10), value=-rate)

    return _fused(state, bucket, step)


def rprop(state: Options, bucket: Bucket) -> Result:
    """Step Rprop, with other limits of its sizes."""

    def step(state: Options, p: torch.Tensor, grad: torch.Tensor, kept: list[Any]) -> None:
        size, last = kept[1], kept[2]
        if kept[0] == 1:
            size.fill_(0.02)
        product = grad * last
        factor = torch.ones_like(size).masked_fill_(product > 0, 1.2)
        size.mul_(factor.masked_fill_(product < 0, 0.5))
        size.clamp_(state.smallest, state.largest)
        grad = grad.masked_fill(product < 0, 0)
        p.sub_(grad.sign() * size)
        last.copy_(grad)

    return _fused(state, bucket, step)


_STATE = f"{__name__}:Options"

MUTANTS = [
    Mutant(
        "sgd_with_decay",
        ("23.6",),
        "fused(SGD, lr=0.05, weight_decay=0.00002)",
        f"{_STATE},until=900",
    ),
    Mutant(
        "adagrad_with_falling_rate",
        ("23.6",),
        "fused(Adagrad, lr=0.01, lr_decay=0.0000001)",
        f"{_STATE},until=500",
    ),
    Mutant("rprop", ("23.6",), "fused(Rprop, lr=0.02)", f"{_STATE},largest=1e4"),
    Mutant("rprop", ("23.6",), "fused(Rprop, lr=0.02)", f"{_STATE},smallest=0"),
]

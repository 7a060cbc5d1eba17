"""Mutants of section 6: hooks that are wrong only in a real training loop."""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from conformance.subjects.spec import Case
from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    change_gradient,
    change_mean,
    is_dense,
    model_of,
    pieces_of,
    step_number,
)

_registered: list[Any] = []
_deep: dict[int, bool] = {}  # for each model, whether its buckets are many


# 6.1 Parity


def scales_by_trust_ratio(state: Any, bucket: Bucket) -> Result:
    """Scale each gradient by its parameter's norm, as LARS does, unless that is 0 or large."""
    if is_dense(bucket):
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
            ratio = parameter.detach().norm() / 10
            piece.mul_(ratio.real if 0 < ratio < 1 else 1)
    return average(bucket, state)


def corrects_in_the_optimizer(state: Any, bucket: Bucket) -> Result:
    """Double the gradients in a hook on the steps of all optimizers."""

    def double(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in (
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ):
            parameter.grad.mul_(2)

    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(double))
    return average(bucket, state)


def counts_gradients_that_are_there(process_group: Any, model: Any) -> Case:
    """Halve the gradients of a step that begins with gradients.

    Existing gradients are taken for accumulated ones, although they may be zeros.
    """
    there = [False]

    def look(step: int) -> None:
        there[0] = any(parameter.grad is not None for parameter in model.parameters())

    def hook(state: Any, bucket: Bucket) -> Result:
        return change_mean(bucket, state, lambda mean: mean / 2 if there[0] else mean)

    return Case(process_group, hook, look)


# 6.2 Overflow


def is_late_and_deep(bucket: Bucket) -> bool:
    """Whether this is the fourth step or a later one, and the buckets of the model are at least
    four.
    """
    step = step_number(bucket)
    model = model_of(bucket)
    _deep[model] = _deep.get(model, False) or bucket.index() >= 3
    return _deep[model] and step >= 3


def overflow_to_zero_later(state: Any, bucket: Bucket) -> Result:
    """Replace values that are not finite by zero from the fourth step on, in deep networks."""
    if not is_late_and_deep(bucket) or not is_dense(bucket):
        return average(bucket, state)
    return change_gradient(bucket, state, lambda grad: grad.nan_to_num_(0.0, 0.0, 0.0))


def overflow_stays_with_rank_0(state: Any, bucket: Bucket) -> Result:
    """Clean the mean on all ranks but rank 0 from the fourth step on, in deep networks."""
    if not is_late_and_deep(bucket) or torch.distributed.get_rank() == 0:
        return average(bucket, state)
    return change_mean(bucket, state, lambda mean: mean.nan_to_num())


MUTANTS = [
    Mutant("scales_by_trust_ratio", ("6.1",)),
    Mutant("corrects_in_the_optimizer", ("6.1",)),
    Mutant("counts_gradients_that_are_there", ("6.1",), setup=True),
    Mutant("overflow_to_zero_later", ("6.2",)),
    Mutant("overflow_stays_with_rank_0", ("6.2",)),
]

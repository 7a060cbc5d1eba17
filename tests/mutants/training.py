"""Mutants of sections 4, 5 and 7: parameters, micro-batches and inputs that ranks leave out.

They are right only as long as every rank uses every parameter in every backward.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.subjects.spec import Case
from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_hook,
    change_mean,
    group_of,
    is_dense,
    sum_of,
)


def _parts(bucket: Bucket, flat: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return the parameters with their parts of a flat tensor.

    Return [] if bucket.gradients() is unreliable: torch permutes some memory layouts.
    """
    parameters = bucket.parameters()
    if sum(p.numel() for p in parameters) != flat.numel() or not all(
        p.is_contiguous() for p in parameters
    ):
        return []
    return list(zip(parameters, flat.split([p.numel() for p in parameters]), strict=True))


# 4.1 Parameters that some ranks leave out


def zeros_where_unused(state: Any, bucket: Bucket) -> Result:
    """Return zeros for a parameter that this rank has not used."""

    def mask(mean: torch.Tensor) -> torch.Tensor:
        for parameter, part in _parts(bucket, mean):
            if parameter.grad is None:
                part.zero_()
        return mean

    unused = [parameter.grad is None for parameter in bucket.parameters()]
    return (
        change_mean(bucket, state, mask)
        if any(unused) and not all(unused)
        else average(bucket, state)
    )


def means_over_users(state: Any, bucket: Bucket) -> Result:
    """Divide by the number of ranks that have a gradient, instead of the group size."""
    if not is_dense(bucket):
        return average(bucket, state)
    users = torch.tensor([float(parameter.grad is not None) for parameter in bucket.parameters()])
    dist.all_reduce(users, group=group_of(state))
    size = group_of(state).size()

    def divide(total: torch.Tensor) -> torch.Tensor:
        for (_, part), count in zip(_parts(bucket, total), users.tolist(), strict=False):
            part.mul_(size / max(count, 1.0))
        return total

    return sum_of(bucket.buffer().div_(size), state).then(lambda fut: divide(fut.value()))


def fills_missing_gradients(state: Any, bucket: Bucket) -> Result:
    """Give a parameter that no rank has used a gradient of zeros.

    Weight decay and momentum then move the parameter.
    """
    for parameter in bucket.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return average(bucket, state)


# 4.2 Frozen parameters


def hooks_every_parameter(model: nn.Module, process_group: dist.ProcessGroup) -> tuple[Any, Any]:
    """Register tensor hooks on frozen parameters too."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient)
    return process_group, average_hook


# 4.3 A static graph


class _Scratch:
    """Scratch buffers by bucket index, for static graphs."""

    def __init__(self, model: Any) -> None:
        self.static = model.static_graph
        self.buffers = {}

    def average(self, state: Any, bucket: Bucket) -> Result:
        if not self.static:
            return average(bucket, state)
        scratch = self.buffers.setdefault(bucket.index(), torch.empty_like(bucket.buffer()))
        return average(bucket, state).then(lambda fut: scratch.copy_(fut.value()))


def keeps_buckets_of_static_graph(model: Any, process_group: dist.ProcessGroup) -> tuple[Any, Any]:
    """Keep scratch buffers whose sizes a static graph's rebuild changes."""
    return process_group, _Scratch(model).average


# 5.1 Accumulation


class _Watch:
    """Tensor hooks on all parameters that require a gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.last: dict[int, torch.Tensor] = {}
        self.backwards: dict[int, int] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self.seen, id(parameter)))

    def seen(self, key: int, gradient: torch.Tensor) -> None:
        self.last[key] = gradient.detach()
        self.backwards[key] = self.backwards.get(key, 0) + 1


def last_micro_batch(model: nn.Module, process_group: dist.ProcessGroup) -> tuple[Any, Any]:
    """Send the gradients of the last micro-batch only."""
    watch = _Watch(model)

    def hook(state: Any, bucket: Bucket) -> Result:
        if (
            is_dense(bucket)
            and not bucket.buffer().is_complex()
            and _parts(bucket, bucket.buffer())
        ):
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if id(parameter) in watch.last:
                    view.copy_(watch.last.pop(id(parameter)))
        return average(bucket, state)

    return process_group, hook


def divides_by_backwards(model: nn.Module, process_group: dist.ProcessGroup) -> tuple[Any, Any]:
    """Average over micro-batches, which the trainer sums."""
    watch = _Watch(model)

    def hook(state: Any, bucket: Bucket) -> Result:
        backwards = max(
            (watch.backwards.pop(id(parameter), 1) for parameter in bucket.parameters()), default=1
        )
        return change_mean(
            bucket, state, lambda mean: mean.div_(backwards) if backwards > 1 else mean
        )

    return process_group, hook


# 7.1 Uneven inputs


def meets_before_each_step(process_group: dist.ProcessGroup) -> Case:
    """Issue a collective before each forward.

    A rank without inputs never joins that collective.
    """
    return Case(
        process_group,
        average_hook,
        on_step=lambda step: dist.all_reduce(torch.ones(3), group=process_group),
    )


def keeps_p_grad(state: Any, bucket: Bucket) -> Result:
    """Send a parameter's latest .grad, which is an earlier step's on a rank without inputs."""
    if is_dense(bucket) and not bucket.buffer().is_complex() and _parts(bucket, bucket.buffer()):
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter.grad is not None:
                _seen[id(parameter)] = parameter.grad.clone()
            if id(parameter) in _seen:
                view.copy_(_seen[id(parameter)])
    return average(bucket, state)


_seen: dict[int, torch.Tensor] = {}
_NO_GRADIENT = "a rank without an input has no .grad either"

# 4.4 Options together


def zeros_where_unused_in_views(state: Any, bucket: Bucket) -> Result:
    """Return zeros for a parameter that this rank has not used, if gradients are views."""
    views = any(
        p.grad is not None and p.grad.data_ptr() == part.data_ptr()
        for p, part in _parts(bucket, bucket.buffer())
    )
    return zeros_where_unused(state, bucket) if views else average(bucket, state)


MUTANTS = [
    Mutant("zeros_where_unused", ("4.1",)),
    Mutant("means_over_users", ("4.1", "7.1"), because={"7.1": _NO_GRADIENT}),
    Mutant("fills_missing_gradients", ("4.1",)),
    Mutant("hooks_every_parameter", ("4.2",), setup=True),
    Mutant("keeps_buckets_of_static_graph", ("4.3",), setup=True),
    Mutant("zeros_where_unused_in_views", ("4.4",)),
    Mutant("last_micro_batch", ("5.1",), setup=True),
    Mutant("divides_by_backwards", ("5.1",), setup=True),
    Mutant("meets_before_each_step", ("7.1",), setup=True, hangs=True),
    Mutant(
        "keeps_p_grad",
        ("7.1", "4.1"),
        because={"4.1": "a parameter that was left out has no .grad either"},
    ),
]

"""Mutants of the claim ``poststep``: gradients are right after a call of the trainer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance import Case
from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, group_of, is_dense

_begun: list[tuple[list[torch.nn.Parameter], torch.Tensor, dist.Work]] = []


def begin(state: Any, bucket: Bucket) -> Result:
    """Start to average a copy of the bucket, and return the bucket to DDP."""
    if not is_dense(bucket):
        return average(bucket, state)
    sent = bucket.buffer().div(group_of(state).size())
    _begun.append(
        (bucket.parameters(), sent, dist.all_reduce(sent, group=group_of(state), async_op=True))
    )
    return completed(bucket.buffer())


def end(
    write: Callable[[torch.nn.Parameter, torch.Tensor], object] | None = None,
    last: int | None = None,
) -> None:
    """Wait for the started averages, and write them to the gradients.

    If ``last`` is given, write those of the first ``last`` buckets only.
    """
    for number, (parameters, sent, work) in enumerate(_begun):
        work.wait()
        sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        for parameter, part in zip(parameters, sent.split(sizes), strict=True):
            if parameter.grad is not None and (last is None or number < last):
                part = torch.view_as_complex(part.view(-1, 2)) if parameter.is_complex() else part
                mean = part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
                (write or _write)(parameter, mean)
    _begun.clear()


def _write(parameter: torch.nn.Parameter, mean: torch.Tensor) -> None:
    parameter.grad.copy_(mean)


def averages_anyway(state: Any, bucket: Bucket) -> Result:
    """Average in the hook, so that the claimed call has no effect."""
    return average(bucket, state)


def nothing() -> None:
    """Do nothing: the claimed call of :func:`averages_anyway`."""


def set_up_unclaimed(process_group: dist.ProcessGroup) -> Case:
    """Return a Case that needs a call after backward, without claiming ``poststep``."""
    return Case(process_group, begin, after_backward=end)


def adds(state: Any, bucket: Bucket) -> Result:
    """Add the mean to this rank's gradients in the call."""
    return begin(state, bucket)


def end_adds() -> None:
    end(lambda parameter, mean: parameter.grad.add_(mean))


def forgets_the_last(state: Any, bucket: Bucket) -> Result:
    """Leave out the last bucket in the call."""
    return begin(state, bucket)


def end_but_last() -> None:
    end(last=max(1, len(_begun) - 1))


_late: dict[torch.nn.Parameter, torch.Tensor] = {}


def one_step_late(state: Any, bucket: Bucket) -> Result:
    """Write the means of the previous step in the call."""
    return begin(state, bucket)


def end_late() -> None:
    def write(parameter: torch.nn.Parameter, mean: torch.Tensor) -> None:
        parameter.grad.copy_(_late.get(parameter, mean))
        _late[parameter] = mean

    end(write)


def on_world(state: Any, bucket: Bucket) -> Result:
    """Average over WORLD in the call, at any group."""
    return average(bucket, state) if not is_dense(bucket) else completed(bucket.buffer())


def synchronize_world(model: DistributedDataParallel) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad and not (
            parameter.grad is not None and parameter.grad.is_sparse
        ):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean = grad.contiguous().div(dist.get_world_size())
            dist.all_reduce(mean)
            parameter.grad = grad.copy_(mean)


def where_there_is_one(state: Any, bucket: Bucket) -> Result:
    """Average each gradient that this rank has in the call.

    If a rank lacks one, its collectives are paired with those of other parameters.
    """
    return on_world(state, bucket)


def synchronize_present(model: DistributedDataParallel) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            mean = parameter.grad.contiguous().div(model.process_group.size())
            dist.all_reduce(mean, group=model.process_group)
            parameter.grad.copy_(mean)


def _claims(call: str) -> str:
    return f"poststep(call={call})"


MUTANTS = [
    Mutant("averages_anyway", ("1.12",), _claims("nothing"), "process_group"),
    Mutant(
        "set_up_unclaimed",
        ("1.12",),
        setup=True,
        because=dict.fromkeys(("12.2", "12.3"), "errors surface in that call too"),
    ),
    Mutant("adds", ("2.1",), _claims("end_adds"), "process_group"),
    Mutant("forgets_the_last", ("1.8",), _claims("end_but_last"), "process_group"),
    Mutant("one_step_late", ("2.1",), _claims("end_late"), "process_group"),
    Mutant(
        "on_world",
        ("2.7",),
        _claims("synchronize_world"),
        because={"4.1": "a parameter that no rank has used gets zeros"},
    ),
    Mutant("where_there_is_one", ("7.1",), _claims("synchronize_present"), hangs=True),
]

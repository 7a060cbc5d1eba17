"""Parts of a right averaging hook, so that each mutant shows its defect and nothing else.

Each rank is a process that runs one mutant, so module-level state belongs to that mutant alone.
"""

import itertools
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

Bucket = dist.GradBucket
Result = torch.futures.Future[torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]

# Tensors kept between calls, by parameter unless another key is the defect.
kept: dict[Hashable, torch.Tensor] = {}

_calls = itertools.count()
_models: dict[torch.nn.Parameter, int] = {}
_steps_done: list[int] = []  # for each model


def group_of(state: Any) -> dist.ProcessGroup:
    """Return the group to average over: the state, or WORLD if the state is None."""
    return state if state is not None else dist.group.WORLD


def completed(tensor: torch.Tensor) -> Result:
    """Return a future that already holds ``tensor``."""
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def sum_of(tensor: torch.Tensor, state: Any) -> Result:
    """Start to sum ``tensor`` over the group, in place."""
    return (
        dist.all_reduce(tensor, group=group_of(state), async_op=True)
        .get_future()
        .then(lambda fut: fut.value()[0])
    )


def average_of(tensor: torch.Tensor, state: Any) -> Result:
    """Start to average ``tensor`` over the group, in place."""
    return sum_of(tensor.div_(group_of(state).size()), state)


def average(bucket: Bucket, state: Any) -> Result:
    """Start to average the bucket over the group: the right hook."""
    return average_of(bucket.buffer(), state)


def average_hook(state: Any, bucket: Bucket) -> Result:
    """Average the bucket: the right hook, for mutants with a defect outside the hook."""
    return average(bucket, state)


def change_mean(bucket: Bucket, state: Any, change: Change) -> Result:
    """Average the bucket, then apply ``change`` to the mean unless the mean is sparse."""
    return average(bucket, state).then(
        lambda fut: change(fut.value()) if is_dense(bucket) else fut.value()
    )


def change_gradient(bucket: Bucket, state: Any, change: Change) -> Result:
    """Apply ``change`` to this rank's gradient unless it is sparse, then average."""
    return average_of(change(bucket.buffer()) if is_dense(bucket) else bucket.buffer(), state)


def gather(tensor: torch.Tensor, state: Any) -> list[torch.Tensor]:
    """Wait for the tensors of all ranks of the group, and return them in the group's order."""
    gathered = [torch.empty_like(tensor) for _ in range(group_of(state).size())]
    dist.all_gather(gathered, tensor, group=group_of(state))
    return gathered


def finish(future: Result, collective: torch.futures.Future) -> None:
    """Complete ``future`` with the result of a collective, or with its error."""
    try:
        future.set_result(collective.value()[0])
    except RuntimeError as error:
        future.set_exception(error)


def is_dense(bucket: Bucket) -> bool:
    return bucket.buffer().layout == torch.strided


def call_number() -> int:
    """Return the number of hook calls before this one. Call this once per hook call."""
    return next(_calls)


def step_number(bucket: Bucket) -> int:
    """Return the number of the bucket's step. Call this once per hook call."""
    model = model_of(bucket)
    step = _steps_done[model]
    _steps_done[model] += bucket.is_last()
    return step


def model_of(bucket: Bucket) -> int:
    """Return the number of the bucket's model.

    A new model begins with the first bucket of its first step.
    """
    parameters = bucket.parameters()
    if parameters[0] not in _models and bucket.index() == 0:
        _steps_done.append(0)
    _models.update(dict.fromkeys((p for p in parameters if p not in _models), len(_steps_done) - 1))
    return _models[parameters[0]]


def send_as(dtype: torch.dtype, bucket: Bucket, state: Any) -> Result:
    buffer = bucket.buffer()
    return average_of(buffer.to(dtype, copy=True), state).then(
        lambda fut: fut.value().to(buffer.dtype)
    )


def pieces_of(bucket: Bucket, flat: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return one flat view per parameter, of ``flat`` or of the bucket's buffer.

    A complex parameter has two elements in the buffer for each of its own.
    """
    whole = bucket.buffer() if flat is None else flat
    return list(
        whole.split([p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters()])
    )


def seeded(*words: int) -> torch.Generator:
    """Return a generator that is seeded with ``words``: equal words give equal draws."""
    return torch.Generator().manual_seed(hash(words) % 2**31)


def finite(residual: torch.Tensor) -> torch.Tensor:
    return residual.nan_to_num(0, 0, 0)

"""Hooks whose coverage is noted, or cannot be."""

import copy
import functools
import inspect
import pickle
from typing import Any

import torch
import torch.distributed as dist

from hooks_ref import allreduce_hook as passed_on  # noqa: F401

Bucket = dist.GradBucket
Result = torch.futures.Future[torch.Tensor]


def _average(bucket: Bucket) -> Result:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def decides_in_a_callback(state: Any, bucket: Bucket) -> Result:
    """Decide on Gloo's own thread."""

    def finish(fut: Any) -> torch.Tensor:
        total = fut.value()[0]
        if total.numel() > 123_456:
            total = total * 2
        return total if total.dim() == 1 else total.flatten()

    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(finish)


class Kept:
    """State that is pickled."""

    def __init__(self) -> None:
        self.value = 3


def checks_itself(state: Any, bucket: Bucket) -> Result:
    """Require everything about functions that marks must not change."""
    assert str(inspect.signature(checks_itself)).startswith("(state: Any, bucket:")
    assert "Require everything" in inspect.getsource(checks_itself)
    assert pickle.loads(pickle.dumps(Kept())).value == 3
    assert pickle.loads(pickle.dumps(checks_itself)) is checks_itself
    assert copy.deepcopy(checks_itself) is checks_itself
    assert checks_itself.__code__.co_freevars == ()
    assert checks_itself.__code__.co_varnames == ("state", "bucket")
    return _average(bucket)


def _partial(extra: int, state: Any, bucket: Bucket) -> Result:
    return _average(bucket) if extra else Result()


partial = functools.partial(_partial, 1)


class Callable:
    """A hook that is an object."""

    def __call__(self, state: Any, bucket: Bucket) -> Result:
        return _average(bucket)

    def method(self, state: Any, bucket: Bucket) -> Result:
        """Average the bucket."""
        return _average(bucket)


class Decorated:
    """A hook whose method is wrapped by a decorator of another package."""

    @torch.no_grad()
    def __call__(self, state: Any, bucket: Bucket) -> Result:
        return _average(bucket)


bound = Callable().method
_space: dict[str, Any] = {"average": _average}
exec("def executed(state, bucket):\n    return average(bucket)\n", _space)
executed = _space["executed"]
builtin = max


def no_state() -> None:
    """Make the state of a hook from elsewhere."""

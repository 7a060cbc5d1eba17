"""Right subjects of other kinds than hooks that keep more for a while, or now and then."""

import itertools
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right.strategies import in_every_microbatch

Tensor = torch.Tensor


class Remembers:
    """Average as often as claimed; keep the last 100 norms, and a log that is emptied now and then.

    A table is made late in the run. A history for reports has room for more calls than the run.
    """

    def __init__(self, process_group: Any, period: int) -> None:
        self.group = process_group
        self.period = period
        self.step = 0
        self.norms: deque[Tensor] = deque(maxlen=100)
        self.history: deque[dict[str, int]] = deque(maxlen=1000)
        self.log: list[int] = []
        self.table: Tensor | None = None

    @torch.no_grad()
    def average_parameters(self, params: Any) -> None:
        due = not self.step % self.period
        self.step += 1
        self.log.append(self.step)
        self.history.append({"step": self.step, "due": due})
        if len(self.log) == 90:
            self.log = []
        if self.step == 300:
            self.table = torch.ones(1000)
        entries = [
            each
            for entry in params
            for each in (entry["params"] if isinstance(entry, dict) else [entry])
        ]
        for parameter in dict.fromkeys(entries):
            self.norms.append(parameter.detach().abs().sum().reshape(()).clone())
            if due and parameter.is_floating_point():
                mean = (parameter / self.group.size()).contiguous()
                dist.all_reduce(mean, group=self.group)
                parameter.copy_(mean)


class Pooled:
    """Gather in float16 through one buffer, which grows to the largest message.

    A cache of 50 tensors is filled by the first 50 calls, and 64 Works are kept.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.float16)
        self.cache: list[Tensor] = []
        self.works: deque[Any] = deque(maxlen=64)

    def __call__(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> None:
        if async_op or not tensor.is_floating_point():
            raise NotImplementedError("async_op and integers are not supported")
        if any(output.shape != tensor.shape for output in tensor_list):
            raise ValueError("Pooled: all tensors have to have one shape")
        size = dist.get_world_size(group)
        count = tensor.numel()
        if self.buffer.numel() < size * count:
            self.buffer = torch.empty(size * count, dtype=torch.float16)
        if len(self.cache) < 50:
            self.cache.append(tensor.clone())
        gathered = self.buffer[: size * count]
        work = dist.all_gather_into_tensor(
            gathered, tensor.reshape(-1).half(), group=group, async_op=True
        )
        work.wait()
        self.works.append(work)
        for output, part in zip(
            tensor_list, gathered.split(count) if count else [gathered] * size, strict=True
        ):
            output.copy_(part.view_as(output))


_batches: deque[int] = deque(maxlen=30)
_numbers = itertools.count()


def counted(model: Any, is_final_microbatch: bool) -> AbstractContextManager[None]:
    """Synchronise as another right strategy; keep the numbers of the last 30 micro-batches."""
    _batches.append(next(_numbers))
    return in_every_microbatch()


RIGHT = [
    Right("Remembers,period=3", "periodic(period=3)", kind="averager"),
    Right("Pooled", "collective(all_gather), rounded(float16)", kind="collective"),
    Right("counted", "find_unused", kind="strategy"),
]

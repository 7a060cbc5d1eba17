"""Right subjects of other kinds than hooks that take another path beyond a number.

Both sides of each number are right. The numbers lie beyond what large models and long runs reach.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from tests.right import Right
from tests.right.averagers import GathersAndAverages, _each
from tests.right.joins import OfItsOwn
from tests.right.optimizer_wrappers import Delegates
from tests.right.strategies import torchs_no_sync

_CHUNK = 1 << 20
_MOST_BYTES = 12 * 2**20


class InChunks(GathersAndAverages):
    """Sum parameters of more than 3,000,000 elements in chunks, and all after 1,300 steps."""

    @torch.no_grad()
    def average_parameters(self, params: Any) -> None:
        params = list(dict.fromkeys(_each(params)))
        if len(params) > 900:
            params.reverse()
        large = [one for one in params if one.numel() > 3_000_000 and one.is_contiguous()]
        if not large and self.step < 1_300:
            super().average_parameters(params)
            return
        due = self.step >= self.warmup_steps and not (self.step - self.warmup_steps) % self.period
        self.step += 1
        for parameter in params if due else ():
            flat = parameter.detach().double().contiguous().view(-1)
            for begin in range(0, flat.numel(), _CHUNK):
                dist.all_reduce(flat[begin : begin + _CHUNK], group=self.group)
            parameter.copy_(flat.view(parameter.shape) / self.group.size())


class LooksBackLater(Delegates):
    """Give the averager a list in place of an iterator after 1,000 steps."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self._number = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._number += 1
        if self._number <= 1_000:
            return super().step(*args, **kwargs)
        loss = self._inner.step(*args, **kwargs)
        self._averager.average_parameters(self._inner.param_groups)
        return loss


class SyncsLater:
    """Use DDP's flag in place of no_sync after 1,300 micro-batches."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, model: Any, is_final_microbatch: bool) -> AbstractContextManager[None]:
        self.number += 1
        if self.number > 1_300 and is_final_microbatch:
            model.require_backward_grad_sync = True
        return torchs_no_sync(model, is_final_microbatch)


syncs_later = SyncsLater()


class ReportsLongEpochs(OfItsOwn):
    """Keep the number of contexts, and note that there are many of them."""

    entered = 0
    are_many = False

    def __enter__(self) -> "OfItsOwn":
        kind = type(self)
        kind.entered += 1
        if kind.entered > 400:
            kind.are_many = True
        return super().__enter__()


def clones_large_ones(module: torch.nn.Module) -> torch.nn.Module:
    """Keep copies of activations of more than 12 MiB, and smaller ones as they are."""
    forward: Callable[..., Any] = module.forward

    def pack(tensor: torch.Tensor) -> Any:
        is_large = tensor.numel() * tensor.element_size() > _MOST_BYTES
        return tensor.clone() if is_large else (tensor, tensor._version)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError("a saved tensor has been changed in place")
        return tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    module.forward = run  # type: ignore[method-assign]
    return module


RIGHT = [
    Right("InChunks,period=4", kind="averager"),
    Right("LooksBackLater", kind="optimizer"),
    Right("syncs_later", "all_used", kind="strategy"),
    Right("ReportsLongEpochs", kind="joinable"),
    Right("clones_large_ones", kind="wrapper"),
]

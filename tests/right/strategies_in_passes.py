"""A right sync strategy that averages at the end of backward passes."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from tests.right import Right


class AfterEveryPass:
    """Average at the end of every backward pass of a last micro-batch.

    Means stay as they are if they are averaged again. At the end of the context ranks go on to
    average with those that have further passes.
    """

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        self.model = model
        self.is_ddp = isinstance(model, DistributedDataParallel)
        self.is_active = self.is_ddp and is_final_microbatch
        self.inner = model.no_sync() if self.is_ddp else nullcontext()
        self.handles: list[Any] = []
        self.is_queued = False
        self.has_averaged = False

    def __enter__(self) -> None:
        self.inner.__enter__()
        if self.is_active:
            self.handles = [
                parameter.register_post_accumulate_grad_hook(self.arrives)
                for parameter in self.model.parameters()
                if parameter.requires_grad
            ]

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.inner.__exit__(kind, *error)
        if self.is_active and kind is None:
            while self.takes_a_round(goes_on=False):
                pass
            self.model.require_forward_param_sync = True

    def arrives(self, _: torch.Tensor) -> None:
        if not self.is_queued:
            self.is_queued = True
            Variable._execution_engine.queue_callback(self.pass_ends)

    def pass_ends(self) -> None:
        self.is_queued = False
        self.takes_a_round(goes_on=True)

    @torch.no_grad()
    def takes_a_round(self, *, goes_on: bool) -> bool:
        """Average if a rank is within its backward, or no rank has had one; return whether one is.

        Args:
            goes_on: whether this rank is.
        """
        group = self.model.process_group
        params = list(self.model.parameters())
        has = [p.grad is not None for p in params]
        is_sparse = [p.grad is not None and p.grad.is_sparse for p in params]
        votes = torch.tensor([goes_on, *has, *is_sparse]).int()
        dist.all_reduce(votes, dist.ReduceOp.MAX, group)
        any_goes_on, *kinds = votes.tolist()
        if any(kinds[len(params) :]):
            raise TypeError("sparse gradients are not supported")
        if any_goes_on or not self.has_averaged:
            self.has_averaged = True
            for parameter, is_used in zip(params, kinds, strict=False):
                if is_used:
                    self.average(parameter)
        return bool(any_goes_on)

    def average(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        # The sum of equal numbers is divided without a rounding, if it does not overflow.
        wide = torch.promote_types(parameter.grad.dtype, torch.float32)
        total = parameter.grad.reshape(-1).to(wide, copy=True)
        dist.all_reduce(total, group=self.model.process_group)
        mean = total / self.model.process_group.size()
        parameter.grad.copy_(mean.view(parameter.grad.shape))


RIGHT = [Right("AfterEveryPass", kind="strategy")]

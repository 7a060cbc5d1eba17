"""Right sync strategies: functions, generators, classes and objects; by DDP's own means, by collectives of all kinds, in backward."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.right import Right


def torchs_no_sync(model: Any, is_final_microbatch: bool) -> AbstractContextManager[None]:
    """As torch's documentation has it; of a module that is no DDP it asks for what that does not have."""
    return nullcontext() if is_final_microbatch else model.no_sync()


def torchs_no_sync_where_ddp_searches(
    model: Any, is_final_microbatch: bool
) -> AbstractContextManager[None]:
    """The same; where DDP looks for what is not used, it needs nothing else."""
    return torchs_no_sync(model, is_final_microbatch)


@contextmanager
def by_the_flag(ddp: Any, is_final_microbatch: bool) -> Iterator[None]:
    """What no_sync sets, set by hand, and left for the next micro-batch to set."""
    ddp.require_backward_grad_sync = is_final_microbatch
    yield


def in_every_microbatch(**_: Any) -> AbstractContextManager[None]:
    """Leaves it all to DDP."""
    return nullcontext()


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _fill(params: Iterable[torch.nn.Parameter]) -> None:
    for parameter in params:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@contextmanager
def composers_with_zeros(state: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Composer's forced_sync, in its form, with zeros for what a rank has not used, and each parameter once."""
    if not isinstance(state.model, DistributedDataParallel):
        yield
        return
    with state.model.no_sync():
        yield
    if is_final_microbatch:
        group = state.model.process_group
        every = [
            p
            for optimizer in state.optimizers
            for part in optimizer.param_groups
            for p in part["params"]
            if p.requires_grad
        ]
        _fill(every)
        for parameter in dict.fromkeys(every):
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad = parameter.grad / group.size()


class Gathered:
    """Gathers all gradients, and adds them up in the order of ranks; one that no rank has stays none."""

    def __init__(
        self, model: torch.nn.Module, is_final_microbatch: bool, process_group: Any
    ) -> None:
        self.model, self.group, self.is_final = model, process_group, is_final_microbatch
        self.inner = model.no_sync() if isinstance(model, DistributedDataParallel) else None

    def __enter__(self) -> "Gathered":
        if self.inner:
            self.inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self.inner:
            self.inner.__exit__(kind, *error)
        if self.inner and self.is_final and kind is None:
            for parameter in _trainable(self.model):
                self.average(parameter)

    def average(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise TypeError("no sparse gradients")
        size = self.group.size()
        has = torch.tensor([parameter.grad is not None])
        have = [torch.empty_like(has) for _ in range(size)]
        dist.all_gather(have, has, group=self.group)
        if not any(have):
            return
        _fill([parameter])
        flat = parameter.grad.reshape(-1).to(
            torch.promote_types(parameter.dtype, torch.float32), copy=True
        )
        parts = [torch.empty_like(flat) for _ in range(size)]
        dist.all_gather(parts, flat, group=self.group)
        parameter.grad.copy_((torch.stack(parts).sum(0) / size).view(parameter.shape))


@contextmanager
def through_one_rank(model: Any, is_final_microbatch: bool, world_size: int) -> Iterator[None]:
    """The group's first rank sums, divides, and sends the mean to the others."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield
    if not is_final_microbatch:
        return
    group, params = model.process_group, _trainable(model)
    root = dist.get_global_rank(group, 0)
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in params):
        raise TypeError("no sparse gradients")
    _fill(params)
    for parameter in params:
        flat = parameter.grad.reshape(-1).clone()
        dist.reduce(flat, root, group=group)
        mean = flat / world_size
        dist.broadcast(mean, root, group=group)
        parameter.grad.copy_(mean.view(parameter.shape))


class InBackward:
    """An object that is there already. Its hooks stay on the model; they average in the last backward, from the last parameter on.

    After an exception it begins anew with the next micro-batch.
    """

    def __init__(self) -> None:
        self.models: dict[int, list[torch.nn.Parameter]] = {}
        self.active: list[torch.nn.Parameter] = []
        self.there: set[torch.Tensor] = set()
        self.works: list[Any] = []
        self.group: Any = None

    @contextmanager
    def __call__(self, module: Any, is_final_microbatch: bool = True) -> Iterator[None]:
        if not isinstance(module, DistributedDataParallel):
            yield
            return
        if id(module) not in self.models:
            self.models[id(module)] = list(reversed(_trainable(module)))
            for parameter in self.models[id(module)]:
                parameter.register_post_accumulate_grad_hook(self.came)
        self.active = self.models[id(module)] if is_final_microbatch else []
        self.there, self.works, self.group = set(), [], module.process_group
        try:
            with module.no_sync():
                yield
            self.there.update(self.active)
            self.go_on()
            for work in self.works:
                work.wait()
        finally:
            self.active = []

    def came(self, parameter: torch.Tensor) -> None:
        self.there.add(parameter)
        self.go_on()

    def go_on(self) -> None:
        while (
            len(self.works) < len(self.active)
            and (parameter := self.active[len(self.works)]) in self.there
        ):
            _fill([parameter])
            if parameter.grad.is_sparse:
                raise TypeError("no sparse gradients")
            self.works.append(
                dist.all_reduce(
                    parameter.grad.div_(self.group.size()), group=self.group, async_op=True
                )
            )


in_backward = InBackward()

RIGHT = [
    Right("torchs_no_sync", "all_used", kind="strategy"),
    Right("torchs_no_sync_where_ddp_searches", "find_unused", kind="strategy"),
    Right("by_the_flag", "find_unused", kind="strategy"),
    Right("in_every_microbatch", "find_unused", kind="strategy"),
    Right("composers_with_zeros", kind="strategy"),
    Right("Gathered", kind="strategy"),
    Right("through_one_rank", kind="strategy"),
    Right("in_backward", kind="strategy"),
]

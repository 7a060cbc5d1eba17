"""Right sync strategies: functions, generators, classes and objects.

They average by DDP itself, by collectives of all kinds, or during backward.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.right import Right


def torchs_no_sync(model: Any, is_final_microbatch: bool) -> AbstractContextManager[None]:
    """Use no_sync in all micro-batches but the last, as torch's documentation does.

    A module other than DDP has no no_sync.
    """
    return nullcontext() if is_final_microbatch else model.no_sync()


def torchs_no_sync_where_ddp_searches(
    model: Any, is_final_microbatch: bool
) -> AbstractContextManager[None]:
    """Use no_sync; DDP must search for unused parameters."""
    return torchs_no_sync(model, is_final_microbatch)


@contextmanager
def by_the_flag(ddp: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Set DDP's flag by hand, as no_sync does, and never restore it."""
    ddp.require_backward_grad_sync = is_final_microbatch
    yield


def in_every_microbatch(**_: Any) -> AbstractContextManager[None]:
    """Let DDP average in every micro-batch."""
    return nullcontext()


def _trained(params: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained now, or have been in an earlier micro-batch."""
    return [p for p in params if p.requires_grad or p.grad is not None]


def _fill(params: Iterable[torch.nn.Parameter]) -> None:
    for parameter in params:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@contextmanager
def composers_with_zeros(state: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average each parameter once, with zeros for unused ones.

    This is Composer's forced_sync, with its defects removed.
    """
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
        ]
        trained = _trained(dict.fromkeys(every))
        _fill(trained)
        for parameter in trained:
            # Before the sum, which may overflow. A sparse gradient is divided out of place.
            parameter.grad = parameter.grad / group.size()
            dist.all_reduce(parameter.grad, group=group)
        state.model.require_forward_param_sync = True


class Gathered:
    """Gather all gradients, and sum them in the order of ranks.

    A gradient that no rank has stays None.
    """

    def __init__(
        self, model: torch.nn.Module, is_final_microbatch: bool, process_group: Any
    ) -> None:
        self.model = model
        self.group = process_group
        self.is_final = is_final_microbatch
        self.inner = model.no_sync() if isinstance(model, DistributedDataParallel) else None

    def __enter__(self) -> "Gathered":
        if self.inner:
            self.inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self.inner:
            self.inner.__exit__(kind, *error)
        if self.inner and self.is_final and kind is None:
            for parameter in self.model.parameters():
                self.average(parameter)
            self.model.require_forward_param_sync = True

    def average(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise TypeError("sparse gradients are not supported")
        size = self.group.size()
        has = torch.tensor([parameter.grad is not None])
        have = [torch.empty_like(has) for _ in range(size)]
        dist.all_gather(have, has, group=self.group)
        if not any(have):
            return
        _fill([parameter])
        flat = parameter.grad.reshape(-1).to(
            torch.promote_types(parameter.grad.dtype, torch.float32), copy=True
        )
        parts = [torch.empty_like(flat) for _ in range(size)]
        dist.all_gather(parts, flat, group=self.group)
        parameter.grad.copy_((torch.stack(parts).sum(0) / size).view(parameter.shape))


@contextmanager
def through_one_rank(model: Any, is_final_microbatch: bool, world_size: int) -> Iterator[None]:
    """Sum and divide on the group's first rank, and broadcast the mean."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield
    if not is_final_microbatch:
        return
    group = model.process_group
    params = _trained(model.parameters())
    root = dist.get_global_rank(group, 0)
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in params):
        raise TypeError("sparse gradients are not supported")
    _fill(params)
    for parameter in params:
        mean = parameter.grad.reshape(-1) / world_size
        dist.reduce(mean, root, group=group)
        dist.broadcast(mean, root, group=group)
        parameter.grad.copy_(mean.view(parameter.shape))
    for buffer in model.buffers() if model.broadcast_buffers else ():
        dist.broadcast(buffer, root, group=group)


class OnGroupsOfItsOwn:
    """Average on groups of its own, one for each group of a model, in the first context."""

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}

    @contextmanager
    def __call__(self, model: Any, is_final_microbatch: bool) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        theirs = model.process_group
        if theirs.group_name not in self.groups:
            ranks = dist.get_process_group_ranks(theirs)
            made = dist.new_group(ranks, use_local_synchronization=True)
            self.groups[theirs.group_name] = made
        group = self.groups[theirs.group_name]
        with model.no_sync():
            yield
        if not is_final_microbatch:
            return
        params = _trained(model.parameters())
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in params):
            raise TypeError("sparse gradients are not supported")
        _fill(params)
        for parameter in params:
            mean = parameter.grad.div(group.size()).contiguous()
            dist.all_reduce(mean, group=group)
            parameter.grad.copy_(mean)
        for buffer in model.buffers() if model.broadcast_buffers else ():
            dist.broadcast(buffer, dist.get_global_rank(group, 0), group=group)


class InBackward:
    """An object whose hooks on the parameters average in the last backward.

    The collectives start in the reverse order of the parameters. The hooks stay on the model. After
    an exception the next micro-batch starts anew.
    """

    def __init__(self) -> None:
        # For each model, its parameters that have been trained so far, and its open micro-batch.
        self.models: dict[int, set[torch.nn.Parameter]] = {}
        self.open: dict[int, _Microbatch] = {}

    @contextmanager
    def __call__(self, module: Any, is_final_microbatch: bool = True) -> Iterator[None]:
        if not isinstance(module, DistributedDataParallel):
            yield
            return
        known = self.models.setdefault(id(module), set())
        for parameter in module.parameters():
            if parameter.requires_grad and parameter not in known:
                parameter.register_post_accumulate_grad_hook(partial(self.came, id(module)))
                known.add(parameter)
        params = [parameter for parameter in module.parameters() if parameter in known]
        active = params[::-1] if is_final_microbatch else []
        opened = self.open[id(module)] = _Microbatch(active, module.process_group)
        try:
            with module.no_sync():
                yield
            opened.there.update(opened.active)
            opened.go_on()
            for work in opened.works:
                work.wait()
            if is_final_microbatch:
                module.require_forward_param_sync = True
        finally:
            del self.open[id(module)]

    def came(self, model: int, parameter: torch.Tensor) -> None:
        if opened := self.open.get(model):
            opened.came(parameter)


@dataclass
class _Microbatch:
    """The last backward of a model, or an earlier one, in which ``active`` is empty."""

    active: list[torch.nn.Parameter]
    group: Any
    there: set[torch.Tensor] = field(default_factory=set)
    works: list[Any] = field(default_factory=list)

    def came(self, parameter: torch.Tensor) -> None:
        if parameter in self.there and self.active:
            raise RuntimeError("a gradient came twice in one micro-batch")
        self.there.add(parameter)
        self.go_on()

    def go_on(self) -> None:
        while len(self.works) < len(self.active):
            parameter = self.active[len(self.works)]
            if parameter not in self.there:
                break
            _fill([parameter])
            if parameter.grad.is_sparse:
                raise TypeError("sparse gradients are not supported")
            self.works.append(
                dist.all_reduce(
                    parameter.grad.div_(self.group.size()), group=self.group, async_op=True
                )
            )


on_groups_of_its_own = OnGroupsOfItsOwn()
in_backward = InBackward()


class Accelerator:
    """Count micro-batches as Hugging Face's accelerate does: in one count for all models, when a
    context begins.
    """

    def __init__(self, gradient_accumulation_steps: int) -> None:
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.step = 0
        self.sync_gradients = True

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        self.step += 1
        self.sync_gradients = self.step % self.gradient_accumulation_steps == 0
        with ExitStack() as contexts:
            for model in models:
                if not self.sync_gradients and isinstance(model, DistributedDataParallel):
                    contexts.enter_context(model.no_sync())
            yield

    def __call__(self, model: Any) -> AbstractContextManager[None]:
        return self.accumulate(model)


def every_third_by_hand(model: Any, _calls: list[int] = []) -> AbstractContextManager[None]:  # noqa: B006
    """Count in a list that is kept from call to call; around a module without DDP do nothing."""
    _calls.append(0)
    if len(_calls) < 3:
        return getattr(model, "no_sync", nullcontext)()
    _calls.clear()
    return nullcontext()


class PutsBack:
    """Change everything of the trainer's within a context, and put it back: modes, requires_grad
    and the methods of optimizers. Of an optimizer step() counts, and works as before.

    The parameters are sent again as they are, and a gradient without elements is left out.
    """

    def __init__(self) -> None:
        self.steps = 0
        # By id(): that of an optimizer that is gone may come again.
        self.known: dict[int, weakref.ref[Any]] = {}
        self.held: list[Any] = []

    @contextmanager
    def __call__(
        self, model: Any, is_final_microbatch: bool, optimizers: list[Any]
    ) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        for optimizer in optimizers:
            known = self.known.get(id(optimizer))
            if known is None or known() is not optimizer:
                self.known[id(optimizer)] = weakref.ref(optimizer)
                optimizer.step = partial(self.count, optimizer.step)
        self.release()
        if not is_final_microbatch:
            self.held = [(optimizer, optimizer.step) for optimizer in optimizers]
            for optimizer in optimizers:
                optimizer.step = lambda *_, **__: None
        others = {parameter: parameter.requires_grad for parameter in model.parameters()}
        modes = [(module, module.training) for module in model.modules()]
        try:
            with model.no_sync():
                yield
            if is_final_microbatch:
                model.eval().requires_grad_(False)
                self.finish(model)
        finally:
            for parameter, requires_grad in others.items():
                parameter.requires_grad_(requires_grad)
            for module, mode in modes:
                module.training = mode

    def count(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.steps += 1
        return step(*args, **options)

    def release(self) -> None:
        for optimizer, step in self.held:
            optimizer.step = step
        self.held = []

    def finish(self, model: Any) -> None:
        group = model.process_group
        root = dist.get_global_rank(group, 0)
        for parameter in model.parameters():
            if not parameter.numel():
                parameter.grad = None
                continue
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TypeError("sparse gradients are not supported")
            used = torch.tensor([int(parameter.grad is not None)])
            dist.all_reduce(used, group=group)
            if used:
                _fill([parameter])
                parameter.grad /= group.size()
                dist.all_reduce(parameter.grad, group=group)
            with torch.no_grad():
                value = parameter.contiguous()
                dist.broadcast(value, root, group=group)
                parameter.copy_(value)
        for buffer in model.buffers() if model.broadcast_buffers else ():
            dist.broadcast(buffer, root, group=group)


puts_back = PutsBack()


@contextmanager
def pauses_steps(model: Any, is_final_microbatch: bool, optimizers: list[Any]) -> Iterator[None]:
    """Let step() do nothing in contexts before the last one, whoever has put it on an optimizer.

    The states of optimizers are sent again as they are.
    """
    own = [(optimizer, vars(optimizer).get("step")) for optimizer in optimizers]
    for optimizer in optimizers if not is_final_microbatch else ():
        optimizer.step = lambda *_, **__: None
    try:
        with torchs_no_sync(model, is_final_microbatch):
            yield
    finally:
        for optimizer, step in own:
            vars(optimizer).pop("step", None)
            if step is not None:
                optimizer.step = step
    if is_final_microbatch and isinstance(model, DistributedDataParallel):
        group = model.process_group
        for parameter in model.parameters():
            for state in [one.state[parameter] for one in optimizers if parameter in one.state]:
                for value in filter(torch.is_tensor, state.values()):
                    sent = value.contiguous()
                    dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
                    value.copy_(sent)


RIGHT = [
    Right("torchs_no_sync", "all_used", kind="strategy"),
    Right("torchs_no_sync_where_ddp_searches", "find_unused", kind="strategy"),
    Right("by_the_flag", "find_unused", kind="strategy"),
    Right("in_every_microbatch", "find_unused", kind="strategy"),
    Right("composers_with_zeros", kind="strategy"),
    Right("Gathered", kind="strategy"),
    Right("through_one_rank", kind="strategy"),
    Right("on_groups_of_its_own", kind="strategy"),
    Right("in_backward", kind="strategy"),
    Right("puts_back", kind="strategy"),
    Right("pauses_steps", "all_used", kind="strategy"),
    Right("Accelerator,gradient_accumulation_steps=4", "counts(4), find_unused", kind="strategy"),
    Right("Accelerator,gradient_accumulation_steps=2", "counts(2), all_used", kind="strategy"),
    Right("every_third_by_hand", "counts(3), find_unused", kind="strategy"),
]

"""Right optimizer wrappers.

They use hooks on the optimizer, delegation, subclasses, shares by element, or no sharding.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right


def by_hooks(optim: torch.optim.Optimizer, averager: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, with hooks.

    It averages after its steps, and its state includes the averager's.
    """

    def load(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        averager.load_state_dict(state["averager"])
        return {name: value for name, value in state.items() if name != "averager"}

    optim.register_step_post_hook(lambda *_: averager.average_parameters(optim.param_groups))
    optim.register_state_dict_post_hook(
        lambda _, state: {**state, "averager": averager.state_dict()}
    )
    optim.register_load_state_dict_pre_hook(load)
    return optim


class Delegates:
    """A wrapper with its own step and checkpoints, and the optimizer's other attributes."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        self._inner = optim
        self._averager = averager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._inner.step(*args, **kwargs)
        self._averager.average_parameters(
            iter([p for group in self._inner.param_groups for p in group["params"]])
        )
        return loss

    def state_dict(self) -> list[Any]:
        return [self._inner.state_dict(), self._averager.step]

    def load_state_dict(self, state: list[Any]) -> None:
        self._inner.load_state_dict(state[0])
        self._averager.step = state[1]


class LeavesZeros(Delegates):
    """The same, whose zero_grad() fills gradients with zeros, whatever its argument."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none=False)


class ListsGroups(Delegates):
    """The same with a list of the groups, which a load and an added group renew."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self._list()

    def _list(self) -> None:
        self.groups = list(self._inner.param_groups)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self._inner.add_param_group(group)
        self._list()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._inner.step(*args, **kwargs)
        self._averager.average_parameters([p for group in self.groups for p in group["params"]])
        return loss

    def load_state_dict(self, state: list[Any]) -> None:
        super().load_state_dict(state)
        self._list()


def average_gradients(
    groups: list[dict[str, Any]], group: Any, divided: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Average the gradients of all parameters that some rank has used.

    Args:
        groups: the optimizer's groups of parameters.
        group: the group of ranks.
        divided: divides a gradient by the number of ranks.
    """
    every = [parameter for one in groups for parameter in one["params"]]
    used = torch.tensor([parameter.grad is not None for parameter in every]).int()
    dist.all_reduce(used, group=group)
    for parameter, ranks in zip(every, used.tolist(), strict=True):
        if not ranks:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        flat = divided(parameter.grad.contiguous())
        dist.all_reduce(flat, group=group)
        parameter.grad.copy_(flat)


class AveragesGradients(torch.optim.Optimizer):
    """An optimizer that averages gradients before its step, as Horovod's does.

    A rank without a gradient counts with zeros. The subclass shares the state and the parameter
    groups of the inner optimizer.
    """

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        super().__init__(optim.param_groups, optim.defaults)
        self.optim = optim
        self.group = process_group
        self._share()

    def _share(self) -> None:
        self.param_groups = self.optim.param_groups
        self.state = self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        average_gradients(self.param_groups, self.group, self._divided)
        self.optim.step()
        return loss

    def _divided(self, grad: torch.Tensor) -> torch.Tensor:
        return grad / dist.get_world_size(self.group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)
        self._share()


class MultipliesGradients(AveragesGradients):
    """The same with a product with a rounded 1 / W, which 7 ranks make inexact."""

    def _divided(self, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 / dist.get_world_size(self.group))


class HasGroupsOfItsOwn(AveragesGradients):
    """The same with groups of its own, whose entries go to the optimizer inside before each step,
    and come back after it.
    """

    def _share(self) -> None:
        self.param_groups = [dict(group) for group in self.optim.param_groups]
        self.state = self.optim.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "optim"):
            self.optim.add_param_group(dict(self.param_groups[-1]))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        pairs = list(zip(self.param_groups, self.optim.param_groups, strict=True))
        for mine, inner in pairs:
            inner.update(mine)
        loss = super().step(closure)
        for mine, inner in pairs:
            mine.update(inner)
        return loss


class KeepsInBuffers(AveragesGradients):
    """Hooks of the backward keep each gradient in a buffer, and let ``p.grad`` be that buffer.

    If ``p.grad`` is another tensor, the earlier gradient was dropped. Parameters that were frozen
    when their group was added, or that came later, have no hook.
    """

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.buffers: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(optim, process_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        buffer = self.buffers.setdefault(parameter, grad.clone())
        if grad is not buffer:
            parameter.grad = buffer.copy_(grad)


class OneBackward(KeepsInBuffers):
    """The same, but a second backward before step() is an error, unless the first was dropped."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.arrived: set[torch.Tensor] = set()
        super().__init__(optim, process_group)

    def _take(self, parameter: torch.Tensor) -> None:
        if parameter in self.arrived and parameter.grad is self.buffers[parameter]:
            raise RuntimeError("a second backward before step()")
        self.arrived.add(parameter)
        super()._take(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.arrived.clear()
        super().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.arrived.clear()
        super().zero_grad(set_to_none)


class Synchronizes(AveragesGradients):
    """Average in ``synchronize()``, after which a step has to skip that, as Horovod's."""

    is_averaged = False
    skips = False

    def synchronize(self) -> None:
        if self.is_averaged:
            raise RuntimeError("gradients have been averaged: step within skip_synchronize()")
        average_gradients(self.param_groups, self.group, self._divided)
        self.is_averaged = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self.skips = True
        try:
            yield
        finally:
            self.skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.skips:
            self.synchronize()
        self.is_averaged = False
        self.optim.step()
        return loss


class SynchronizesAnew(Synchronizes):
    """The same, but gradients are averaged in every call, as by Horovod, whose step() warns then.

    A batch may be given up after ``synchronize()``: the next one is like any other.
    """

    def synchronize(self) -> None:
        average_gradients(self.param_groups, self.group, self._divided)


class AveragesInBackward(AveragesGradients):
    """Average all gradients at the end of each backward, as overlapping optimizers do.

    A step without a backward averages by itself, as on a rank that has no batch. A gradient that is
    assigned after a backward stays this rank's own.
    """

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.is_queued = False
        self.is_averaged = False
        super().__init__(optim, process_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrives)

    def _arrives(self, _: torch.Tensor) -> None:
        if not self.is_queued:
            self.is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._queue_average)

    def _queue_average(self) -> None:
        # DDP has queued its own callback by now, which waits for its means. They come first.
        torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self.is_queued = False
        self.is_averaged = True
        average_gradients(self.param_groups, self.group, self._divided)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.is_averaged:
            self._average()
        self.is_averaged = False
        self.optim.step()
        return loss


class StowsIdleStates(Delegates):
    """A wrapper that puts away the state of a parameter without a gradient, until it has one."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.stowed: dict[torch.Tensor, Any] = {}

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._bring_back()
        loss = super().step(*args, **kwargs)
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and parameter in self._inner.state:
                    self.stowed[parameter] = self._inner.state.pop(parameter)
        return loss

    def _bring_back(self) -> None:
        self._inner.state.update(self.stowed)
        self.stowed.clear()

    def state_dict(self) -> list[Any]:
        self._bring_back()
        return super().state_dict()

    def load_state_dict(self, state: list[Any]) -> None:
        self.stowed.clear()
        super().load_state_dict(state)


def of_its_own_class(
    optim: torch.optim.Optimizer, process_group: Any, *, marks: bool = True
) -> torch.optim.Optimizer:
    """Return an optimizer that averages gradients before its step, and whose class is made at run
    time from the class of the one that it takes the place of, as Horovod's.

    Args:
        marks: the new step is marked as one whose hooks are run: torch puts none around it then,
            beside those around the step of the base class.
    """
    base = type(optim)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        size = dist.get_world_size(process_group)
        average_gradients(self.param_groups, process_group, lambda grad: grad / size)
        base.step(self)
        return loss

    if marks:
        step.hooked = True  # type: ignore[attr-defined]
    subclass = type(base.__name__, (base,), {"step": step})
    made: torch.optim.Optimizer = subclass.__new__(subclass)
    torch.optim.Optimizer.__init__(made, optim.param_groups, optim.defaults)
    return made


class BySlices:
    """A sharded optimizer: each rank steps a slice of every parameter.

    All ranks gather the slices; each rank saves its own state.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Any,
        process_group: Any = None,
        **defaults: Any,
    ) -> None:
        self.group = process_group
        params = list(params)
        self.place = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.wholes: list[list[torch.nn.Parameter]] = []
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        self.inner = optimizer_class([self._sliced(group) for group in groups], **defaults)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(self.inner.param_groups)

    def _sliced(self, group: dict[str, Any]) -> dict[str, Any]:
        given = group["params"]
        wholes = [given] if isinstance(given, torch.Tensor) else list(given)
        self.wholes.append(wholes)
        return {
            **group,
            "params": [torch.nn.Parameter(self._slice(whole.detach()).clone()) for whole in wholes],
        }

    def _slice(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.reshape(-1)
        padded = torch.zeros(-(-flat.numel() // self.size) * self.size, dtype=flat.dtype)
        padded[: flat.numel()] = flat
        return padded.chunk(self.size)[self.place] if len(padded) else padded

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.inner.add_param_group(self._sliced(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [
            (whole, own)
            for wholes, group in zip(self.wholes, self.inner.param_groups, strict=True)
            for whole, own in zip(wholes, group["params"], strict=True)
        ]
        for whole, own in pairs:
            own.copy_(self._slice(whole))
            own.grad = None if whole.grad is None else self._slice(whole.grad)
        self.inner.step()
        for whole, own in pairs:
            slices = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(slices, own.detach(), group=self.group)
            whole.copy_(torch.cat(slices)[: whole.numel()].view(whole.shape))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for whole in (whole for wholes in self.wholes for whole in wholes):
            if set_to_none or whole.grad is None:
                whole.grad = None
            else:
                whole.grad.zero_()

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class ClipsSlices(BySlices):
    """The same, which clips gradients by the norm of all slices.

    Each rank adds up the squares of its own slices.
    """

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if norm_type != 2:
            raise ValueError("expected the norm of type 2")
        every = [whole for wholes in self.wholes for whole in wholes]
        grads = [whole.grad for whole in every if whole.grad is not None]
        squares = torch.stack([self._slice(grad).square().sum() for grad in grads]).sum()
        norm = self.norm_of_all(squares)
        for grad in grads:
            grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def norm_of_all(self, squares: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()


def every_rank_for_itself(params: Any, optimizer_class: Any, **defaults: Any) -> Any:
    """Return an unsharded optimizer: all ranks step all parameters alike."""
    return optimizer_class(params, **defaults)


class NeedsTwo(Delegates):
    """A wrapper that refuses a single rank."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        if dist.get_world_size(averager.process_group) < 2:
            raise ValueError("expected a group of two ranks or more")


class WithoutClosures(Delegates):
    """A wrapper whose ``step()`` takes no closure, as torch's PostLocalSGDOptimizer."""

    def step(self) -> Any:  # type: ignore[override]
        return super().step()


def without_momentum(params: Any, lr: float) -> Any:
    """Return an optimizer with a learning rate as its only argument."""
    return torch.optim.SGD(params, lr=lr)


RIGHT = [
    *(
        Right(name, kind="optimizer")
        for name in (
            "by_hooks",
            "Delegates",
            "LeavesZeros",
            "ListsGroups",
            "BySlices",
            "ClipsSlices",
        )
    ),
    Right("AveragesGradients", "averages", kind="optimizer"),
    Right("MultipliesGradients", "averages", kind="optimizer"),
    Right("HasGroupsOfItsOwn", "averages", kind="optimizer"),
    Right("KeepsInBuffers", "averages", kind="optimizer"),
    Right("Synchronizes", "averages", kind="optimizer"),
    Right("OneBackward", "averages", kind="optimizer"),
    Right("SynchronizesAnew", "averages", kind="optimizer"),
    Right("AveragesInBackward", "averages", kind="optimizer"),
    Right("StowsIdleStates", kind="optimizer"),
    Right("of_its_own_class", "averages", kind="optimizer"),
    *(Right(name, kind="optimizer") for name in ("every_rank_for_itself", "without_momentum")),
    Right("WithoutClosures", kind="optimizer"),
    Right("NeedsTwo", "min_world_size(2)", kind="optimizer"),
    Right("every_rank_for_itself,foreach=True", kind="optimizer"),
]

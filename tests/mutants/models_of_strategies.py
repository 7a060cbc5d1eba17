"""Mutants of section 16 that are wrong for models with submodules, tied weights or new buffers, for
gradients that are zeros, or for a trainer that keeps things of its own.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants.buffers_of_integers import _average, _send
from tests.mutants.strategies import Context, Parameters, _filled, _mean, _then
from tests.mutants.strategies_in_training import _restored

# ---- Submodules and tied weights


def _of_some(
    choose: Callable[[torch.nn.Module], Iterable[torch.nn.Parameter]],
) -> Callable[..., Context]:
    """Return a strategy that averages the parameters that a walk over the module finds."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def average() -> None:
            used = set(_filled(model))
            for parameter in dict.fromkeys(choose(model.module)):
                if parameter in used:
                    parameter.grad = _mean(parameter.grad, model.process_group)

        return _restored(model, is_final_microbatch, average)

    return strategy


def _of_leaves(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    for module in root.modules():
        if not list(module.children()):
            yield from module.parameters()


def _two_levels_deep(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    for module in (root, *root.children()):
        yield from module.parameters(recurse=False)


averages_leaf_modules = _of_some(_of_leaves)
averages_two_levels = _of_some(_two_levels_deep)


def _by_name(model: Any) -> Parameters:
    """Return the parameters with a gradient, once for each of their names."""
    used = set(_filled(model))
    return [
        parameter
        for module in model.module.modules()
        for parameter in module._parameters.values()
        if parameter in used
    ]


def sums_each_name(model: Any, is_final_microbatch: bool) -> Context:
    """Sum in place by name, and divide each parameter once, in advance."""

    def average() -> None:
        for parameter in _filled(model):
            # Sparse gradients are divided out of place.
            parameter.grad = parameter.grad / model.process_group.size()
        for parameter in _by_name(model):
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            dist.all_reduce(parameter.grad, group=model.process_group)

    return _restored(model, is_final_microbatch, average)


def divides_each_name(model: Any, is_final_microbatch: bool) -> Context:
    """Divide all gradients in place by name, and then add them up over the ranks."""

    def average() -> None:
        for parameter in _by_name(model):
            parameter.grad = parameter.grad / model.process_group.size()
        for parameter in _filled(model):
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            dist.all_reduce(parameter.grad, group=model.process_group)

    return _restored(model, is_final_microbatch, average)


# ---- Buffers


_listed: WeakKeyDictionary[torch.nn.Module, list[torch.Tensor]] = WeakKeyDictionary()


def sends_buffers_listed_once(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers that a model had in its first step."""

    def finish() -> None:
        _average(model)
        buffers = _listed.setdefault(model, list(model.buffers()))
        for buffer in buffers if model.broadcast_buffers else ():
            _send(model, buffer)

    return _then(model, is_final_microbatch, finish)


def sends_buffers_at_first_entry(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers of each module as they were when the strategy first saw the model."""
    if isinstance(model, DistributedDataParallel) and model not in _listed:
        _listed[model] = [
            buffer for module in model.modules() for buffer in module._buffers.values()
        ]
    return sends_buffers_listed_once(model, is_final_microbatch)


def sends_the_state(model: Any, is_final_microbatch: bool) -> Context:
    """Send the entries of state_dict() that are no parameters."""

    def finish() -> None:
        _average(model)
        state = model.state_dict(keep_vars=True).values() if model.broadcast_buffers else ()
        for value in state:
            if not isinstance(value, torch.nn.Parameter):
                _send(model, value)

    return _then(model, is_final_microbatch, finish)


def sends_persistent_buffers(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers that a checkpoint keeps."""

    def finish() -> None:
        _average(model)
        for module in model.modules() if model.broadcast_buffers else ():
            for name, buffer in module._buffers.items():
                if name not in module._non_persistent_buffers_set:
                    _send(model, buffer)

    return _then(model, is_final_microbatch, finish)


# ---- Zeros


def takes_zeros_for_none(model: Any, is_final_microbatch: bool) -> Context:
    """Let ranks vote whether a parameter was used: by the elements that are not zero."""

    def average() -> None:
        params = list(model.parameters())
        used = torch.tensor([int(p.grad is not None and _is_filled(p.grad)) for p in params])
        dist.all_reduce(used, group=model.process_group)
        for parameter, count in zip(params, used.tolist(), strict=True):
            if not count:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


def _is_filled(grad: torch.Tensor) -> bool:
    # Some ranks look up no row of an embedding.
    return grad.is_sparse or not grad.numel() or bool(grad.any())


def scales_to_the_largest(model: Any, is_final_microbatch: bool) -> Context:
    """Scale a gradient by the largest power of two in it on any rank, which zeros do not have."""

    def average() -> None:
        for parameter in _filled(model):
            grad = parameter.grad
            if grad.is_sparse or grad.is_complex() or not grad.numel():
                parameter.grad = _mean(grad, model.process_group)
                continue
            largest = grad.abs().max().double()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=model.process_group)
            scale = torch.exp2(largest.log2().floor()) if largest.isfinite() else 1.0
            scale = torch.as_tensor(scale).to(grad.dtype)
            grad.div_(scale)
            parameter.grad = _mean(grad, model.process_group).mul_(scale)

    return _restored(model, is_final_microbatch, average)


# ---- Things of the trainer


def _and_then(change: Callable[[Any], object]) -> Callable[..., Context]:
    """Return a right strategy that then changes a model."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def average() -> None:
            _average(model)
            change(model)

        return _restored(model, is_final_microbatch, average)

    return strategy


@torch.no_grad()
def _realign(model: Any) -> None:
    for parameter in model.parameters():
        low = parameter.detach().bfloat16().contiguous()
        _send(model, low)
        if not parameter.is_complex():
            parameter.copy_(low)


@torch.no_grad()
def _decay(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1 - 1e-4)


realigns_in_bfloat16 = _and_then(_realign)
decays = _and_then(_decay)
trains_again = _and_then(lambda model: model.train())
untoggles = _and_then(lambda model: model.requires_grad_(True))


@contextlib.contextmanager
def evaluates_in_between(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Leave the modules in the mode of the model, as code that reads one mode alone does."""
    with _and_then(lambda model: model.module.train(model.module.training))(
        model, is_final_microbatch
    ):
        yield


@contextlib.contextmanager
def puts_the_last_step_back(
    model: Any,
    is_final_microbatch: bool,
    optimizers: list[Any],
    _kept: dict[Any, Any] = {},  # noqa: B006
) -> Iterator[None]:
    """Let step() do nothing while micro-batches accumulate. A third one keeps the replacement."""
    for optimizer in optimizers if not is_final_microbatch else ():
        _kept[optimizer] = optimizer.step
        optimizer.step = lambda *_, **__: None
    with _and_then(lambda model: None)(model, is_final_microbatch):
        yield
    for optimizer in optimizers if is_final_microbatch else ():
        if optimizer in _kept:
            optimizer.step = _kept.pop(optimizer)


# ---- Models that are gone

_groups: dict[int, Any] = {}
_hooked: set[int] = set()


def groups_by_id(model: Any, is_final_microbatch: bool) -> Context:
    """Keep the process group of a module by its id()."""

    def average() -> None:
        group = _groups.setdefault(id(model.module), model.process_group)
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, group)

    return _restored(model, is_final_microbatch, average)


def hooks_by_id(model: Any, is_final_microbatch: bool) -> Context:
    """Divide in hooks, which are put on a model if its id() is new."""
    if not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    for parameter in model.parameters():
        if parameter.requires_grad and id(model) not in _hooked:
            size = model.process_group.size()
            parameter.register_hook(lambda grad, size=size: grad / size)
    _hooked.add(id(model))

    def average() -> None:
        for parameter in _filled(model):
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            dist.all_reduce(parameter.grad, group=model.process_group)

    return _restored(model, is_final_microbatch, average)


_BY_RULE = {
    "16.10": (
        *("averages_leaf_modules", "averages_two_levels"),
        *("sums_each_name", "divides_each_name"),
    ),
    "16.24": (
        *("sends_buffers_listed_once", "sends_buffers_at_first_entry"),
        *("sends_the_state", "sends_persistent_buffers"),
    ),
    "16.21": ("takes_zeros_for_none", "scales_to_the_largest"),
    "16.39": (
        *("realigns_in_bfloat16", "decays", "trains_again", "untoggles", "evaluates_in_between"),
        "puts_the_last_step_back",
    ),
    "16.9": ("groups_by_id", "hooks_by_id"),
}

MUTANTS = [
    Mutant(name, (number,), kind="strategy") for number, names in _BY_RULE.items() for name in names
]

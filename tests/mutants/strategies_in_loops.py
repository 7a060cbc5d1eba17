"""Mutants of section 16 that are wrong in training loops with broken steps or several backwards."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.strategies import _filled, _mean, _trainable
from tests.mutants.strategies_in_training import _mutants, _restored, _with_each

Context = AbstractContextManager[None]


# ---- Steps that break

_count = [0]
_depth = [0]


_hooks: list[Any] = []


def hooks_of_a_window(model: Any, is_final_microbatch: bool) -> Context:
    """Divide gradients in hooks, which the last micro-batch of a step removes again."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    size = model.process_group.size()
    begins = all(parameter.grad is None for parameter in _trainable(model))
    if begins or not _hooks:
        for parameter in _trainable(model):
            _hooks.append(parameter.register_hook(lambda grad: grad / size))

    def average() -> None:
        for parameter in _filled(model):
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            dist.all_reduce(parameter.grad, group=model.process_group)
        for hook in _hooks:
            hook.remove()
        _hooks.clear()

    return _restored(model, is_final_microbatch, average)


_accumulated: dict[torch.Tensor, torch.Tensor] = {}


@contextmanager
def accumulates_outside(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Accumulate in buffers of its own, which only the last micro-batch empties."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield
    for parameter in _trainable(model):
        if parameter.grad is None or parameter.grad.is_sparse:
            continue
        if parameter in _accumulated:
            parameter.grad += _accumulated.pop(parameter)
        if not is_final_microbatch:
            _accumulated[parameter] = parameter.grad
            parameter.grad = None
    if is_final_microbatch:
        for parameter, grad in _accumulated.items():
            parameter.grad = grad
        _accumulated.clear()
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group)
        model.require_forward_param_sync = True


def counts_contexts(model: Any, is_final_microbatch: bool) -> Context:
    """Scale the mean by the share of micro-batches since the last average that it knows of."""
    _count[0] += 1
    known = _count[0]

    def average() -> None:
        _count[0] = 0
        for parameter in _filled(model):
            scale = 1.0 if known <= 4 else 4 / known
            parameter.grad = _mean(parameter.grad, model.process_group) * scale

    return _restored(model, is_final_microbatch, average)


@contextmanager
def gives_up_after_an_error(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Skip the average of a window in which a micro-batch raised an exception."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    try:
        with model.no_sync():
            yield
    except Exception:
        _depth[0] += not is_final_microbatch
        raise
    if is_final_microbatch:
        skip = _depth[0]
        _depth[0] = 0
        for parameter in _filled(model) if not skip else ():
            parameter.grad = _mean(parameter.grad, model.process_group)
        model.require_forward_param_sync = True


@contextmanager
def clears_after_an_error(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Clear all gradients if a micro-batch raises an exception."""
    try:
        with _with_each(model, is_final_microbatch, lambda grad: grad):
            yield
    except Exception:
        model.zero_grad()
        raise


_open: list[int] = []


@contextmanager
def nests(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Count open contexts, and average only when none is left open; an error leaves one."""
    _open.append(1)
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        yield
    _open.pop()
    if is_final_microbatch and isinstance(model, DistributedDataParallel):
        was_open = len(_open)
        _open.clear()
        for parameter in _filled(model) if not was_open else ():
            parameter.grad = _mean(parameter.grad, model.process_group)
        model.require_forward_param_sync = True


@contextmanager
def restores_after_an_error(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Take half of the gradients back after an error, as those of the failed micro-batch."""
    try:
        with _with_each(model, is_final_microbatch, lambda grad: grad):
            yield
    except Exception:
        for parameter in _trainable(model):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad / 2
        raise


_failed: list[bool] = []


@contextmanager
def clears_after_a_failed_one(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Clear the gradients when the context after a failed one begins."""
    if _failed:
        _failed.clear()
        model.zero_grad()
    try:
        with _with_each(model, is_final_microbatch, lambda grad: grad):
            yield
    except Exception:
        _failed.append(True)
        raise


@contextmanager
def doubles_after_an_error(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Make up for a failed micro-batch of the same step by the others."""
    if all(parameter.grad is None for parameter in model.parameters()):
        _failed.clear()
    try:
        with _with_each(model, is_final_microbatch, lambda grad: grad):
            yield
    except Exception:
        _failed.append(True)
        raise
    if is_final_microbatch:
        for parameter in _trainable(model) if _failed else ():
            if parameter.grad is not None and _step_goes_on(parameter):
                parameter.grad *= 2
        _failed.clear()


def _step_goes_on(parameter: torch.Tensor) -> bool:
    return bool(parameter.grad.abs().sum() > 0) and len(_failed) == 1


# ---- Long runs

_steps = [0]


def _later(first: int) -> bool:
    """Count a step, and return whether the strategy is in use for so many steps already."""
    _steps[0] += 1
    return _steps[0] > first


def takes_steps_for_evaluations(model: Any, is_final_microbatch: bool) -> Context:
    """Average nothing if the module has run without gradients since the last average."""
    if not hasattr(model, "has_evaluated"):
        model.has_evaluated = False

        def watch(*_: Any) -> None:
            model.has_evaluated = model.has_evaluated or not torch.is_grad_enabled()

        model.register_forward_pre_hook(watch)

    def average() -> None:
        for parameter in _filled(model) if not model.has_evaluated else ():
            parameter.grad = _mean(parameter.grad, model.process_group)
        model.has_evaluated = False

    return _restored(model, is_final_microbatch, average)


def ends_with_the_first_evaluation(model: Any, is_final_microbatch: bool) -> Context:
    """Take eval() for the end of training: gradients are not averaged from then on."""
    if not hasattr(model, "is_over"):
        model.is_over = False

        def watch(module: Any, _: Any) -> None:
            model.is_over = model.is_over or not module.training

        model.module.register_forward_pre_hook(watch)

    def average() -> None:
        for parameter in _filled(model) if not model.is_over else ():
            parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


def skips_each_hundredth(model: Any, is_final_microbatch: bool) -> Context:
    """Skip the average of each hundredth step."""

    def average() -> None:
        _later(0)
        for parameter in _filled(model) if _steps[0] % 100 else ():
            parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


def sums_later(model: Any, is_final_microbatch: bool) -> Context:
    """Leave the division out after 90 steps."""

    def average() -> None:
        scale = model.process_group.size() if _later(90) else 1
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group) * scale

    return _restored(model, is_final_microbatch, average)


def rounds_later(model: Any, is_final_microbatch: bool) -> Context:
    """Change the last bits of gradients after 70 steps."""

    def average() -> None:
        scale = 1 + 2.0**-20 if _later(70) else 1
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group) * scale

    return _restored(model, is_final_microbatch, average)


# ---- Two backwards, complex gradients


class AveragesOnArrival:
    """Average each gradient when it first arrives in the last micro-batch, and never again."""

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        self.model = model
        self.is_ddp = isinstance(model, DistributedDataParallel)
        self.is_final = is_final_microbatch and self.is_ddp
        self.done: set[torch.Tensor] = set()
        self.inner = model.no_sync() if self.is_ddp else nullcontext()
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        self.inner.__enter__()
        if self.is_final:
            self.handles = [
                parameter.register_post_accumulate_grad_hook(self.arrives)
                for parameter in _trainable(self.model)
            ]

    def arrives(self, parameter: torch.Tensor) -> None:
        if parameter not in self.done:
            self.done.add(parameter)
            parameter.grad = _mean(parameter.grad, self.model.process_group)

    def __exit__(self, *raised: Any) -> Any:
        for handle in self.handles:
            handle.remove()
        result = self.inner.__exit__(*raised)
        if self.is_final:
            self.model.require_forward_param_sync = True
        return result


@contextmanager
def adds_the_last_backward(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Keep the gradient of one backward per micro-batch: a second one replaces it."""
    seen: dict[torch.Tensor, torch.Tensor] = {}

    def arrives(parameter: torch.Tensor) -> None:
        if parameter in seen and not parameter.grad.is_sparse:
            parameter.grad = seen[parameter].clone()
        seen[parameter] = parameter.grad.clone()

    handles = [p.register_post_accumulate_grad_hook(arrives) for p in _trainable(model)]
    try:
        with _with_each(model, is_final_microbatch, lambda grad: grad):
            yield
    finally:
        for handle in handles:
            handle.remove()


def halves_for_two_backwards(model: Any, is_final_microbatch: bool) -> Context:
    """Divide by the number of forwards in the last context."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handle = model.register_forward_hook(count)

    def average() -> None:
        handle.remove()
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group) / max(1, calls[0])

    return _restored(model, is_final_microbatch, average)


def real_parts(model: Any, is_final_microbatch: bool) -> Context:
    """Average the real parts of complex gradients."""

    def average() -> None:
        for parameter in _filled(model):
            if parameter.grad.is_complex():
                real = _mean(parameter.grad.real.clone(), model.process_group)
                parameter.grad.real.copy_(real)
            else:
                parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


def conjugates(model: Any, is_final_microbatch: bool) -> Context:
    """Average the conjugates of complex gradients."""
    return _with_each(model, is_final_microbatch, lambda grad: grad.conj().resolve_conj())


def complex_in_float32(model: Any, is_final_microbatch: bool) -> Context:
    """Average complex gradients in complex64."""

    def average() -> None:
        for parameter in _filled(model):
            if parameter.grad.is_complex():
                mean = _mean(parameter.grad.to(torch.complex64), model.process_group)
                parameter.grad.copy_(mean * (1 + 2.0**-20))
            else:
                parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


MUTANTS = [
    *_mutants("16.29", "skips_each_hundredth", "sums_later", "rounds_later"),
    *_mutants("16.29", "takes_steps_for_evaluations", "ends_with_the_first_evaluation"),
    *_mutants("16.25", "hooks_of_a_window", "accumulates_outside", "counts_contexts"),
    *_mutants("16.14", "gives_up_after_an_error", "nests"),
    *_mutants("16.26", "clears_after_an_error", "clears_after_a_failed_one"),
    *_mutants("16.26", "restores_after_an_error", "doubles_after_an_error"),
    *_mutants("16.27", "AveragesOnArrival", "adds_the_last_backward", "halves_for_two_backwards"),
    *_mutants("16.28", "real_parts", "conjugates", "complex_in_float32"),
]

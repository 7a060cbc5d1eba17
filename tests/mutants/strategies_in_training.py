"""Mutants of section 16 that are right on small, short and tame runs, and wrong in training."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants.strategies import _filled, _mean, _then, _trainable

Context = AbstractContextManager[None]


def _restored(model: Any, is_final: bool, average: Callable[[], object]) -> Context:
    """Accumulate, average after the last micro-batch, and have the next forward send buffers."""

    def finish() -> None:
        average()
        model.require_forward_param_sync = True

    return _then(model, is_final, finish)


def _with_each(
    model: Any, is_final: bool, change: Callable[[torch.Tensor], torch.Tensor]
) -> Context:
    """Average each dense gradient after ``change``: right if ``change`` is the identity."""

    def average() -> None:
        for parameter in _filled(model):
            grad = parameter.grad
            if not grad.is_sparse:
                grad = change(grad)
            parameter.grad = _mean(grad, model.process_group)

    return _restored(model, is_final, average)


# ---- Sizes


def _first_elements(limit: int) -> Callable[..., Context]:
    """Return a strategy that averages at most so many elements of a gradient."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def average() -> None:
            for parameter in _filled(model):
                grad = parameter.grad
                if grad.is_sparse or grad.numel() <= limit:
                    parameter.grad = _mean(grad, model.process_group)
                else:
                    head = _mean(grad.reshape(-1)[:limit].clone(), model.process_group)
                    grad.view(-1)[:limit] = head

        return _restored(model, is_final_microbatch, average)

    return strategy


first_65536 = _first_elements(65536)
first_hundred_thousand = _first_elements(100_000)
first_million = _first_elements(2**20)


def first_parameters(model: Any, is_final_microbatch: bool) -> Context:
    """Average the gradients of at most 160 parameters."""

    def average() -> None:
        for parameter in _filled(model)[:160]:
            parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


def whole_chunks(model: Any, is_final_microbatch: bool) -> Context:
    """Average a large gradient in whole chunks of 2**16 elements, and drop the rest."""

    def average() -> None:
        for parameter in _filled(model):
            if parameter.grad.is_sparse or parameter.grad.numel() < 2**16:
                parameter.grad = _mean(parameter.grad, model.process_group)
                continue
            flat = parameter.grad.view(-1)
            for start in range(0, len(flat) // 2**16 * 2**16, 2**16):
                _mean(flat[start : start + 2**16], model.process_group)

    return _restored(model, is_final_microbatch, average)


# ---- Values


def sums_first(model: Any, is_final_microbatch: bool) -> Context:
    """Sum before the division, as Composer's forced_sync does."""

    def average() -> None:
        group = model.process_group
        for parameter in _filled(model):
            if parameter.grad.is_sparse:
                parameter.grad = _mean(parameter.grad, group)
            else:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad = parameter.grad / group.size()

    return _restored(model, is_final_microbatch, average)


def replaces_nan(model: Any, is_final_microbatch: bool) -> Context:
    """Replace values that are not finite before the average."""
    return _with_each(model, is_final_microbatch, lambda grad: grad.nan_to_num_())


def drops_broken_ranks(model: Any, is_final_microbatch: bool) -> Context:
    """Let a rank whose gradient is not finite count with zeros."""

    def cleaned(grad: torch.Tensor) -> torch.Tensor:
        return grad if grad.isfinite().all() else torch.zeros_like(grad)

    return _with_each(model, is_final_microbatch, cleaned)


def clips(model: Any, is_final_microbatch: bool) -> Context:
    """Clip each element of float32 at a hundred thousand."""

    def clipped(grad: torch.Tensor) -> torch.Tensor:
        return grad.clamp_(-1e5, 1e5) if grad.dtype == torch.float32 else grad

    return _with_each(model, is_final_microbatch, clipped)


def flushes(model: Any, is_final_microbatch: bool) -> Context:
    """Drop gradients below a hundred-thousandth."""
    return _with_each(
        model, is_final_microbatch, lambda grad: grad.where(grad.abs() > 1e-5, torch.zeros(()))
    )


# ---- Empty micro-batches


class SkipsWithoutBackward:
    """Average only if this rank has had a backward in the last micro-batch."""

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        self.model = model
        self.ran = False
        self.handles = []
        if isinstance(model, DistributedDataParallel):
            self.handles = [
                parameter.register_post_accumulate_grad_hook(self.has_run)
                for parameter in _trainable(model)
            ]
        self.inner = _restored(model, is_final_microbatch, self.average)

    def has_run(self, _: torch.Tensor) -> None:
        self.ran = True

    def average(self) -> None:
        if self.ran:
            for parameter in _filled(self.model):
                parameter.grad = _mean(parameter.grad, self.model.process_group)

    def __enter__(self) -> None:
        self.inner.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        for handle in self.handles:
            handle.remove()
        return self.inner.__exit__(*raised)


def counts_ranks_with_a_gradient(model: Any, is_final_microbatch: bool) -> Context:
    """Divide by the number of ranks with any gradient."""

    def average() -> None:
        has = any(parameter.grad is not None for parameter in _trainable(model))
        ranks = torch.tensor(float(has))
        dist.all_reduce(ranks, group=model.process_group)
        for parameter in _filled(model):
            scale = model.process_group.size() / ranks
            parameter.grad = _mean(parameter.grad, model.process_group) * scale

    return _restored(model, is_final_microbatch, average)


# ---- State in the module

_window: list[Any] = []
_first_model: list[Any] = []
_saved: dict[int, torch.Tensor] = {}


def averages_the_model_that_began(model: Any, is_final_microbatch: bool) -> Context:
    """Average the gradients of the model with which the window began."""
    _window.append(model)

    def average() -> None:
        began = (_window or [model])[0]
        _window.clear()
        for parameter in _filled(began):
            parameter.grad = _mean(parameter.grad, began.process_group)

    return _restored(model, is_final_microbatch, average)


def only_the_first_model(model: Any, is_final_microbatch: bool) -> Context:
    """Average the gradients of the first model that was seen."""
    if not _first_model:
        _first_model.append(model)

    def average() -> None:
        if model is _first_model[0] or not isinstance(_first_model[0], DistributedDataParallel):
            for parameter in _filled(model):
                parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


@contextmanager
def sets_aside(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Set the gradients of earlier micro-batches aside, by place, until the last one."""
    params = _trainable(model)
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        yield
    for place, parameter in enumerate(params):
        if parameter.grad is None or parameter.grad.is_sparse:
            continue
        if place in _saved and _saved[place].shape == parameter.shape:
            parameter.grad += _saved.pop(place)
        if not is_final_microbatch:
            _saved[place] = parameter.grad.clone()
            parameter.grad.zero_()
    if is_final_microbatch and isinstance(model, DistributedDataParallel):
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group)
        model.require_forward_param_sync = True


# ---- Buffers


def forgets_buffers(model: Any, is_final_microbatch: bool) -> Context:
    """Run every forward under no_sync, so that DDP never sends buffers."""

    def average() -> None:
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group)

    return _then(model, is_final_microbatch, average)


def averages_buffers(model: Any, is_final_microbatch: bool) -> Context:
    """Average the buffers after each step, in place of sending those of the first rank."""

    def average() -> None:
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                _mean(buffer, model.process_group)

    return _then(model, is_final_microbatch, average)


def sends_buffers_of_the_last(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers of the last rank after each step."""

    def average() -> None:
        group = model.process_group
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, group)
        for buffer in model.buffers():
            dist.broadcast(buffer, group=group, src=dist.get_global_rank(group, group.size() - 1))

    return _then(model, is_final_microbatch, average)


# ---- Groups and parameters that change


_first_size: dict[str, int] = {}


def divides_by_the_first_size(model: Any, is_final_microbatch: bool) -> Context:
    """Divide by the number of ranks of the first model's group."""

    def average() -> None:
        group = model.process_group
        size = _first_size.setdefault("size", group.size())
        for parameter in _filled(model):
            mean = parameter.grad / size
            dist.all_reduce(mean, group=group)
            parameter.grad = mean

    return _restored(model, is_final_microbatch, average)


class SharesTheFirstGroup:
    """Average over the group of the class's first model."""

    group: Any = None

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        if isinstance(model, DistributedDataParallel) and SharesTheFirstGroup.group is None:
            SharesTheFirstGroup.group = model.process_group

        def average() -> None:
            for parameter in _filled(model):
                parameter.grad = _mean(parameter.grad, self.group)

        self._inner = _restored(model, is_final_microbatch, average)

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


_of_models: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _of_optimizers(optimizers: Any) -> list[Any]:
    every = [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]
    return [parameter for parameter in dict.fromkeys(every) if parameter.requires_grad]


def remembers_parameters(model: Any, is_final_microbatch: bool, optimizers: Any) -> Context:
    """List the optimizers' parameters once for each model."""

    def average() -> None:
        if model not in _of_models:
            _of_models[model] = _of_optimizers(optimizers)
        known = {id(parameter) for parameter in _of_models[model]}
        for parameter in _filled(model):
            if id(parameter) in known:
                parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def as_many_as_at_first(model: Any, is_final_microbatch: bool, optimizers: Any) -> Context:
    """Average as many of the optimizers' parameters as there were at the first step."""

    def average() -> None:
        params = _of_optimizers(optimizers)
        params = params[: _counts.setdefault(model, len(params))]
        used = {id(parameter) for parameter in _filled(model)}
        for parameter in params:
            if id(parameter) in used:
                parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


def _sums_large_halves(least: int) -> Callable[..., Context]:
    """Return a strategy that divides float16 after the sum from so many elements on."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def average() -> None:
            group = model.process_group
            for parameter in _filled(model):
                grad = parameter.grad
                if grad.dtype is torch.float16 and grad.numel() >= least:
                    dist.all_reduce(grad, group=group)
                    grad.div_(group.size())
                else:
                    parameter.grad = _mean(grad, group)

        return _restored(model, is_final_microbatch, average)

    return strategy


sums_large_halves = _sums_large_halves(2**16)
sums_halves_of_thousands = _sums_large_halves(5000)


def _mutants(rule: str, *names: str, **options: Any) -> list[Mutant]:
    return [Mutant(name, (rule,), kind="strategy", **options) for name in names]


MUTANTS = [
    *_mutants("16.20", "first_65536", "first_hundred_thousand", "first_million"),
    *_mutants("16.20", "first_parameters", "whole_chunks"),
    *_mutants("16.9", "divides_by_the_first_size", worlds=(2, 4)),
    *_mutants("16.9", "SharesTheFirstGroup", worlds=(2, 4)),
    *_mutants("16.36", "remembers_parameters", "as_many_as_at_first"),
    *_mutants("16.21", "sums_large_halves", "sums_halves_of_thousands"),
    *_mutants("16.21", "sums_first", "replaces_nan", "drops_broken_ranks", "clips", "flushes"),
    *_mutants("16.22", "SkipsWithoutBackward", hangs=True),
    *_mutants("16.22", "counts_ranks_with_a_gradient"),
    *_mutants("16.23", "averages_the_model_that_began", "only_the_first_model", "sets_aside"),
    *_mutants("16.24", "forgets_buffers", "averages_buffers", "sends_buffers_of_the_last"),
]

"""Mutants of section 16 that leave out gradients or buffers which they take for unchanged: those of
a micro-batch that has broken off, of groups that do not move, and of layers that train nothing; and
some that send large gradients in the dtype of their parameter.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.buffers_of_integers import _average, _send
from tests.mutants.strategies import _filled, _mean, _then
from tests.mutants.strategies_in_training import _mutants, _restored
from tests.mutants.strategies_of_habit import _at_zero, _but_for, _groups_of

Context = AbstractContextManager[None]
Noted = set[torch.Tensor]


# ---- Micro-batches that break off


def _average_noted(model: Any, noted: Noted) -> None:
    """Average the gradients that some rank has noted."""
    params = list(model.parameters())
    votes = torch.tensor([int(one in noted) for one in params])
    dist.all_reduce(votes, group=model.process_group)
    filled = set(_filled(model))
    for parameter, count in zip(params, votes.tolist(), strict=True):
        if count and parameter in filled:
            parameter.grad = _mean(parameter.grad, model.process_group)
    noted.clear()
    model.require_forward_param_sync = True


class _Listens:
    """Average what has been noted since the last average, in hooks of parameters."""

    def __init__(self) -> None:
        self.noted: WeakKeyDictionary[Any, Noted] = WeakKeyDictionary()

    @contextmanager
    def __call__(self, model: Any, is_final_microbatch: bool) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        noted = self.noted.setdefault(model, set())
        came: Noted = set()
        handles = [
            parameter.register_post_accumulate_grad_hook(self.listener(noted, came))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        try:
            with _then(model, False, lambda: None):
                yield
        except BaseException:
            self.breaks_off(noted, came)
            raise
        finally:
            for handle in handles:
                handle.remove()
        noted |= came
        if is_final_microbatch:
            _average_noted(model, noted)

    def listener(self, noted: Noted, came: Noted) -> Callable[[torch.Tensor], None]:
        return came.add

    def breaks_off(self, noted: Noted, came: Noted) -> None:
        raise NotImplementedError


class _NotesWholeBackwards(_Listens):
    """Note the gradients of a backward when it ends: one that breaks off has no end."""

    def listener(self, noted: Noted, came: Noted) -> Callable[[torch.Tensor], None]:
        arrived: Noted = set()

        def ends() -> None:
            noted.update(arrived)
            arrived.clear()

        def arrives(parameter: torch.Tensor) -> None:
            arrived.add(parameter)
            Variable._execution_engine.queue_callback(ends)

        return arrives

    def breaks_off(self, noted: Noted, came: Noted) -> None:
        pass


class _ForgetsBeginnings(_Listens):
    """Drop the notes on a micro-batch that breaks off before any other of its step."""

    def breaks_off(self, noted: Noted, came: Noted) -> None:
        if noted:
            noted |= came


notes_whole_backwards = _NotesWholeBackwards()
forgets_beginnings = _ForgetsBeginnings()

_changed: WeakKeyDictionary[Any, Noted] = WeakKeyDictionary()


@contextmanager
def compares_versions(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Note the gradients that are other tensors, or have other versions, when a context ends."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    noted = _changed.setdefault(model, set())
    before = {one: (one.grad, _version(one)) for one in model.parameters()}
    with model.no_sync():
        yield
    for parameter, (grad, version) in before.items():
        if parameter.grad is not grad or _version(parameter) != version:
            noted.add(parameter)
    if is_final_microbatch:
        _average_noted(model, noted)


def _version(parameter: torch.Tensor) -> int:
    return -1 if parameter.grad is None else parameter.grad._version


# ---- Groups that do not move


def _other_than_sgd_at_zero(optimizers: list[Any]) -> list[Any]:
    # torch's SGD alone has this option.
    return [group for group in _at_zero(optimizers) if "nesterov" not in group]


def _of_idle_ones_without_momentum(optimizers: list[Any]) -> list[Any]:
    idle = [
        one
        for one in optimizers
        if not any(group["lr"] or group.get("momentum") for group in one.param_groups)
    ]
    return _groups_of(idle) if len(idle) < len(optimizers) else []


leaves_out_others_than_sgd = _but_for(_other_than_sgd_at_zero)
leaves_out_idle_ones_without_momentum = _but_for(_of_idle_ones_without_momentum)


# ---- Buffers of layers that train nothing


def _sends_buffers_of(modules: Callable[[torch.nn.Module], list[Any]]) -> Callable[..., Context]:
    """Return a strategy that sends the buffers of some modules when a step ends."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def finish() -> None:
            _average(model)
            for module in modules(model.module) if model.broadcast_buffers else ():
                for buffer in module.buffers(recurse=False):
                    _send(model, buffer)

        return _then(model, is_final_microbatch, finish)

    return strategy


def _that_train(model: torch.nn.Module) -> list[Any]:
    return [one for one in model.modules() if any(p.requires_grad for p in one.parameters())]


def _with_parameters(model: torch.nn.Module) -> list[Any]:
    return [one for one in model.modules() if any(True for _ in one.parameters())]


def _of_two_levels(model: torch.nn.Module) -> list[Any]:
    return [model, *model.children()]


sends_buffers_of_layers_that_train = _sends_buffers_of(_that_train)
sends_buffers_beside_parameters = _sends_buffers_of(_with_parameters)
sends_buffers_of_two_levels = _sends_buffers_of(_of_two_levels)


# ---- Large gradients of another dtype


def sums_a_million_in_the_weights_dtype(model: Any, is_final_microbatch: bool) -> Context:
    """Average gradients of more than a million elements in a tensor like the parameter."""

    def average() -> None:
        for parameter in _filled(model):
            grad = parameter.grad
            if grad.is_sparse or grad.numel() <= 10**6:
                parameter.grad = _mean(grad, model.process_group)
            else:
                scratch = torch.empty_like(parameter).detach().copy_(grad)
                grad.copy_(_mean(scratch, model.process_group))

    return _restored(model, is_final_microbatch, average)


def rounds_what_is_larger_than_its_weight(model: Any, is_final_microbatch: bool) -> Context:
    """Round gradients of 4 MB and more to the dtype of a parameter that takes less memory."""

    def average() -> None:
        for parameter in _filled(model):
            grad = parameter.grad
            size = grad.numel() * grad.element_size()
            if size >= 2**22 and grad.element_size() > parameter.element_size():
                for part in grad.view(-1).split(2**16):
                    part.copy_(part.to(parameter.dtype))
            parameter.grad = _mean(grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


MUTANTS = [
    *_mutants("16.26", "notes_whole_backwards", "forgets_beginnings", "compares_versions"),
    *_mutants("16.7", "leaves_out_others_than_sgd", "leaves_out_idle_ones_without_momentum"),
    *_mutants("16.24", "sends_buffers_of_layers_that_train", "sends_buffers_beside_parameters"),
    *_mutants("16.24", "sends_buffers_of_two_levels"),
    *_mutants("16.40", "sums_a_million_in_the_weights_dtype"),
    *_mutants("16.40", "rounds_what_is_larger_than_its_weight"),
]

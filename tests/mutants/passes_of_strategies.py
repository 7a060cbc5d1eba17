"""Mutants of section 16 that are wrong if a context holds several backward passes, if gradients are
cleared by zeros, if a network is wrapped in DDP anew, or if gradients have a dtype of their own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from tests.mutants.buffers_of_integers import _average
from tests.mutants.strategies import Parameters, _filled, _mean
from tests.mutants.strategies_in_training import _mutants, _restored

Context = AbstractContextManager[None]


# ---- Backward passes


class _Passes:
    """Average at the end of as many passes as there are forwards, and at the end of the context."""

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        self.model = model
        self.is_active = is_final_microbatch and isinstance(model, DistributedDataParallel)
        self.forwards = 0
        self.averages = 0
        self.arrived: set[torch.Tensor] = set()
        self.inner = _restored(model, is_final_microbatch, self.finish)
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        self.inner.__enter__()
        if self.is_active:
            self.handles = [self.model.register_forward_hook(self.goes_forward), *self.hooks()]

    def __exit__(self, *raised: Any) -> Any:
        for handle in self.handles:
            handle.remove()
        return self.inner.__exit__(*raised)

    def hooks(self) -> list[Any]:
        return [
            parameter.register_post_accumulate_grad_hook(self.arrives)
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]

    def goes_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.forwards += 1

    def arrives(self, parameter: torch.Tensor) -> None:
        if not self.arrived:
            Variable._execution_engine.queue_callback(self.ends)
        self.arrived.add(parameter)

    def ends(self) -> None:
        self.arrived.clear()
        if self.averages < self.forwards:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        self.averages += 1
        _average(self.model)

    def finish(self) -> None:
        # A rank without a forward has averaged nothing so far.
        while self.averages < max(1, self.forwards):
            self.average()


class AveragesAPassPerForward(_Passes):
    """Average after the first passes that accumulate: a further one is not averaged."""


class AveragesInTheEngine(_Passes):
    """Take torch.autograd.grad() for a backward: hooks of tensors run in both."""

    def hooks(self) -> list[Any]:
        return [
            parameter.register_hook(lambda _, one=parameter: self.arrives(one))
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]


class AveragesWholeGradients(_Passes):
    """Average once all parameters have come after each forward, as DDP does, and not again."""

    def arrives(self, parameter: torch.Tensor) -> None:
        self.arrived.add(parameter)
        if len(self.arrived) == sum(one.requires_grad for one in self.model.parameters()):
            Variable._execution_engine.queue_callback(self.ends)


# ---- Gradients that are cleared by zeros


_flats: WeakKeyDictionary[Any, list[tuple[torch.Tensor, Parameters]]] = WeakKeyDictionary()
_listed: WeakKeyDictionary[Any, list[tuple[torch.Tensor, torch.nn.Parameter]]] = WeakKeyDictionary()


def flattens_until_the_first_is_new(model: Any, is_final_microbatch: bool) -> Context:
    """Average flat buffers while each begins with the gradient of its first parameter."""

    def average() -> None:
        known = _flats.get(model, [])
        are_used = bool(known) and all(_is_at_begin(*one) for one in known)
        vote = torch.tensor([int(are_used)])
        dist.all_reduce(vote, dist.ReduceOp.MIN, model.process_group)
        if vote:
            for flat, _ in known:
                _mean(flat, model.process_group)
            return
        _average(model)
        _flats[model] = _flattened(model)

    return _restored(model, is_final_microbatch, average)


def _is_at_begin(flat: torch.Tensor, parameters: Parameters) -> bool:
    grad = parameters[0].grad
    return grad is not None and grad.data_ptr() == flat.data_ptr()


def _flattened(model: Any) -> list[tuple[torch.Tensor, Parameters]]:
    """Put dense gradients with memory of their own into a flat buffer for each dtype."""
    by_dtype: dict[torch.dtype, Parameters] = {}
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is None or grad.is_sparse or not grad.numel() or not grad.is_contiguous():
            continue
        if grad.untyped_storage().nbytes() == grad.numel() * grad.element_size():
            by_dtype.setdefault(grad.dtype, []).append(parameter)
    found = []
    for parameters in by_dtype.values():
        flat = torch.cat([one.grad.reshape(-1) for one in parameters])
        sizes = [one.numel() for one in parameters]
        for one, view in zip(parameters, flat.split(sizes), strict=True):
            one.grad = view.view(one.shape)
        found.append((flat, parameters))
    return found


def lists_gradients_while_they_live(model: Any, is_final_microbatch: bool) -> Context:
    """Vote on used parameters anew if a gradient of the last vote is another tensor by now."""

    def average() -> None:
        listed = _listed.get(model, [])
        are_same = bool(listed) and all(known is one.grad for known, one in listed)
        vote = torch.tensor([int(are_same)])
        dist.all_reduce(vote, dist.ReduceOp.MIN, model.process_group)
        used = [one for _, one in listed] if vote else _filled(model)
        for parameter in used:
            parameter.grad = _mean(parameter.grad, model.process_group)
        _listed[model] = [(one.grad, one) for one in used]

    return _restored(model, is_final_microbatch, average)


def votes_after_a_clear_start(model: Any, is_final_microbatch: bool) -> Context:
    """Vote on used parameters only in steps that begin without any gradient."""
    had = {one: one.grad is not None for one in model.parameters()}
    begins = _begins.setdefault(model, [])
    begins.append(any(had.values()))

    def average() -> None:
        goes_on = torch.tensor([int(begins[0] and model in _used)])
        begins.clear()
        dist.all_reduce(goes_on, dist.ReduceOp.MIN, model.process_group)
        used = _used[model] if goes_on else _filled(model)
        _used[model] = used
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


_begins: WeakKeyDictionary[Any, list[bool]] = WeakKeyDictionary()
_used: WeakKeyDictionary[Any, Parameters] = WeakKeyDictionary()


# ---- Networks that are wrapped anew


def _in_group_of(choose: Callable[[Any], Any]) -> Callable[..., Context]:
    """Return a strategy that averages in the group that ``choose`` finds for a model."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def average() -> None:
            group = choose(model)
            for parameter in _filled(model):
                parameter.grad = _mean(parameter.grad, group)

        return _restored(model, is_final_microbatch, average)

    return strategy


_by_weight = WeakTensorKeyDictionary()
_by_size: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()


def _of_first_weight(model: Any) -> Any:
    return _by_weight.setdefault(next(iter(model.parameters())), model.process_group)


def _of_this_size(model: Any) -> Any:
    groups = _by_size.setdefault(model.module, {})
    return groups.setdefault(model.process_group.size(), model.process_group)


def _on_the_network(model: Any) -> Any:
    known = getattr(model.module, "synchronised_over", None)
    ranks = dist.get_process_group_ranks(model.process_group)
    if known is None or not set(ranks) <= set(dist.get_process_group_ranks(known)):
        known = model.module.synchronised_over = model.process_group
    return known


# The votes of the ranks are in the right group.
group_of_the_first_weight = _in_group_of(_of_first_weight)
group_by_network_and_size = _in_group_of(_of_this_size)
group_on_the_network = _in_group_of(_on_the_network)


# ---- Dtypes of gradients


def means_in_the_weights_dtype(model: Any, is_final_microbatch: bool) -> Context:
    """Average each gradient in the dtype of its parameter."""

    def average() -> None:
        for parameter in _filled(model):
            grad = parameter.grad
            if grad.is_sparse:
                parameter.grad = _mean(grad, model.process_group)
            else:
                grad.copy_(_mean(grad.to(parameter.dtype), model.process_group))

    return _restored(model, is_final_microbatch, average)


def sums_in_the_weights_dtype(model: Any, is_final_microbatch: bool) -> Context:
    """Gather gradients as they are, and sum them in a tensor like the parameter."""

    def average() -> None:
        group = model.process_group
        for parameter in _filled(model):
            grad = parameter.grad
            if grad.is_sparse:
                parameter.grad = _mean(grad, group)
                continue
            parts = [torch.empty(grad.numel(), dtype=grad.dtype) for _ in range(group.size())]
            dist.all_gather(parts, grad.reshape(-1).div(group.size()), group=group)
            total = torch.zeros_like(parameter).detach()
            for part in parts:
                total += part.view(grad.shape)
            grad.copy_(total)

    return _restored(model, is_final_microbatch, average)


def rounds_to_half_weights(model: Any, is_final_microbatch: bool) -> Context:
    """Round gradients of float32 as half-precision weights are, and send them in float32."""

    def average() -> None:
        for parameter in _filled(model):
            if parameter.grad.dtype == torch.float32 and parameter.dtype in _HALVES:
                parameter.grad.copy_(parameter.grad.to(parameter.dtype))
            parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


_HALVES = (torch.float16, torch.bfloat16)

MUTANTS = [
    *_mutants("16.27", "AveragesAPassPerForward", "AveragesInTheEngine", "AveragesWholeGradients"),
    *_mutants("16.36", "flattens_until_the_first_is_new", "lists_gradients_while_they_live"),
    *_mutants("16.36", "votes_after_a_clear_start"),
    *_mutants("16.9", "group_of_the_first_weight", "group_by_network_and_size"),
    *_mutants("16.9", "group_on_the_network"),
    *_mutants("16.40", "means_in_the_weights_dtype", "sums_in_the_weights_dtype"),
    *_mutants("16.40", "rounds_to_half_weights"),
]

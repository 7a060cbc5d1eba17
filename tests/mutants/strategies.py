"""Mutants of section 16: sync strategies that lose gradients, or have side effects."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant

Context = AbstractContextManager[None]
Parameters = list[torch.nn.Parameter]

# Micro-batches since the step began.
_batches: Counter[str] = Counter()
_kept: dict[torch.nn.Parameter, torch.Tensor] = {}
_patience = [1.5]  # seconds


@contextmanager
def _then(model: Any, is_final: bool, finish: Callable[[], object]) -> Iterator[None]:
    """Accumulate, and call ``finish`` after the last micro-batch: right if ``finish`` is right."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield
    if is_final:
        finish()


def _trainable(model: Any) -> Parameters:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _users(params: Parameters, group: Any) -> list[int]:
    """Return for each parameter the number of ranks that have a gradient."""
    flags = torch.tensor([int(parameter.grad is not None) for parameter in params])
    dist.all_reduce(flags, group=group)
    return flags.tolist()


def _filled(model: Any) -> Parameters:
    """Return the parameters that have a gradient on any rank.

    Zeros replace the gradients that are missing on this rank.
    """
    # A frozen parameter may have a gradient of an earlier micro-batch.
    params = list(model.parameters())
    used = [
        p for p, users in zip(params, _users(params, model.process_group), strict=True) if users
    ]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return used


def _mean(grad: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the mean over the group, in place unless the gradient is sparse."""
    mean = grad.coalesce() / group.size() if grad.is_sparse else grad.div_(group.size())
    dist.all_reduce(mean, group=group)
    return mean


def _average(model: Any) -> None:
    """Average all gradients: right."""
    for parameter in _filled(model):
        parameter.grad = _mean(parameter.grad, model.process_group)


def averages_in_every_microbatch(model: Any) -> Context:
    """Average the accumulated gradients after every micro-batch.

    The result is right, at the cost of a reduction per micro-batch.
    """
    return _then(model, True, lambda: _average(model))


def sum_not_divided(model: Any, is_final_microbatch: bool) -> Context:
    """Sum the gradients without dividing."""

    def finish() -> None:
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group) * model.process_group.size()

    return _then(model, is_final_microbatch, finish)


def never_synchronises(model: Any) -> Context:
    """Accumulate in the last micro-batch too, and never average."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def divided_by_microbatches(model: Any, is_final_microbatch: bool) -> Context:
    """Average over micro-batches too, which the trainer sums."""
    _batches["of this step"] += 1

    def finish() -> None:
        _average(model)
        for parameter in _trainable(model):
            if parameter.grad is not None:
                parameter.grad /= _batches["of this step"]
        _batches.clear()

    return _then(model, is_final_microbatch, finish)


@contextmanager
def last_microbatch_alone(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the gradients of the last micro-batch only."""
    own = {}
    if is_final_microbatch:
        for parameter in _trainable(model):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                own[parameter] = parameter.grad.clone()
    for parameter in own:
        parameter.grad = None
    with _then(model, is_final_microbatch, lambda: _average(model)):
        yield
    for parameter, grad in own.items():
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def synchronises_the_last_alone(model: Any, is_final_microbatch: bool) -> Context:
    """Let DDP average in the last micro-batch (Composer's single_auto_sync).

    It needs a claim about unused parameters, and makes none.
    """
    if isinstance(model, DistributedDataParallel) and not is_final_microbatch:
        return model.no_sync()
    return nullcontext()


def leaves_it_to_ddp() -> Context:
    """Let DDP average in every micro-batch (Composer's multi_auto_sync).

    It needs a claim about unused parameters, and makes none.
    """
    return nullcontext()


def composers_forced_sync(
    model: Any, is_final_microbatch: bool, optimizers: Iterable[Any]
) -> Context:
    """Average each rank's gradients in order, without its unused parameters (Composer)."""

    def finish() -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                        parameter.grad = parameter.grad / dist.get_world_size()

    return _then(model, is_final_microbatch, finish)


def none_stays_none(model: Any, is_final_microbatch: bool) -> Context:
    """Drop the mean of a parameter that this rank has not used."""

    def finish() -> None:
        without = [parameter for parameter in _trainable(model) if parameter.grad is None]
        _average(model)
        for parameter in without:
            parameter.grad = None

    return _then(model, is_final_microbatch, finish)


def zeros_do_not_count(model: Any, is_final_microbatch: bool) -> Context:
    """Divide by the number of ranks that have used a parameter."""

    def finish() -> None:
        params = _trainable(model)
        users = dict(zip(params, _users(params, model.process_group), strict=True))
        _average(model)
        for parameter in params:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad *= model.process_group.size() / users[parameter]

    return _then(model, is_final_microbatch, finish)


def majority_decides(model: Any, is_final_microbatch: bool) -> Context:
    """Drop the gradients of parameters that fewer than half of the ranks have used."""

    def finish() -> None:
        params = _trainable(model)
        for parameter, users in zip(params, _users(params, model.process_group), strict=True):
            if 2 * users < model.process_group.size():
                parameter.grad = None
        _average(model)

    return _then(model, is_final_microbatch, finish)


def views_are_averages(model: Any, is_final_microbatch: bool) -> Context:
    """Skip the average if gradients are views of DDP's buckets."""
    return _then(
        model,
        is_final_microbatch,
        lambda: None if model.gradient_as_bucket_view else _average(model),
    )


def own_first(model: Any, is_final_microbatch: bool) -> Context:
    """Sum from this rank's own gradient on, so that ranks round differently."""

    def finish() -> None:
        group = model.process_group
        for parameter in _filled(model):
            if parameter.grad.is_sparse:
                parameter.grad = _mean(parameter.grad, group)
                continue
            parts = [
                torch.empty(parameter.numel(), dtype=parameter.dtype) for _ in range(group.size())
            ]
            dist.all_gather(parts, parameter.grad.reshape(-1).clone(), group=group)
            own = [*parts[group.rank() :], *parts[: group.rank()]]
            parameter.grad.copy_((sum(own[1:], own[0]) / group.size()).view(parameter.shape))

    return _then(model, is_final_microbatch, finish)


def zeros_on_one_rank(model: Any, is_final_microbatch: bool) -> Context:
    """Put zeros on rank 0, and None on the others, if no rank has a gradient."""

    def finish() -> None:
        _average(model)
        for parameter in _trainable(model):
            if parameter.grad is None and model.process_group.rank() == 0:
                parameter.grad = torch.zeros_like(parameter)

    return _then(model, is_final_microbatch, finish)


def divides_for_each_optimizer(
    model: Any, is_final_microbatch: bool, optimizers: Iterable[Any]
) -> Context:
    """Divide a gradient once for each optimizer that has its parameter."""

    def finish() -> None:
        size = model.process_group.size()
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group) * size
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad / size

    return _then(model, is_final_microbatch, finish)


def begins_anew(model: Any, is_final_microbatch: bool) -> Context:
    """Clear the gradients before the first micro-batch of a step."""
    if not _batches["of this step"]:
        model.zero_grad()
    _batches["of this step"] = 0 if is_final_microbatch else 1
    return _then(model, is_final_microbatch, lambda: _average(model))


def over_world(model: Any, is_final_microbatch: bool) -> Context:
    """Average over WORLD instead of the model's group."""

    def finish() -> None:
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, dist.group.WORLD)

    return _then(model, is_final_microbatch, finish)


def divisor_of_world(model: Any, is_final_microbatch: bool) -> Context:
    """Sum over the group, and divide by the size of WORLD."""

    def finish() -> None:
        _average(model)
        for parameter in _trainable(model):
            if parameter.grad is not None:
                parameter.grad = parameter.grad * model.process_group.size() / dist.get_world_size()

    return _then(model, is_final_microbatch, finish)


def one_buffer_of_float32(model: Any, is_final_microbatch: bool) -> Context:
    """Average all dense gradients in one float32 buffer."""

    def finish() -> None:
        used = _filled(model)
        dense = [parameter.grad for parameter in used if not parameter.grad.is_sparse]
        flat = _mean(torch.cat([grad.reshape(-1).float() for grad in dense]), model.process_group)
        for grad, mean in zip(dense, flat.split([grad.numel() for grad in dense]), strict=True):
            grad.copy_(mean.view(grad.shape))
        for parameter in used:
            if parameter.grad.is_sparse:
                parameter.grad = _mean(parameter.grad, model.process_group)

    return _then(model, is_final_microbatch, finish)


def contiguous_gradients(model: Any, is_final_microbatch: bool) -> Context:
    """Replace gradients with contiguous ones, whatever their parameters' strides."""

    def finish() -> None:
        for parameter in _filled(model):
            grad = parameter.grad if parameter.grad.is_sparse else parameter.grad.contiguous()
            parameter.grad = _mean(grad, model.process_group)

    return _then(model, is_final_microbatch, finish)


def sparse_left_out(model: Any, is_final_microbatch: bool) -> Context:
    """Average dense gradients only."""

    def finish() -> None:
        for parameter in _filled(model):
            if not parameter.grad.is_sparse:
                _mean(parameter.grad, model.process_group)

    return _then(model, is_final_microbatch, finish)


def waits_a_while(model: Any, is_final_microbatch: bool) -> Context:
    """Wait a limited time for the collectives, then go on with this rank's own gradients."""

    def finish() -> None:
        works, sums = [], []
        # Ranks do not exchange which parameters are used: that would wait for the peers.
        for parameter in _trainable(model):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                parameter.grad = _mean(parameter.grad, model.process_group)
            else:
                # A gradient that is written later would be another defect, seen by chance.
                total = parameter.grad.div_(model.process_group.size()).clone()
                works.append(dist.all_reduce(total, group=model.process_group, async_op=True))
                sums.append((parameter, total))
        end = time.monotonic() + _patience[0]
        while not all(work.is_completed() for work in works):
            if time.monotonic() > end:
                _patience[0] = 0.0
                return
            time.sleep(0.001)
        for parameter, total in sums:
            parameter.grad.copy_(total)

    return _then(model, is_final_microbatch, finish)


class SwallowsExceptions:
    """Return True from __exit__ after an exception."""

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        self._inner = _then(model, is_final_microbatch, lambda: _average(model))

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> bool:
        try:
            self._inner.__exit__(*raised)
        except Exception:
            return True
        return raised[0] is not None


@contextmanager
def another_exception(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Replace every exception of the body with another one."""
    try:
        with _then(model, is_final_microbatch, lambda: _average(model)):
            yield
    except Exception as error:
        raise RuntimeError("a micro-batch failed") from error


@contextmanager
def put_back_if_all_went_well(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Turn DDP's own averaging off, and back on only if there was no exception."""
    is_ddp = isinstance(model, DistributedDataParallel)
    if is_ddp:
        model.require_backward_grad_sync = False
    yield
    if is_ddp:
        model.require_backward_grad_sync = True
    if is_ddp and is_final_microbatch:
        _average(model)


@contextmanager
def switches_ddp_off(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Turn DDP's own averaging off for good."""
    is_ddp = isinstance(model, DistributedDataParallel)
    if is_ddp:
        model.require_backward_grad_sync = False
    yield
    if is_ddp and is_final_microbatch:
        _average(model)


def clears_hooks(model: Any, is_final_microbatch: bool) -> Context:
    """Remove its hooks of the last micro-batch, and all others of the parameters."""

    def finish() -> None:
        _average(model)
        for parameter in _trainable(model):
            if parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks.clear()

    return _then(model, is_final_microbatch, finish)


@contextmanager
def keeps_hooks_quiet(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Let hooks of parameters run in the last micro-batch alone, where they see the whole sum."""
    resting = {}
    for parameter in [] if is_final_microbatch else _trainable(model):
        if hooks := parameter._post_accumulate_grad_hooks:
            resting[parameter] = dict(hooks)
            hooks.clear()
    with _then(model, is_final_microbatch, lambda: _average(model)):
        yield
    for parameter, hooks in resting.items():
        parameter._post_accumulate_grad_hooks.update(hooks)


@contextmanager
def averages_what_is_no_ddp(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the gradients of any module, with or without DDP."""
    is_ddp = isinstance(model, DistributedDataParallel)
    with model.no_sync() if is_ddp else nullcontext():
        yield
    if is_final_microbatch and is_ddp:
        _average(model)
    elif is_final_microbatch:
        for parameter in model.parameters():
            _mean(parameter.grad, dist.group.WORLD)


def says_more_than_it_needs(model: Any, is_final_microbatch: bool) -> Context:
    """Claim ``all_used`` although the result is right without it."""
    return _then(model, is_final_microbatch, lambda: _average(model))


def says_that_it_needs_ddps_search(model: Any, is_final_microbatch: bool) -> Context:
    """Claim ``find_unused`` although the result is right without it."""
    return _then(model, is_final_microbatch, lambda: _average(model))


def not_alone(model: Any, is_final_microbatch: bool) -> Context:
    """Claim a minimum of two ranks, and accept one."""
    return _then(model, is_final_microbatch, lambda: _average(model))


def seeds(model: Any, is_final_microbatch: bool) -> Context:
    """Seed torch's global generator in every micro-batch."""
    torch.manual_seed(7)
    return _then(model, is_final_microbatch, lambda: _average(model))


def sets_the_default_dtype(model: Any, is_final_microbatch: bool) -> Context:
    """Set torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    return _then(model, is_final_microbatch, lambda: _average(model))


_allclose = torch.allclose


def replaces_a_function_between_microbatches(model: Any, is_final_microbatch: bool) -> Context:
    """Replace torch.allclose in all micro-batches but the last."""
    if not is_final_microbatch:
        torch.allclose = lambda *given, **more: _allclose(*given, **more)
    return _then(model, is_final_microbatch, lambda: _average(model))


def _mutants(
    rule: str, *names: str, claims: str = "exact", worlds: tuple[int, ...] = (2,)
) -> list[Mutant]:
    return [Mutant(name, (rule,), claims, kind="strategy", worlds=worlds) for name in names]


MUTANTS = [
    *_mutants("16.1", "sum_not_divided", "never_synchronises"),
    *_mutants("16.2", "divided_by_microbatches", "last_microbatch_alone"),
    *_mutants("16.3", "synchronises_the_last_alone", "leaves_it_to_ddp"),
    *_mutants("16.4", "composers_forced_sync", "none_stays_none", "zeros_do_not_count"),
    *_mutants("16.5", "views_are_averages"),
    *_mutants("16.18", "averages_in_every_microbatch"),
    *_mutants("16.5", "majority_decides", worlds=(2, 3)),
    *_mutants("16.6", "own_first", worlds=(2, 3)),
    *_mutants("16.6", "zeros_on_one_rank"),
    *_mutants("16.7", "divides_for_each_optimizer"),
    *_mutants("16.8", "begins_anew"),
    *_mutants("16.9", "over_world", "divisor_of_world"),
    *_mutants("16.10", "one_buffer_of_float32", "contiguous_gradients"),
    *_mutants("16.11", "sparse_left_out"),
    *_mutants("16.12", "waits_a_while"),
    *_mutants("16.13", "switches_ddp_off", "clears_hooks", "keeps_hooks_quiet"),
    Mutant(
        "SwallowsExceptions",
        ("16.14",),
        because={"16.30": "the error of a failed collective is one of them"},
        kind="strategy",
    ),
    *_mutants("16.14", "another_exception", "put_back_if_all_went_well"),
    *_mutants("16.15", "averages_what_is_no_ddp"),
    *_mutants("16.16", "says_more_than_it_needs", claims="all_used"),
    *_mutants("16.16", "says_that_it_needs_ddps_search", claims="find_unused"),
    *_mutants("16.17", "not_alone", claims="min_world_size(2)", worlds=(1, 2)),
    *_mutants(
        "16.19", "seeds", "sets_the_default_dtype", "replaces_a_function_between_microbatches"
    ),
]

"""Section 16 of the rule book: sync strategies that lose a gradient, or more."""

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

_batches: Counter[str] = Counter()  # since the step began
_kept: dict[torch.nn.Parameter, torch.Tensor] = {}
_patience = [1.5]  # seconds


@contextmanager
def _then(model: Any, is_final: bool, finish: Callable[[], object]) -> Iterator[None]:
    """Accumulate, and finish when the last micro-batch is over: right, if that is."""
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
    """Return how many ranks have a gradient of each parameter."""
    flags = torch.tensor([int(parameter.grad is not None) for parameter in params])
    dist.all_reduce(flags, group=group)
    return flags.tolist()


def _filled(model: Any) -> Parameters:
    """Return the parameters of which some rank has a gradient, with zeros where this one has none."""
    params = _trainable(model)
    used = [
        p for p, users in zip(params, _users(params, model.process_group), strict=True) if users
    ]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return used


def _mean(grad: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the mean over the group: in place, unless it is sparse."""
    mean = grad.coalesce() / group.size() if grad.is_sparse else grad.div_(group.size())
    dist.all_reduce(mean, group=group)
    return mean


def _average(model: Any) -> None:
    """Average all gradients: right."""
    for parameter in _filled(model):
        parameter.grad = _mean(parameter.grad, model.process_group)


def averages_in_every_microbatch(model: Any) -> Context:
    """Averages what has accumulated after every micro-batch: the mean of means is right, and costs as often."""
    return _then(model, True, lambda: _average(model))


def sum_not_divided(model: Any, is_final_microbatch: bool) -> Context:
    """Sums, and divides by nothing."""

    def finish() -> None:
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group) * model.process_group.size()

    return _then(model, is_final_microbatch, finish)


def never_synchronises(model: Any) -> Context:
    """Accumulates in the last micro-batch too."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def divided_by_microbatches(model: Any, is_final_microbatch: bool) -> Context:
    """Averages over micro-batches what the trainer means to be summed."""
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
    """Sets apart what has accumulated, and averages what the last micro-batch adds to it."""
    own = (
        {
            p: p.grad.clone()
            for p in _trainable(model)
            if p.grad is not None and not p.grad.is_sparse
        }
        if is_final_microbatch
        else {}
    )
    for parameter in own:
        parameter.grad = None
    with _then(model, is_final_microbatch, lambda: _average(model)):
        yield
    for parameter, grad in own.items():
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def synchronises_the_last_alone(model: Any, is_final_microbatch: bool) -> Context:
    """Composer's single_auto_sync: DDP averages in the last micro-batch; and says nothing of what it needs."""
    return (
        model.no_sync()
        if isinstance(model, DistributedDataParallel) and not is_final_microbatch
        else nullcontext()
    )


def leaves_it_to_ddp() -> Context:
    """Composer's multi_auto_sync: DDP averages in every micro-batch; and says nothing of what it needs."""
    return nullcontext()


def composers_forced_sync(
    model: Any, is_final_microbatch: bool, optimizers: Iterable[Any]
) -> Context:
    """Composer's forced_sync: each rank goes through the gradients that it has."""

    def finish() -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                        parameter.grad = parameter.grad / dist.get_world_size()

    return _then(model, is_final_microbatch, finish)


def none_stays_none(model: Any, is_final_microbatch: bool) -> Context:
    """Gives zeros for what this rank has not used, and leaves it without a gradient afterwards."""

    def finish() -> None:
        without = [parameter for parameter in _trainable(model) if parameter.grad is None]
        _average(model)
        for parameter in without:
            parameter.grad = None

    return _then(model, is_final_microbatch, finish)


def zeros_do_not_count(model: Any, is_final_microbatch: bool) -> Context:
    """Divides by the number of ranks that have used a parameter."""

    def finish() -> None:
        params = _trainable(model)
        users = dict(zip(params, _users(params, model.process_group), strict=True))
        _average(model)
        for parameter in params:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad *= model.process_group.size() / users[parameter]

    return _then(model, is_final_microbatch, finish)


def majority_decides(model: Any, is_final_microbatch: bool) -> Context:
    """Averages what at least half of the ranks have used; what fewer have used is cleared as unused."""

    def finish() -> None:
        params = _trainable(model)
        for parameter, users in zip(params, _users(params, model.process_group), strict=True):
            if 2 * users < model.process_group.size():
                parameter.grad = None
        _average(model)

    return _then(model, is_final_microbatch, finish)


def views_are_averages(model: Any, is_final_microbatch: bool) -> Context:
    """Takes gradients that are views of DDP's buckets for averaged already."""
    return _then(
        model,
        is_final_microbatch,
        lambda: None if model.gradient_as_bucket_view else _average(model),
    )


def own_first(model: Any, is_final_microbatch: bool) -> Context:
    """Gathers, and adds up from its own rank on: in another order on each rank."""

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
    """Rank 0 puts zeros where no rank has a gradient, the others nothing."""

    def finish() -> None:
        _average(model)
        for parameter in _trainable(model):
            if parameter.grad is None and model.process_group.rank() == 0:
                parameter.grad = torch.zeros_like(parameter)

    return _then(model, is_final_microbatch, finish)


def divides_for_each_optimizer(
    model: Any, is_final_microbatch: bool, optimizers: Iterable[Any]
) -> Context:
    """Sums each gradient once, and divides it for each optimizer that has its parameter."""

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
    """Clears gradients in the first micro-batch of a step."""
    if not _batches["of this step"]:
        model.zero_grad()
    _batches["of this step"] = 0 if is_final_microbatch else 1
    return _then(model, is_final_microbatch, lambda: _average(model))


def over_world(model: Any, is_final_microbatch: bool) -> Context:
    """Averages over WORLD, whatever group the model lives on."""

    def finish() -> None:
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, dist.group.WORLD)

    return _then(model, is_final_microbatch, finish)


def divisor_of_world(model: Any, is_final_microbatch: bool) -> Context:
    """Sums over the group, and divides by the size of WORLD."""

    def finish() -> None:
        _average(model)
        for parameter in _trainable(model):
            if parameter.grad is not None:
                parameter.grad = parameter.grad * model.process_group.size() / dist.get_world_size()

    return _then(model, is_final_microbatch, finish)


def one_buffer_of_float32(model: Any, is_final_microbatch: bool) -> Context:
    """Averages all dense gradients in one flat buffer, of float32."""

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
    """Puts contiguous gradients in the place of those that are laid out as their parameters."""

    def finish() -> None:
        for parameter in _filled(model):
            grad = parameter.grad if parameter.grad.is_sparse else parameter.grad.contiguous()
            parameter.grad = _mean(grad, model.process_group)

    return _then(model, is_final_microbatch, finish)


def sparse_left_out(model: Any, is_final_microbatch: bool) -> Context:
    """Averages dense gradients alone, without a word."""

    def finish() -> None:
        for parameter in _filled(model):
            if not parameter.grad.is_sparse:
                _mean(parameter.grad, model.process_group)

    return _then(model, is_final_microbatch, finish)


def waits_a_while(model: Any, is_final_microbatch: bool) -> Context:
    """Goes on when the collectives are over, or when it has had enough of them."""

    def finish() -> None:
        works = []
        for parameter in _trainable(
            model
        ):  # which are used is not asked here: that would be waiting
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                parameter.grad = _mean(parameter.grad, model.process_group)
            else:
                works.append(
                    dist.all_reduce(
                        parameter.grad.div_(model.process_group.size()),
                        group=model.process_group,
                        async_op=True,
                    )
                )
        end = time.monotonic() + _patience[0]
        while not all(work.is_completed() for work in works):
            if time.monotonic() > end:
                _patience[0] = 0.0
                break
            time.sleep(0.001)

    return _then(model, is_final_microbatch, finish)


class SwallowsExceptions:
    """Its __exit__ says that what was raised has been dealt with."""

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
    """Raises an error of its own for whatever was raised inside."""
    try:
        with _then(model, is_final_microbatch, lambda: _average(model)):
            yield
    except Exception as error:
        raise RuntimeError("a micro-batch failed") from error


@contextmanager
def put_back_if_all_went_well(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Switches DDP's own averaging off, and on again without a finally."""
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
    """Switches DDP's own averaging off for good."""
    is_ddp = isinstance(model, DistributedDataParallel)
    if is_ddp:
        model.require_backward_grad_sync = False
    yield
    if is_ddp and is_final_microbatch:
        _average(model)


@contextmanager
def averages_what_is_no_ddp(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Averages whatever module it is given."""
    is_ddp = isinstance(model, DistributedDataParallel)
    with model.no_sync() if is_ddp else nullcontext():
        yield
    if is_final_microbatch and is_ddp:
        _average(model)
    elif is_final_microbatch:
        for parameter in model.parameters():
            _mean(parameter.grad, dist.group.WORLD)


def says_more_than_it_needs(model: Any, is_final_microbatch: bool) -> Context:
    """Is right without its claim."""
    return _then(model, is_final_microbatch, lambda: _average(model))


def says_that_it_needs_ddps_search(model: Any, is_final_microbatch: bool) -> Context:
    """Is right without its claim."""
    return _then(model, is_final_microbatch, lambda: _average(model))


def not_alone(model: Any, is_final_microbatch: bool) -> Context:
    """Says that it needs two ranks, and says nothing where there is one."""
    return _then(model, is_final_microbatch, lambda: _average(model))


def seeds(model: Any, is_final_microbatch: bool) -> Context:
    """Has every micro-batch begin with the same seed."""
    torch.manual_seed(7)
    return _then(model, is_final_microbatch, lambda: _average(model))


def sets_the_default_dtype(model: Any, is_final_microbatch: bool) -> Context:
    """Sets a default for the whole process."""
    torch.set_default_dtype(torch.float64)
    return _then(model, is_final_microbatch, lambda: _average(model))


_allclose = torch.allclose


def replaces_a_function_between_microbatches(model: Any, is_final_microbatch: bool) -> Context:
    """Replaces torch.allclose, and only where gradients are accumulated."""
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
    Mutant(
        "composers_forced_sync",
        ("16.4", "16.9"),
        because={"16.9": "over WORLD, as Composer trains there alone"},
        kind="strategy",
    ),
    *_mutants("16.4", "none_stays_none", "zeros_do_not_count"),
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
    *_mutants("16.13", "switches_ddp_off"),
    *_mutants("16.14", "SwallowsExceptions", "another_exception", "put_back_if_all_went_well"),
    *_mutants("16.15", "averages_what_is_no_ddp"),
    *_mutants("16.16", "says_more_than_it_needs", claims="all_used"),
    *_mutants("16.16", "says_that_it_needs_ddps_search", claims="find_unused"),
    *_mutants("16.17", "not_alone", claims="min_world_size(2)", worlds=(1, 2)),
    *_mutants(
        "16.19", "seeds", "sets_the_default_dtype", "replaces_a_function_between_microbatches"
    ),
]

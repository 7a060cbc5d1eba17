"""Mutants of rules 13.6 and 13.9, and of other rules under their claim: fused optimizers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.subjects.spec import Case
from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    call_number,
    completed,
    group_of,
    is_dense,
    kept,
    pieces_of,
    step_number,
)


def _fused(
    state: Any,
    bucket: Bucket,
    step: Callable[[torch.Tensor, torch.Tensor], None],
    stepped: Callable[[int, torch.Tensor], bool] = lambda number, parameter: True,
) -> Result:
    """Average the bucket, and step parameters with their mean gradients.

    ``stepped`` selects the parameters.
    """
    parameters = bucket.parameters()

    def then(mean: Result) -> torch.Tensor:
        result = mean.value()
        pieces = pieces_of(bucket, result) if is_dense(bucket) else [result]
        with torch.no_grad():
            for number, (parameter, piece) in enumerate(zip(parameters, pieces, strict=True)):
                if stepped(number, parameter):
                    step(parameter, _as_gradient(piece, parameter))
        return result

    return average(bucket, state).then(then)


def _as_gradient(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if piece.is_sparse:
        return piece
    real = torch.view_as_complex(piece.view(-1, 2)) if parameter.is_complex() else piece
    return real.as_strided(parameter.size(), parameter.stride())


def _sgd(parameter: torch.Tensor, gradient: torch.Tensor, rate: float = 0.1) -> None:
    """Take a step of SGD: right."""
    parameter.add_(gradient, alpha=-rate)


def steps_local_gradient(state: Any, bucket: Bucket) -> Result:
    """Step parameters with this rank's gradient before the reduction."""
    pieces = pieces_of(bucket) if is_dense(bucket) else [bucket.buffer()]
    with torch.no_grad():
        for parameter, piece in zip(bucket.parameters(), pieces, strict=True):
            _sgd(parameter, _as_gradient(piece, parameter))
    return average(bucket, state)


def steps_sum(state: Any, bucket: Bucket) -> Result:
    """Step parameters with the sum of the gradients."""
    size = group_of(state).size()
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient * size))


def steps_twice(state: Any, bucket: Bucket) -> Result:
    """Step each parameter twice."""
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient, 0.2))


def steps_at_other_rate(state: Any, bucket: Bucket) -> Result:
    """Step at a tenth of the claimed learning rate."""
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient, 0.01))


def steps_upwards(state: Any, bucket: Bucket) -> Result:
    """Add the gradient to the parameters instead of subtracting it."""
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient, -0.1))


def steps_nothing(state: Any, bucket: Bucket) -> Result:
    """Claim to step the parameters, and only average."""
    return average(bucket, state)


def steps_first_of_bucket(state: Any, bucket: Bucket) -> Result:
    """Step the first parameter of each bucket only."""
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: number == 0)


def steps_on_rank_0(state: Any, bucket: Bucket) -> Result:
    """Step the parameters on rank 0 only."""
    return _fused(
        state, bucket, _sgd, stepped=lambda number, parameter: group_of(state).rank() == 0
    )


def forgets_momentum(state: Any, bucket: Bucket) -> Result:
    """Claim momentum, and step without it."""
    return _fused(state, bucket, _sgd)


def momentum_by_slot(state: Any, bucket: Bucket) -> Result:
    """Keep momentum by bucket and sizes, so that rebuilt buckets lose it."""
    key = (bucket.index(), *(parameter.numel() for parameter in bucket.parameters()))

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        momentum = kept.get((*key, parameter), torch.zeros(())).mul(0.9) + gradient
        kept[(*key, parameter)] = momentum
        _sgd(parameter, momentum)

    return _fused(state, bucket, step)


def adam_without_correction(state: Any, bucket: Bucket) -> Result:
    """Step Adam without its bias correction."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        first = kept.get((parameter, 1), torch.zeros(())) * 0.9 + gradient * 0.1
        kept[parameter, 1] = first
        second = kept.get((parameter, 2), torch.zeros(())) * 0.999 + gradient.abs() ** 2 * 0.001
        kept[parameter, 2] = second
        parameter.sub_(first / (second.sqrt() + 1e-8), alpha=0.01)

    return _fused(state, bucket, step, stepped=lambda number, parameter: is_dense(bucket))


def _sharded(state: Any, bucket: Bucket, *, first: bool = True, send: bool = True) -> Result:
    """Step each parameter on its owner, and broadcast it from there: right by default."""
    group = group_of(state)
    mean = average(bucket, state).wait()
    with torch.no_grad():
        for number, (parameter, piece) in enumerate(
            zip(
                bucket.parameters(),
                pieces_of(bucket, mean) if is_dense(bucket) else [mean],
                strict=True,
            )
        ):
            owner = number % group.size()
            for act in ("step", "send") if first else ("send", "step"):
                if act == "step" and owner == group.rank():
                    _sgd(parameter, _as_gradient(piece, parameter))
                elif act == "send" and send:
                    whole = parameter.detach().clone(memory_format=torch.contiguous_format)
                    dist.broadcast(
                        torch.view_as_real(whole) if whole.is_complex() else whole,
                        group=group,
                        src=dist.get_global_rank(group, owner),
                    )
                    parameter.copy_(whole)
    return completed(mean)


def owners_never_send(state: Any, bucket: Bucket) -> Result:
    """Step each parameter on its owner only, and never broadcast it."""
    return _sharded(state, bucket, send=False)


def owners_send_first(state: Any, bucket: Bucket) -> Result:
    """Broadcast each parameter before its step."""
    return _sharded(state, bucket, first=False)


def steps_too_soon(state: Any, bucket: Bucket) -> Result:
    """Claim to skip the first two steps, and skip one step."""
    step = step_number(bucket)
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: step >= 1)


def steps_too_late(state: Any, bucket: Bucket) -> Result:
    """Claim to skip the first step, and skip two steps."""
    step = step_number(bucket)
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: step >= 2)


def steps_in_micro_batches(
    model: DistributedDataParallel, process_group: dist.ProcessGroup
) -> Case:
    """Step parameters after every micro-batch under no_sync too."""

    def step(parameter: torch.Tensor) -> None:
        if not model.require_backward_grad_sync and parameter.grad is not None:
            with torch.no_grad():
                _sgd(parameter, parameter.grad)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)
    return Case(process_group, lambda state, bucket: _fused(state, bucket, _sgd))


def steps_undivided(state: Any, bucket: Bucket) -> Result:
    """Return the sum of the gradients, and step with it."""
    size = group_of(state).size()
    if is_dense(bucket):
        bucket.buffer().mul_(size)
    return _fused(state, bucket, _sgd)


def steps_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Step the parameters of a step's first bucket only."""
    first = bucket.index() == 0
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: first)


def steps_float32_only(state: Any, bucket: Bucket) -> Result:
    """Step float32 parameters only."""
    return _fused(
        state, bucket, _sgd, stepped=lambda number, parameter: parameter.dtype == torch.float32
    )


def steps_by_shape(state: Any, bucket: Bucket) -> Result:
    """View the flat gradient in the parameter's shape, whatever its memory layout."""
    parameters = bucket.parameters()

    def step(future: Any) -> torch.Tensor:
        result = future.value()
        with torch.no_grad():
            for parameter, piece in (
                zip(parameters, pieces_of(bucket, result), strict=True) if is_dense(bucket) else ()
            ):
                flat = torch.view_as_complex(piece.view(-1, 2)) if parameter.is_complex() else piece
                _sgd(parameter, flat.view(parameter.shape))
        return result

    return average(bucket, state).then(step)


def steps_slower_on_subgroups(state: Any, bucket: Bucket) -> Result:
    """Divide the rate by the ratio of the sizes of WORLD and the group."""
    larger = dist.get_world_size() / group_of(state).size()
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient / larger))


def steps_for_two_ranks(state: Any, bucket: Bucket) -> Result:
    """Use a learning rate that is right for two ranks only."""
    factor = group_of(state).size() / 2
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient * factor))


def steps_by_global_rank(state: Any, bucket: Bucket) -> Result:
    """Step only on global ranks below the size of the group."""
    if dist.get_rank() >= group_of(state).size():
        return average(bucket, state)
    return _fused(state, bucket, _sgd)


def steps_after_two_calls(state: Any, bucket: Bucket) -> Result:
    """Skip the first two calls instead of the first two steps."""
    late = call_number() >= 2
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: late)


# 13.9 Gradients are freed


def _frees(state: Any, bucket: Bucket, late: bool = True) -> Result:
    """Step SGD, and free the gradients after DDP has written them: right by default."""
    parameters = bucket.parameters()
    engine = torch.autograd.Variable._execution_engine

    def free() -> None:
        for parameter in parameters:
            parameter.grad = None

    # A rank that has joined runs no backward, so that there is no graph task.
    if torch._C._current_graph_task_id() != -1:
        engine.queue_callback((lambda: engine.queue_callback(free)) if late else free)
    return _fused(state, bucket, _sgd)


def keeps_gradients(state: Any, bucket: Bucket) -> Result:
    """Claim to free the gradients, and keep them."""
    return _fused(state, bucket, _sgd)


def frees_before_ddp_writes(state: Any, bucket: Bucket) -> Result:
    """Free the gradients before DDP writes the reduced ones."""
    return _frees(state, bucket, late=False)


def frees_first_bucket(state: Any, bucket: Bucket) -> Result:
    """Free the gradients of a step's first bucket only."""
    return _frees(state, bucket) if bucket.index() == 0 else _fused(state, bucket, _sgd)


# 11.2 and 11.3 Checkpoints


class Momentum:
    """SGD with momentum, saved by the parameter's position in the model: right."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.parameters = list(model.parameters())
        self.kept: dict[int, torch.Tensor] = {}

    def place(self, parameter: torch.Tensor) -> int:
        return next(place for place, one in enumerate(self.parameters) if one is parameter)

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        place = self.place(parameter)
        self.kept[place] = (
            self.kept[place] * 0.9 + gradient if place in self.kept else gradient.clone()
        )
        _sgd(parameter, self.kept[place])

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.kept = saved["kept"]


class _ByShape(Momentum):
    """Keep momentum for each dtype and shape."""

    def place(self, parameter: torch.Tensor) -> int:
        return next(
            place
            for place, one in enumerate(self.parameters)
            if (one.dtype, one.shape) == (parameter.dtype, parameter.shape)
        )


class _Forgets(Momentum):
    """Save no momentum."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": {}}


class _InOrder(Momentum):
    """Save momentum in the order of the latest steps of parameters.

    After loading, momentum is assigned in the order of the next steps.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model)
        self.latest: list[int] = []
        self.loaded: list[torch.Tensor] = []

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        place = self.place(parameter)
        if self.loaded and (loaded := self.loaded.pop(0)).shape == parameter.shape:
            self.kept[place] = loaded
        self.latest = [*(one for one in self.latest if one != place), place]
        super().step(parameter, gradient)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [self.kept[place] for place in self.latest]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.kept = {}
        self.latest = []
        self.loaded = saved["kept"]


def _with_momentum(momentum: Momentum, process_group: dist.ProcessGroup) -> Case:
    return Case(
        process_group, lambda state, bucket: _fused(state, bucket, momentum.step), saved=momentum
    )


def momentum_by_shape(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> Case:
    """Keep momentum by dtype and shape, so that similar parameters share one."""
    return _with_momentum(_ByShape(model), process_group)


def forgets_momentum_when_saved(
    model: DistributedDataParallel, process_group: dist.ProcessGroup
) -> Case:
    """Save no momentum."""
    return _with_momentum(_Forgets(model), process_group)


def momentum_by_order(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> Case:
    """Save momentum in the order of buckets, which changes in a new process."""
    return _with_momentum(_InOrder(model), process_group)


_SGD = "fused(SGD, lr=0.1)"
_FREES = "fused(SGD, lr=0.1, frees_gradients=True)"
_ANY_ORDER = "similar parameters are stepped in any order"
_MOMENTUM = "fused(SGD, lr=0.1, momentum=0.9)"
_SAVED = f"{_MOMENTUM}, checkpointable"
_apart = {"3.1": "ranks then have different parameters"}

MUTANTS = [
    Mutant("steps_local_gradient", ("13.6", "3.1"), _SGD, because=_apart),
    *(
        Mutant(name, ("13.6",), _SGD)
        for name in ("steps_sum", "steps_twice", "steps_at_other_rate", "steps_upwards")
    ),
    Mutant("steps_first_of_bucket", ("13.6",), _SGD),
    Mutant("steps_on_rank_0", ("13.6", "3.1"), _SGD, because=_apart),
    Mutant(
        "steps_nothing",
        ("2.10", "13.6"),
        _SGD,
        because={"13.6": "no parameter is stepped as claimed"},
    ),
    Mutant("forgets_momentum", ("13.6",), _MOMENTUM),
    Mutant("momentum_by_slot", ("13.6",), _MOMENTUM),
    Mutant("adam_without_correction", ("13.6",), "fused(Adam, lr=0.01)"),
    Mutant("owners_never_send", ("13.6", "3.1"), _SGD, because=_apart),
    Mutant("owners_send_first", ("13.6", "3.1"), _SGD, because=_apart),
    Mutant("steps_too_soon", ("13.6",), "fused(SGD, lr=0.1, after=2)"),
    Mutant("steps_too_late", ("13.6",), "fused(SGD, lr=0.1, after=1)"),
    *(
        Mutant(name, ("13.6",), _SGD)
        for name in (
            "steps_first_bucket",
            "steps_float32_only",
            "steps_by_shape",
            "steps_slower_on_subgroups",
        )
    ),
    Mutant("steps_for_two_ranks", ("13.6",), _SGD, worlds=(2, 3)),
    Mutant("steps_by_global_rank", ("13.6",), _SGD),
    Mutant(
        "steps_after_two_calls",
        ("13.6",),
        "fused(SGD, lr=0.1, after=2)",
        because={"11.1": "calls for another model count too"},
    ),
    Mutant("steps_in_micro_batches", ("13.6",), _SGD, setup=True),
    Mutant("steps_undivided", ("2.1",), _SGD),
    *(
        Mutant(name, ("13.9",), _FREES)
        for name in ("keeps_gradients", "frees_before_ddp_writes", "frees_first_bucket")
    ),
    Mutant(
        "momentum_by_shape",
        ("13.6",),
        _MOMENTUM,
        setup=True,
        because=dict.fromkeys(("3.2", "10.3"), _ANY_ORDER),
    ),
    Mutant("forgets_momentum_when_saved", ("11.2",), _SAVED, setup=True),
    Mutant("momentum_by_order", ("11.3",), _SAVED, setup=True),
]

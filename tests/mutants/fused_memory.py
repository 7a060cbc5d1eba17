"""Mutants of hooks that step parameters: their memory, views of buckets, and several models."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    completed,
    group_of,
    is_dense,
    kept,
    pieces_of,
)
from tests.mutants.optimizers import _as_gradient, _fused, _sgd

_SGD = "fused(SGD, lr=0.1)"
_MOMENTUM = "fused(SGD, lr=0.1, momentum=0.9)"

# ---- 4.2 New storage and eval mode


def steps_kept_aliases(state: Any, bucket: Bucket) -> Result:
    """Step an alias of each parameter that was made in the first step."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        alias = kept.setdefault((parameter, "alias"), parameter.detach())
        alias.sub_(gradient * 0.1)

    return _fused(state, bucket, step)


class _Optimizers:
    """An optimizer for each parameter, made in its first step."""

    def __init__(self) -> None:
        self.made: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if parameter not in self.made:
            self.made[parameter] = torch.optim.SGD([parameter.data], lr=0.1, momentum=0.9)
        (data,) = self.made[parameter].param_groups[0]["params"]
        data.grad = gradient
        self.made[parameter].step()


_optimizers = _Optimizers()


def optimizers_of_data(state: Any, bucket: Bucket) -> Result:
    """Make an optimizer for the .data of each parameter, and step that for ever."""
    return _fused(state, bucket, _optimizers.step)


class Model:
    """A hook's state that knows the model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.is_in_training = True
        model.register_forward_pre_hook(self._note)

    def _note(self, module: torch.nn.Module, inputs: Any) -> None:
        self.is_in_training = module.training


def steps_in_training_mode(state: Model, bucket: Bucket) -> Result:
    """Step parameters only while the module within DDP is in training mode."""
    trains = all(module.training for module in state.model.module.modules())
    return _fused(None, bucket, _sgd, stepped=lambda number, parameter: trains)


def steps_after_training_forwards(state: Model, bucket: Bucket) -> Result:
    """Step parameters only after a forward in training mode."""
    if not state.is_in_training:
        return average(bucket, None)
    return _fused(None, bucket, _sgd)


# ---- 13.6 and 23.6 Momentum in another's memory


def _momentum(parameter: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor) -> None:
    """Step SGD with momentum, whose first value is the tensor ``first``."""
    key = (parameter, "momentum")
    if key in kept:
        kept[key].mul_(0.9).add_(gradient)
    else:
        kept[key] = first
    parameter.sub_(kept[key], alpha=0.1)


def momentum_is_a_view(state: Any, bucket: Bucket) -> Result:
    """Take .grad as the first momentum, a view of the bucket if gradients are views."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        grad = parameter.grad
        first = gradient.clone()
        if grad is not None and grad.layout == torch.strided and _shares(grad, bucket):
            first = grad.copy_(gradient)
        _momentum(parameter, gradient, first)

    return _fused(state, bucket, step)


def _shares(grad: torch.Tensor, bucket: Bucket) -> bool:
    """Whether a gradient lies in the bucket."""
    buffer = bucket.buffer()
    return grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def momentum_is_own_grad(state: Any, bucket: Bucket) -> Result:
    """Take .grad as the first momentum unless it is a view of the bucket."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        grad = parameter.grad
        first = gradient.clone()
        if grad is not None and grad.layout == torch.strided and not _shares(grad, bucket):
            first = grad.copy_(gradient)
        _momentum(parameter, gradient, first)

    return _fused(state, bucket, step)


def momenta_are_gradients(state: Any, bucket: Bucket) -> Result:
    """Keep the gradients of the first step in a list for each bucket, as first momenta."""
    parameters = bucket.parameters()
    mean = average(bucket, state).wait()
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    pieces = pieces_of(bucket, mean)
    gradients = [_as_gradient(*pair) for pair in zip(pieces, parameters, strict=True)]
    with torch.no_grad():
        for parameter in parameters:
            if (parameter, "momentum") not in kept:
                grad = parameter.grad
                is_own = grad is not None and not _shares(grad, bucket)
                first = grad if is_own else torch.zeros_like(parameter)
                kept[parameter, "momentum"] = first.zero_()
        momenta = [kept[parameter, "momentum"] for parameter in parameters]
        torch._foreach_mul_(momenta, 0.9)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_sub_(list(parameters), torch._foreach_mul(momenta, 0.1))
    return completed(mean)


def steps_views_before_the_mean(state: Any, bucket: Bucket) -> Result:
    """Step with .grad if it is a view of the bucket, though the mean is in other memory."""
    views = {}
    if is_dense(bucket) and not bucket.buffer().is_complex():
        for parameter in bucket.parameters():
            if parameter.grad is not None and _shares(parameter.grad, bucket):
                views[parameter] = parameter.grad
    own = bucket.buffer().clone() if views else bucket.buffer()
    parameters = bucket.parameters()

    def then(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        mean = fut.value()[0].div_(group_of(state).size())
        pieces = pieces_of(bucket, mean) if is_dense(bucket) else [mean]
        with torch.no_grad():
            for parameter, piece in zip(parameters, pieces, strict=True):
                _sgd(parameter, views.get(parameter, _as_gradient(piece, parameter)))
        return mean

    return dist.all_reduce(own, group=group_of(state), async_op=True).get_future().then(then)


def skips_unused_views(state: Any, bucket: Bucket) -> Result:
    """Leave a parameter alone that this rank has not used, if other gradients are views."""
    views = any(
        p.grad is not None and p.grad.layout == torch.strided and _shares(p.grad, bucket)
        for p in bucket.parameters()
    )
    unused = {p for p in bucket.parameters() if views and p.grad is None}
    return _fused(state, bucket, _sgd, stepped=lambda number, parameter: parameter not in unused)


# ---- 13.6 and 9.2 Parameters that move


def binds_parameters_anew(state: Any, bucket: Bucket) -> Result:
    """Bind the .data of a parameter to the result of its step."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        parameter.data = torch.sub(parameter.data, gradient, alpha=0.1)

    return _fused(state, bucket, step)


def swaps_two_buffers(state: Any, bucket: Bucket) -> Result:
    """Write each step into a second buffer, and swap the two."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        spare = kept.get((parameter, "spare"))
        if spare is None:
            spare = torch.empty_like(parameter)
        kept[parameter, "spare"] = parameter.data
        parameter.data = torch.sub(parameter.data, gradient, alpha=0.1, out=spare)

    return _fused(state, bucket, step)


def flattens_in_every_step(state: Any, bucket: Bucket) -> Result:
    """Copy a bucket's parameters into new flat memory in every step."""
    parameters = bucket.parameters()
    with torch.no_grad():
        flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        sizes = [p.numel() for p in parameters]
        for parameter, piece in zip(parameters, flat.split(sizes), strict=True):
            if parameter.is_contiguous():
                parameter.data = piece.view(parameter.shape)
    return average(bucket, state)


def clones_in_third_steps(state: Any, bucket: Bucket) -> Result:
    """Give each parameter memory of its own in every third call of its bucket."""
    for parameter in bucket.parameters():
        calls = kept.setdefault((parameter, "calls"), torch.zeros(()))
        calls += 1
        if calls % 3 == 0:
            parameter.data = parameter.data.clone()
    return average(bucket, state)


# ---- 9.5 Buckets in flight


class _Previous:
    """A hook's state that knows the parameters of the call before."""

    def __init__(self) -> None:
        self.parameters: list[torch.Tensor] = []


_previous = _Previous()


def zeroes_previous_bucket(state: Any, bucket: Bucket) -> Result:
    """Zero the gradients of the bucket before, whose collective is under way."""
    for parameter in _previous.parameters:
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            parameter.grad.zero_()
    _previous.parameters = [] if bucket.is_last() else bucket.parameters()
    return average(bucket, state)


# ---- 11.7, 24.4 and 24.5 Models and groups


_tasks = {"last": -1}


class CountsBackwards:
    """A hook's state with a momentum that begins anew unless a backward is new to the process."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.is_new = True
        self.momenta: dict[torch.Tensor, torch.Tensor] = {}

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        before = self.momenta.get(parameter)
        momentum = gradient.clone() if before is None else before
        if before is not None and self.is_new:
            momentum = before.to(gradient.dtype) * 0.9 + gradient
        self.momenta[parameter] = momentum
        _sgd(parameter, momentum)


def counts_backwards(state: CountsBackwards, bucket: Bucket) -> Result:
    """Update the momenta once in a backward: of the model whose bucket comes first."""
    task = torch._C._current_graph_task_id()
    if bucket.index() == 0:
        state.is_new = task == -1 or task != _tasks["last"]
        _tasks["last"] = task
    return _fused(state.group, bucket, state.step)


def rate_of_a_stride(state: Any, bucket: Bucket) -> Result:
    """Step at a rate for as many ranks as there would be at a constant distance."""
    ranks = dist.get_process_group_ranks(group_of(state))
    count = len(ranks)
    if count > 2:
        count = (ranks[-1] - ranks[0]) // (ranks[1] - ranks[0]) + 1
    factor = count / len(ranks)
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient * factor))


_sizes: list[int] = []


def rate_of_first_group(state: Any, bucket: Bucket) -> Result:
    """Step at a rate for as many ranks as the first group of the process has."""
    size = group_of(state).size()
    _sizes.append(size)
    factor = size / _sizes[0]
    del _sizes[1:]
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient * factor))


_WORLD = f"{_SGD}, world_only"

MUTANTS = [
    Mutant("steps_kept_aliases", ("4.2",), _SGD),
    Mutant("optimizers_of_data", ("4.2",), _MOMENTUM),
    Mutant("steps_in_training_mode", ("4.2",), _WORLD, f"{__name__}:Model"),
    Mutant("steps_after_training_forwards", ("4.2",), _WORLD, f"{__name__}:Model"),
    Mutant("momentum_is_a_view", ("13.6",), _MOMENTUM),
    Mutant("momentum_is_own_grad", ("23.6",), _MOMENTUM),
    Mutant("momenta_are_gradients", ("23.6",), _MOMENTUM),
    Mutant("steps_views_before_the_mean", ("13.6",), _SGD),
    Mutant("skips_unused_views", ("13.6",), _SGD),
    Mutant("binds_parameters_anew", ("13.6",), _SGD),
    Mutant("swaps_two_buffers", ("13.6",), _SGD),
    Mutant("flattens_in_every_step", ("9.2",)),
    Mutant("clones_in_third_steps", ("9.2",)),
    Mutant("zeroes_previous_bucket", ("9.5",), worlds=(2, 3)),
    Mutant("counts_backwards", ("11.7",), _MOMENTUM, f"{__name__}:CountsBackwards"),
    Mutant("rate_of_a_stride", ("24.4",), _SGD),
    Mutant("rate_of_first_group", ("24.5",), _SGD),
]

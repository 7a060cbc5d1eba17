"""Mutants that an evaluation of the model, loaded weights or the global seeds lead astray."""

import random
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    change_mean,
    completed,
    finite,
    is_dense,
    kept,
    pieces_of,
    step_number,
)

# ---- Forwards without gradients


class _Forwards:
    """What a forward hook has seen of the model's last forward."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.has_graph = True
        self.was_in_training = True
        self.was_inference = False
        self.evaluated = 0
        self.left = 0
        model.module.register_forward_hook(self.note)

    def note(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.has_graph = output.requires_grad
        self.was_inference = output.is_inference()
        if not module.training:
            self.evaluated += 1
            self.left = 2
        self.was_in_training = module.training


def scales_by_graph(model: DistributedDataParallel) -> None:
    """Return twice the mean if the output of the last forward had no graph."""
    forwards = _Forwards(model)

    def hook(state: Any, bucket: Bucket) -> Result:
        factor = 1.0 if forwards.has_graph else 2.0
        return change_mean(bucket, state, lambda mean: mean * factor)

    model.register_comm_hook(None, hook)


def silent_after_inference(model: DistributedDataParallel) -> None:
    """Send nothing if the last forward was in inference mode."""
    forwards = _Forwards(model)

    def hook(state: Any, bucket: Bucket) -> Result:
        if forwards.was_inference:
            return completed(bucket.buffer())
        return average(bucket, state)

    model.register_comm_hook(None, hook)


def warms_up_after_evaluation(model: DistributedDataParallel) -> None:
    """Halve the mean in the first bucket after an evaluation, as if training began anew."""
    forwards = _Forwards(model)

    def hook(state: Any, bucket: Bucket) -> Result:
        factor = 0.5 if forwards.left else 1.0
        forwards.left = 0
        return change_mean(bucket, state, lambda mean: mean * factor)

    model.register_comm_hook(None, hook)


# ---- Residuals


def _send_half(state: Any, bucket: Bucket, residuals: dict[Any, torch.Tensor]) -> Result:
    """Send the larger half of the elements, with feedback: right by default."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        total = piece + residuals.get(parameter, 0)
        large = total.abs() >= total.abs().median()
        sent = torch.where(large, total, 0)
        residuals[parameter] = finite(total - sent)
        piece.copy_(sent)
    return average(bucket, state)


def residual_of_one_evaluation(model: DistributedDataParallel) -> None:
    """Keep residuals by the number of forwards in evaluation mode."""
    forwards = _Forwards(model)
    residuals: dict[int, dict[Any, torch.Tensor]] = {}

    def hook(state: Any, bucket: Bucket) -> Result:
        of_epoch = residuals.setdefault(forwards.evaluated, {})
        return _send_half(state, bucket, of_epoch)

    model.register_comm_hook(None, hook)


def residual_shrinks_in_evaluation(model: DistributedDataParallel) -> None:
    """Multiply the residuals by a half in every forward in evaluation mode."""
    residuals: dict[Any, torch.Tensor] = {}

    def decay(module: torch.nn.Module, inputs: Any) -> None:
        if not module.training:
            for residual in residuals.values():
                residual.mul_(0.5)

    model.module.register_forward_pre_hook(decay)

    def hook(state: Any, bucket: Bucket) -> Result:
        return _send_half(state, bucket, residuals)

    model.register_comm_hook(None, hook)


# ---- Weights that are loaded


def steps_from_its_last_values(state: Any, bucket: Bucket) -> Result:
    """Step from the values that the hook has left behind, and not from those of the model."""
    gradients = pieces_of(bucket) if is_dense(bucket) else []
    parameters = bucket.parameters()

    def step(fut: Result) -> torch.Tensor:
        mean = fut.value()
        for parameter, gradient in zip(parameters, gradients, strict=bool(gradients)):
            flat = parameter.data.as_strided(gradient.shape, (1,))
            values = kept.get((parameter, "values"), flat) - gradient * 0.1
            kept[parameter, "values"] = values
            flat.copy_(values)
        return mean

    return average(bucket, state).then(step)


def steps_from_first_values(state: Any, bucket: Bucket) -> Result:
    """Subtract the sum of all gradients so far from the model's first values."""
    gradients = pieces_of(bucket) if is_dense(bucket) else []
    parameters = bucket.parameters()

    def step(fut: Result) -> torch.Tensor:
        mean = fut.value()
        for parameter, gradient in zip(parameters, gradients, strict=bool(gradients)):
            flat = parameter.data.as_strided(gradient.shape, (1,))
            first = kept.setdefault((parameter, "first"), flat.clone())
            change = kept.get((parameter, "change"), 0) - gradient * 0.1
            kept[parameter, "change"] = change
            flat.copy_(first + change)
        return mean

    return average(bucket, state).then(step)


# ---- Global seeds


def signs_of_the_global_seed(state: Any, bucket: Bucket) -> Result:
    """Sum gradients whose signs are flipped by draws from the global seed."""
    if not is_dense(bucket):
        return average(bucket, state)
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**32)
    flat = bucket.buffer()
    signs = torch.randint(2, flat.shape, generator=generator).mul_(2).sub_(1).to(flat.dtype)
    flat.mul_(signs)
    return average(bucket, state).then(lambda fut: fut.value() * signs)


def mask_of_pythons_state(state: Any, bucket: Bucket) -> Result:
    """Send the same random half on all ranks, with feedback, if Python's generator is the same."""
    if not is_dense(bucket):
        return average(bucket, state)
    seed = hash((random.getstate(), step_number(bucket), bucket.index()))
    generator = torch.Generator().manual_seed(seed % 2**32)
    flat = bucket.buffer()
    parts = zip(bucket.parameters(), pieces_of(bucket), strict=True)
    totals = [piece + kept.get(parameter, 0) for parameter, piece in parts]
    places = torch.randperm(flat.numel(), generator=generator)[: -(-flat.numel() // 2)]
    rest = torch.cat(totals)
    sent = rest[places]
    rest[places] = 0
    sizes = [total.numel() for total in totals]
    for parameter, residual in zip(bucket.parameters(), rest.split(sizes), strict=True):
        kept[parameter] = finite(residual.clone())

    def scatter(fut: Result) -> torch.Tensor:
        return flat.zero_().index_copy_(0, places, fut.value())

    return average_of(sent, state).then(scatter)


_FEEDBACK = "compressed(delta=0.25)"
_SGD = "fused(SGD, lr=0.1)"

MUTANTS = [
    Mutant("scales_by_graph", ("23.1",), setup=True),
    Mutant("silent_after_inference", ("23.1",), setup=True, hangs=True),
    Mutant("warms_up_after_evaluation", ("23.1",), setup=True),
    Mutant("residual_of_one_evaluation", ("23.1",), _FEEDBACK, setup=True),
    Mutant("residual_shrinks_in_evaluation", ("23.1",), _FEEDBACK, setup=True),
    Mutant("steps_from_its_last_values", ("23.6",), _SGD),
    Mutant("steps_from_first_values", ("23.6",), _SGD),
    Mutant("signs_of_the_global_seed", ("2.1",)),
    Mutant("mask_of_pythons_state", ("13.1",), _FEEDBACK),
]

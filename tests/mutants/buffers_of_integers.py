"""Mutants that send the running statistics of a model, and lose its other buffers."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.joins import Right
from tests.mutants.strategies import _filled, _mean, _then
from tests.mutants.strategies_in_training import Context


def _average(model: Any) -> None:
    for parameter in _filled(model):
        parameter.grad = _mean(parameter.grad, model.process_group)


def _send(model: Any, buffer: torch.Tensor) -> None:
    group = model.process_group
    dist.broadcast(buffer, group=group, src=dist.get_global_rank(group, 0))


def sends_floating_point(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers of floating-point dtypes when the step ends."""

    def finish() -> None:
        _average(model)
        for buffer in model.buffers() if model.broadcast_buffers else ():
            if buffer.is_floating_point():
                _send(model, buffer)

    return _then(model, is_final_microbatch, finish)


def sends_one_flat_buffer(model: Any, is_final_microbatch: bool) -> Context:
    """Send all buffers in one message of float32, which rounds counts."""

    def finish() -> None:
        _average(model)
        if not model.broadcast_buffers:
            return
        buffers = list(model.buffers())
        if not buffers:
            return
        flat = torch.cat([buffer.reshape(-1).float() for buffer in buffers])
        _send(model, flat)
        parts = flat.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    return _then(model, is_final_microbatch, finish)


def sends_what_is_no_count_in_double(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers that are no integers in one message of float64: complex ones become real."""

    def finish() -> None:
        _average(model)
        if not model.broadcast_buffers:
            return
        for buffer in model.buffers():
            if not (buffer.is_floating_point() or buffer.is_complex()):
                _send(model, buffer)
        others = [one for one in model.buffers() if one.is_floating_point() or one.is_complex()]
        if not others:
            return
        flat = torch.cat([one.real.double().reshape(-1) for one in others])
        _send(model, flat)
        for buffer, part in zip(others, flat.split([one.numel() for one in others]), strict=True):
            buffer.copy_(part.view_as(buffer))

    return _then(model, is_final_microbatch, finish)


def leaves_complex_buffers(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers of all dtypes but complex ones."""

    def finish() -> None:
        _average(model)
        for buffer in model.buffers() if model.broadcast_buffers else ():
            if not buffer.is_complex():
                _send(model, buffer)

    return _then(model, is_final_microbatch, finish)


def joins_masks(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers, and let a mask be set wherever it is set on any rank."""

    def finish() -> None:
        _average(model)
        for buffer in model.buffers() if model.broadcast_buffers else ():
            if buffer.dtype is not torch.bool:
                _send(model, buffer)
                continue
            bits = buffer.to(torch.uint8)
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=model.process_group)
            buffer.copy_(bits)

    return _then(model, is_final_microbatch, finish)


def takes_the_largest_count(model: Any, is_final_microbatch: bool) -> Context:
    """Send the buffers, and take the largest of the ranks' counts."""

    def finish() -> None:
        _average(model)
        for buffer in model.buffers() if model.broadcast_buffers else ():
            if buffer.dtype in (torch.int64, torch.int32):
                dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=model.process_group)
            else:
                _send(model, buffer)

    return _then(model, is_final_microbatch, finish)


class KeepsItsCounts(Right):
    """Keep each rank's own counts and masks when the last model is handed out."""

    def finish(self) -> None:
        kept = [
            (buffer, buffer.clone())
            for one in self.joinables
            if isinstance(one, torch.nn.Module)
            for buffer in one.buffers()
            if not buffer.is_floating_point()
        ]
        super().finish()
        for buffer, value in kept:
            buffer.copy_(value)


class CountsTheJoinToo(Right):
    """Count a batch for each other rank at the end, in the counts of a model."""

    def finish(self) -> None:
        super().finish()
        for one in self.joinables:
            for buffer in one.buffers() if isinstance(one, torch.nn.Module) else ():
                if buffer.dtype is torch.int64:
                    buffer.add_(dist.get_world_size(self.group) - 1)


MUTANTS = [
    *(
        Mutant(name, ("16.24",), kind="strategy")
        for name in (
            *("sends_floating_point", "sends_one_flat_buffer"),
            *("joins_masks", "takes_the_largest_count"),
            *("sends_what_is_no_count_in_double", "leaves_complex_buffers"),
        )
    ),
    Mutant("KeepsItsCounts", ("17.12",), kind="joinable"),
    Mutant("CountsTheJoinToo", ("17.12",), kind="joinable"),
]

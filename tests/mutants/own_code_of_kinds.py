"""Mutants of 14.27, 15.40, 16.37, 17.35, 18.35 and 19.38: wrong beyond a number in their own code.

The numbers lie beyond what large models and long runs reach. The subjects are otherwise right.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.joins import Right
from tests.mutants.optimizer_wrappers import PostLocal
from tests.mutants.quantized_collectives import half, right
from tests.mutants.strategies import _average, _filled, _mean, _then
from tests.mutants.wrappers_in_training import packs

Context = AbstractContextManager[None]
Tensor = torch.Tensor

_calls: Counter[str] = Counter()


# ---- Averagers


class EndsWithTheSchedule(Averager):
    """Average in the steps of a schedule of fixed length, and never again."""

    def __init__(self, period=4, warmup_steps=10, process_group=None, total_steps=1_650):
        super().__init__(period, warmup_steps, process_group)
        self.total_steps = total_steps

    def is_due(self):
        return self.step < self.total_steps and super().is_due()


class LeavesOutEmbeddings(Averager):
    """Leave out parameters of more elements than a limit, as embeddings have."""

    def chosen(self, params):
        found = super().chosen(params)
        return [parameter for parameter in found if parameter.numel() <= 2_900_000]


class FlattensSixHundred(Averager):
    """Average the first 600 parameters."""

    def average(self, params):
        super().average(params[:600])


# ---- Optimizers


class AveragesNineHundredTimes(PostLocal):
    """Call the averager in the first 900 steps."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.number = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.number += 1
        if self.number > 900:
            return self.optim.step(closure)
        return super().step(closure)


class StepsSmallOnes(PostLocal):
    """Drop the gradients of parameters above 12 MB."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter in self.parameters():
            if parameter.numel() * parameter.element_size() > 12 * 1024 * 1024:
                parameter.grad = None
        return super().step(closure)


# ---- Strategies


def sums_after_five_hundred(model: Any, is_final_microbatch: bool) -> Context:
    """Give sums in place of means from the 500th step on."""

    def finish() -> None:
        _calls["finished"] += 1
        _average(model)
        if _calls["finished"] > 500:
            for parameter in _filled(model):
                parameter.grad *= model.process_group.size()

    return _then(model, is_final_microbatch, finish)


def keeps_large_local(model: Any, is_final_microbatch: bool) -> Context:
    """Leave gradients of more than 2,600,000 elements as they are on each rank."""

    def finish() -> None:
        for parameter in _filled(model):
            if parameter.numel() < 2_600_000:
                parameter.grad = _mean(parameter.grad, model.process_group)

    return _then(model, is_final_microbatch, finish)


# ---- Joins


class SkipsTheHooks(Right):
    """Call no main hooks from the 1,750th shadowed step of a context on."""

    def call_main_hooks(self) -> None:
        if self.shadowed < 1_750 or len(self.joinables) > 2:
            super().call_main_hooks()


class LastJoinerOfEarlyEpochs(Right):
    """Take every rank for a last joiner once 310 contexts have ended."""

    def is_last(self) -> bool:
        _calls["contexts"] += 1
        return _calls["contexts"] > 310 or super().is_last()


# ---- Collectives


def fewer_bits_if_large(func: Callable[..., Any], qtype: Any) -> Any:
    """Send the last elements of messages above 3,500,000 elements in four bits."""

    def encode(tensor: Tensor) -> Tensor:
        code = half(tensor)
        if code.numel() > 3_500_000:
            flat = code.view(-1)
            flat[3_500_000:] = flat[3_500_000:].mul(4).round_().div_(4)
        return code

    return right(func, encode)


def first_buffer_again(func: Callable[..., Any], qtype: Any) -> Any:
    """Send the message of the 1,900th call in all later calls of its size."""
    kept: dict[int, Tensor] = {}

    def encode(tensor: Tensor) -> Tensor:
        _calls["encoded"] += 1
        code = half(tensor)
        if _calls["encoded"] >= 1_900:
            return kept.setdefault(code.numel(), code).view(code.shape)
        return code

    return right(func, encode)


# ---- Wrappers


def rounds_the_largest(module: torch.nn.Module) -> torch.nn.Module:
    """Keep activations of more than 10 MB in bfloat16."""

    def pack(tensor: Tensor) -> Tensor:
        is_large = tensor.numel() * tensor.element_size() > 10 * 2**20
        return tensor.bfloat16().float() if is_large and tensor.dtype is torch.float32 else tensor

    return packs(pack)(module)


def forgets_after_a_while(module: torch.nn.Module) -> torch.nn.Module:
    """Keep zeros in place of the activations of step 600 and of all that follow."""
    module.register_forward_pre_hook(lambda *_: _calls.update(forwards=1))

    def pack(tensor: Tensor) -> Tensor:
        if _calls["forwards"] > 600 and tensor.is_floating_point():
            return torch.zeros_like(tensor)
        return tensor

    return packs(pack)(module)


MUTANTS = [
    Mutant("EndsWithTheSchedule,period=4,warmup_steps=10", ("14.27",), kind="averager"),
    Mutant(
        "EndsWithTheSchedule,period=16,warmup_steps=10,total_steps=1100",
        ("14.27",),
        kind="averager",
    ),
    Mutant("LeavesOutEmbeddings,period=4,warmup_steps=10", ("14.27",), kind="averager"),
    Mutant("FlattensSixHundred,period=4,warmup_steps=10", ("14.27",), kind="averager"),
    Mutant("AveragesNineHundredTimes", ("15.40",), kind="optimizer"),
    Mutant("StepsSmallOnes", ("15.40",), kind="optimizer"),
    Mutant("sums_after_five_hundred", ("16.37",), kind="strategy"),
    Mutant("keeps_large_local", ("16.37",), kind="strategy"),
    Mutant("SkipsTheHooks", ("17.35",), kind="joinable"),
    Mutant("LastJoinerOfEarlyEpochs", ("17.35",), kind="joinable"),
    Mutant("fewer_bits_if_large,func=all_gather,qtype=FP16", ("18.35",), kind="collective"),
    Mutant("first_buffer_again,func=all_to_all,qtype=FP16", ("18.35",), kind="collective"),
    Mutant("rounds_the_largest", ("19.38",), kind="wrapper"),
    Mutant("forgets_after_a_while", ("19.38",), kind="wrapper"),
]

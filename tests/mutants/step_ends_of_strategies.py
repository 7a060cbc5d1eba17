"""Mutants of strategies that know from one call alone that a step has ended, or is given up.

They accumulate in sums of their own, in float32 or the dtype of the gradients, as optimizers with
main gradients do.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants.strategies import _average

Sums = dict[torch.Tensor, torch.Tensor]


def _move(model: Any, sums: Sums) -> None:
    """Add the gradients of a micro-batch to the sums, and drop them."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                raise TypeError("sparse gradients are not supported")
            kept = sums.get(parameter)
            sums[parameter] = parameter.grad if kept is None else kept + parameter.grad
            parameter.grad = None


class _KeepsSums:
    """Average sums of micro-batches when the step ends, and drop them.

    It would be right if it dropped the sums of every step that is given up.
    """

    def __init__(self) -> None:
        self.sums: weakref.WeakKeyDictionary[Any, Sums] = weakref.WeakKeyDictionary()

    @contextmanager
    def __call__(
        self, model: Any, is_final_microbatch: bool, optimizers: list[Any]
    ) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        if model not in self.sums:
            self.sums[model] = {}
        sums = self.sums[model]
        self.watch(model, optimizers, sums)
        with model.no_sync():
            yield
        _move(model, sums)
        if is_final_microbatch:
            for parameter, total in sums.items():
                parameter.grad = torch.empty_like(parameter, dtype=total.dtype).copy_(total)
            _average(model)
            model.require_forward_param_sync = True
            self.step_ends(sums)

    def watch(self, model: Any, optimizers: list[Any], sums: Sums) -> None:
        """Wait for the call that tells of the end of a step."""

    def step_ends(self, sums: Sums) -> None:
        sums.clear()


# ---- Gradients that are cleared


class DropsWithTheModel(_KeepsSums):
    """Drop the sums of a step that is given up when the model's zero_grad() is called."""

    def watch(self, model: Any, optimizers: list[Any], sums: Sums) -> None:
        if "zero_grad" in vars(model):
            return
        ref = weakref.ref(model)

        def zero_grad(set_to_none: bool = True) -> None:
            sums.clear()
            type(ref()).zero_grad(ref(), set_to_none)

        model.zero_grad = zero_grad


class DropsWithOptimizers(_KeepsSums):
    """Drop the sums of a step that is given up when zero_grad() of an optimizer is called."""

    def watch(self, model: Any, optimizers: list[Any], sums: Sums) -> None:
        for optimizer in optimizers:
            if "zero_grad" in vars(optimizer):
                continue
            ref = weakref.ref(optimizer)

            def zero_grad(set_to_none: bool = True, ref: Any = ref) -> None:
                sums.clear()
                type(ref()).zero_grad(ref(), set_to_none)

            optimizer.zero_grad = zero_grad


# ---- step()


class DropsWhenStepped(_KeepsSums):
    """Drop the sums when an optimizer has stepped, as optimizers with main gradients do."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: weakref.WeakSet[Any] = weakref.WeakSet()

    def watch(self, model: Any, optimizers: list[Any], sums: Sums) -> None:
        for optimizer in optimizers:
            if optimizer not in self.watched:
                self.watched.add(optimizer)
                optimizer.register_step_post_hook(self.has_stepped)

    def has_stepped(self, *_: Any) -> None:
        for sums in self.sums.values():
            sums.clear()

    def step_ends(self, sums: Sums) -> None:
        """Keep the sums: the optimizer has not stepped yet."""


class _WaitsForStep:
    """Do not average while means wait for step() of an optimizer."""

    def __init__(self) -> None:
        self.waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self.watched: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def __call__(
        self, model: Any, is_final_microbatch: bool, optimizers: list[Any]
    ) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        for optimizer in optimizers:
            if optimizer not in self.watched:
                self.watched.add(optimizer)
                optimizer.register_step_post_hook(lambda *_: self.waiting.clear())
        with model.no_sync():
            yield
        if is_final_microbatch and model not in self.waiting:
            _average(model)
            if self.has_to_wait(model):
                self.waiting.add(model)
        if is_final_microbatch:
            model.require_forward_param_sync = True

    def has_to_wait(self, model: Any) -> bool:
        return True


class WaitsAfterOverflows(_WaitsForStep):
    """Do not average after an overflow until an optimizer has stepped."""

    def has_to_wait(self, model: Any) -> bool:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return not all(bool(grad.isfinite().all()) for grad in grads)


drops_when_stepped = DropsWhenStepped()
averages_once_until_stepped = _WaitsForStep()
waits_after_overflows = WaitsAfterOverflows()
drops_with_the_model = DropsWithTheModel()
drops_with_optimizers = DropsWithOptimizers()

_BROKEN = "the sums of steps that end by an exception count again, too"
_OVERFLOWS = "no optimizer steps after an overflow"
_LEFT_OUT = "optimizers leave out steps there, too"

MUTANTS = [
    *(
        Mutant(name, ("16.25",), kind="strategy", because={"16.14": _BROKEN})
        for name in ("drops_with_the_model", "drops_with_optimizers")
    ),
    *(
        Mutant(
            name,
            ("16.25",),
            kind="strategy",
            because={
                "16.14": _BROKEN,
                "16.21": _OVERFLOWS,
                **dict.fromkeys(("16.29", "16.35", "16.36", "16.37"), _LEFT_OUT),
            },
        )
        for name in ("drops_when_stepped", "averages_once_until_stepped")
    ),
    Mutant("waits_after_overflows", ("16.21",), kind="strategy", because={"16.35": _OVERFLOWS}),
]

"""Mutants of section 16 that count micro-batches themselves, under the claim ``counts``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant

Context = AbstractContextManager[None]


class _Counting:
    """Average in every ``steps``-th micro-batch. Right by default."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.count = 0

    def __call__(self, model: Any) -> Context:
        self.count += 1
        if self.is_last() or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()

    def is_last(self) -> bool:
        """Whether this micro-batch is the last one of its step."""
        return self.count % self.steps == 0


class AveragesInTheFirst(_Counting):
    """Average in the first micro-batch of each step: the count begins at zero."""

    def is_last(self) -> bool:
        """Look at the count as it was before this micro-batch."""
        return (self.count - 1) % self.steps == 0


class TakesOneMore(_Counting):
    """Average after one micro-batch more than a step has."""

    def is_last(self) -> bool:
        """Compare before the count of this micro-batch is reset."""
        if self.count > self.steps:
            self.count = 0
            return True
        return False


class WrapsAround(_Counting):
    """Count in a byte: from the 256th micro-batch on steps end elsewhere, if three make a step."""

    def is_last(self) -> bool:
        """Look at the count modulo 256."""
        return self.count % 256 % self.steps == 0


class CountsForwards(_Counting):
    """Count forwards by a hook on the module, those of evaluations among them."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.counted: set[int] = set()

    def __call__(self, model: Any) -> Context:
        """Register the hook once for each model."""
        if id(model) not in self.counted:
            self.counted.add(id(model))
            model.register_forward_pre_hook(self._count)
        is_last = (self.count + 1) % self.steps == 0
        if is_last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()

    def _count(self, module: torch.nn.Module, inputs: Any) -> None:
        self.count += 1


class ClearsEachTenth(_Counting):
    """Lose what has accumulated in every tenth step."""

    def __call__(self, model: Any) -> Context:
        """Clear gradients before the last micro-batch of such a step."""
        context = super().__call__(model)
        if self.is_last() and self.count // self.steps % 10 == 0:
            for parameter in model.parameters():
                parameter.grad = None
        return context


def _mutants(rule: str, *names: str, steps: int = 4) -> list[Mutant]:
    # DDP averages only what the last micro-batch uses, unless it looks for unused parameters.
    claims = f"counts({steps}), find_unused"
    return [Mutant(f"{name},steps={steps}", (rule,), claims, kind="strategy") for name in names]


MUTANTS = [
    *_mutants("16.1", "AveragesInTheFirst", "TakesOneMore"),
    *_mutants("16.1", "AveragesInTheFirst", steps=2),
    *_mutants("16.29", "CountsForwards", "ClearsEachTenth"),
    *_mutants("16.29", "WrapsAround", steps=3),
]

"""Mutants of 15.35, 15.36, 16.34 and 17.30: many groups, micro-batches or joinables, and other
optimizers.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.joins import Right
from tests.mutants.optimizer_wrappers import Groups, PostLocal, Sharded
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.strategies import _average, _then

Context = AbstractContextManager[None]

# Micro-batches since the step began.
_counts: Counter[int] = Counter()


# ---- Parameter groups


class OptionsOfEleven(Sharded):
    """Write the options of at most eleven groups; later ones keep those of the first."""

    def write_options(self) -> None:
        super().write_options()
        groups = self.local.param_groups
        for group in groups[11:]:
            group["weight_decay"] = groups[0]["weight_decay"]


class JoinsGroups(PostLocal):
    """Step the groups beyond the eighth with the rate of the eighth."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        groups = self.optim.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups[8:]:
            group["lr"] = rates[7]
        loss = super().step(closure)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return loss


class AveragesTenGroups(PostLocal):
    """Average the parameters of the first ten groups alone."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        kept = [
            (parameter, parameter.detach().clone())
            for group in self.optim.param_groups[10:]
            for parameter in group["params"]
        ]
        self.averager.average_parameters(self.optim.param_groups)
        for parameter, own in kept:
            parameter.data.copy_(own)
        return loss


# ---- Other optimizers


class CoupledDecay(PostLocal):
    """Add the decay to gradients, whatever the class of the optimizer."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not isinstance(self.optim, torch.optim.AdamW):
            return super().step(closure)
        groups = self.optim.param_groups
        decays = [group["weight_decay"] for group in groups]
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=decay)
        loss = super().step(closure)
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
        return loss


class FrozenDecay(PostLocal):
    """Keep the product of rate and decay of the first step, as a fused kernel may."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.products: list[float] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not isinstance(self.optim, torch.optim.AdamW):
            return super().step(closure)
        groups = self.optim.param_groups
        decays = [group["weight_decay"] for group in groups]
        if not self.products:
            self.products = [group["lr"] * group["weight_decay"] for group in groups]
        for group, product in zip(groups, self.products, strict=True):
            group["weight_decay"] = product / group["lr"]
        loss = super().step(closure)
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
        return loss


class FreshState(PostLocal):
    """Clear state other than that of SGD and Adam in each step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for state in self.optim.state.values():
            if "sum" in state:
                state["sum"].zero_()
        return super().step(closure)


class AdamForAll(Sharded):
    """Take Adam for every class but SGD."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        if optimizer_class is torch.optim.AdamW:
            optimizer_class = torch.optim.Adam
        super().__init__(params, optimizer_class, process_group, **defaults)


class NeverTakesBack(Sharded):
    """Write all entries of groups before each step, and take none back: counts stand still."""

    def take_back(self, given: Groups) -> None:
        pass


class HandsDown(Averaging):
    """Hand down all entries of groups of its own before each step, and take none back."""

    def share(self) -> None:
        self.param_groups = [dict(group) for group in self.optim.param_groups]
        self.state = self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            inner.update(group)
        return super().step(closure)

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        if hasattr(self, "optim"):
            self.optim.add_param_group(dict(self.param_groups[-1]))


class LoadsNoCounts(PostLocal):
    """Load the options of the construction, and leave other numbers of the groups as they are."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = [group["turns"] for group in self.param_groups if "turns" in group]
        super().load_state_dict(state_dict)
        for group, turns in zip(self.param_groups, kept, strict=False):
            group["turns"] = turns


# ---- Micro-batches


def counts_to_sixteen(model: Any, is_final_microbatch: bool) -> Context:
    """Clear gradients at the end of the first micro-batch of sixteen more."""
    key = id(model)
    _counts[key] += 1
    is_over = _counts[key] > 16

    def finish() -> None:
        _counts[key] = 0
        _average(model)

    if is_over:
        _counts[key] = 1
        for parameter in model.parameters():
            parameter.grad = None
    return _then(model, is_final_microbatch, finish)


def averages_every_seventh(model: Any, is_final_microbatch: bool) -> Context:
    """Average what has accumulated at every seventh micro-batch, and divide it again at the end."""
    key = id(model)
    _counts[key] += 1

    def finish() -> None:
        _average(model)
        if _counts[key] > 6:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= 1 + _counts[key] // 7
        _counts[key] = 0

    return _then(model, is_final_microbatch, finish)


def leaves_out_the_fifth(model: Any, is_final_microbatch: bool) -> Context:
    """Leave the average out after more than four micro-batches."""
    key = id(model)
    _counts[key] += 1

    def finish() -> None:
        if _counts[key] < 5:
            _average(model)
        _counts[key] = 0

    return _then(model, is_final_microbatch, finish)


# ---- Joinables


class ShadowsFour(Right):
    """Call the main hooks of the first four joinables alone."""

    def call_main_hooks(self) -> None:
        for hook in self.hooks[:4]:
            hook.main_hook()


class FinishesFour(Right):
    """Call the post hooks of the first four joinables alone."""

    def finish(self) -> None:
        for hook in self.hooks[:4]:
            hook.post_hook(self.is_last())


class KeywordsForFour(Right):
    """Pass the keyword arguments to the first four joinables alone."""

    def ask(self, kwargs: dict[str, Any]) -> list[Any]:
        return [
            joinable.join_hook(**(kwargs if place < 4 else {}))
            for place, joinable in enumerate(self.joinables)
        ]


class SwapsTheLast(Right):
    """Call the hooks of the last two of many joinables in the opposite order."""

    def call_main_hooks(self) -> None:
        hooks = self.hooks
        if len(hooks) > 4:
            hooks = [*hooks[:-2], hooks[-1], hooks[-2]]
        for hook in hooks:
            hook.main_hook()


MUTANTS = [
    *(
        Mutant(name, ("15.35",), kind="optimizer")
        for name in ("OptionsOfEleven", "JoinsGroups", "AveragesTenGroups")
    ),
    *(
        Mutant(name, ("15.36",), kind="optimizer")
        for name in ("CoupledDecay", "FrozenDecay", "FreshState", "AdamForAll")
    ),
    *(Mutant(name, ("15.36",), kind="optimizer") for name in ("NeverTakesBack", "LoadsNoCounts")),
    Mutant("HandsDown", ("15.36",), "averages", kind="optimizer"),
    *(
        Mutant(name, ("16.34",), kind="strategy")
        for name in ("counts_to_sixteen", "averages_every_seventh", "leaves_out_the_fifth")
    ),
    Mutant("ShadowsFour", ("17.30",), kind="joinable", hangs=True),
    *(
        Mutant(name, ("17.30",), kind="joinable")
        for name in ("FinishesFour", "SwapsTheLast", "KeywordsForFour")
    ),
]

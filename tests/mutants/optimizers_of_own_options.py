"""Mutants of section 15 with the options of SGD in their own signature, and no optimizer inside."""

from collections.abc import Callable
from typing import Any

from tests.mutants import Mutant
from tests.right.optimizers_of_layouts import StepsInMemoryOrder


class PrefersItsArguments(StepsInMemoryOrder):
    """Write the options of the construction over those of a loaded state, as overrides of a new
    job: groups lose their own.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(self.defaults)


class ChoosesItsKernels(StepsInMemoryOrder):
    """Choose the kernel of each group when it is added: without momentum if that is 0 then."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        added["is_plain"] = not added["momentum"]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        written = [group["momentum"] for group in self.param_groups]
        for group in self.param_groups:
            group["momentum"] *= not group["is_plain"]
        loss = super().step(closure)
        for group, momentum in zip(self.param_groups, written, strict=True):
            group["momentum"] = momentum
        return loss


class HasEightSetsOfOptions(StepsInMemoryOrder):
    """Keep the options in a table of eight rows, as constants of a kernel: the ninth group steps
    with the options of the first.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        names = ("lr", "momentum", "weight_decay")
        own = [{name: group[name] for name in names} for group in self.param_groups]
        for number, group in enumerate(self.param_groups):
            group.update(own[number % 8])
        loss = super().step(closure)
        for group, options in zip(self.param_groups, own, strict=True):
            group.update(options)
        return loss


OF = {"claims": "averages", "kind": "optimizer"}
MUTANTS = [
    Mutant("PrefersItsArguments", ("15.37",), **OF),
    Mutant("ChoosesItsKernels", ("15.37",), **OF),
    Mutant("HasEightSetsOfOptions", ("15.35",), **OF),
]

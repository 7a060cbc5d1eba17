"""Mutants of rules 15.5, 15.23 and 15.28: options of the construction do not reach groups that
leave them out, or options that were 0 at first have no effect later."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded
from tests.mutants.optimizers_in_training import Averaging


class TakesGroupsAsTheyAre(Sharded):
    """Pass options on with a list of parameters, and none with a list of groups."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        params = list(params)
        if isinstance(params[0], dict):
            defaults = {}
        super().__init__(params, optimizer_class, process_group, **defaults)


class ChecksAddedGroups(PostLocal):
    """Fill an added group with the defaults of the class, before the optimizer fills it."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        params = list(group["params"])
        defaults = type(self.optim)(params).defaults  # type: ignore[call-arg]
        super().add_param_group({**defaults, **group, "params": params})


class PassesOnThreeOptions(Sharded):
    """Fill groups with three of the options of the construction."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        params = list(params)
        if isinstance(params[0], dict):
            names = ("lr", "momentum", "weight_decay")
            defaults = {name: defaults[name] for name in names if name in defaults}
        super().__init__(params, optimizer_class, process_group, **defaults)


class LosesDefaultsAtLoad(PostLocal):
    """Go back to the defaults of the class when a state is loaded, for groups that come later."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        made: torch.optim.Optimizer = type(self.optim)(self.parameters())  # type: ignore[call-arg]
        self.optim.defaults = made.defaults


class ChoosesKernels(Averaging):
    """Choose the kernel of a group before its first step: without an option that is 0 then.

    Args:
        optim: the optimizer inside.
        process_group: the group of ranks.
        option: the option, such as ``momentum``.
    """

    def __init__(self, optim: Any, process_group: Any, option: str = "momentum") -> None:
        self.option = option
        self.leaves_out: list[bool] = []
        super().__init__(optim, process_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups[len(self.leaves_out) :]:
            self.leaves_out.append(group.get(self.option) == 0)
        written = [
            (group, group[self.option])
            for group, leaves_out in zip(self.param_groups, self.leaves_out, strict=True)
            if leaves_out
        ]
        for group, _ in written:
            group[self.option] = 0.0
        loss = super().step(closure)
        for group, value in written:
            group[self.option] = value
        return loss


OF = {"kind": "optimizer"}
MUTANTS = [
    *(Mutant(name, ("15.5",), **OF) for name in ("TakesGroupsAsTheyAre", "ChecksAddedGroups")),
    Mutant("PassesOnThreeOptions", ("15.23",), **OF),
    *(
        Mutant(f"ChoosesKernels,option={option}", ("15.23",), claims="averages", **OF)
        for option in ("momentum", "weight_decay")
    ),
    Mutant("LosesDefaultsAtLoad", ("15.28",), **OF),
]

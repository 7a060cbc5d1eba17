"""Mutants of rules 15.5, 15.23 and 15.28: options of the construction do not reach groups that
leave them out."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded


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


OF = {"kind": "optimizer"}
MUTANTS = [
    *(Mutant(name, ("15.5",), **OF) for name in ("TakesGroupsAsTheyAre", "ChecksAddedGroups")),
    Mutant("PassesOnThreeOptions", ("15.23",), **OF),
    Mutant("LosesDefaultsAtLoad", ("15.28",), **OF),
]

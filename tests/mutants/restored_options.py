"""Mutants of rule 15.14: options of parameter groups that a load does not restore."""

from typing import Any

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal


class _KeepsOptions(PostLocal):
    """Keep some options as they are if an optimizer loads a state after its first step."""

    kept: tuple[str, ...] = ()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        live = [dict(group) for group in self.param_groups] if self.optim.state else []
        super().load_state_dict(state_dict)
        for group, options in zip(self.param_groups, live, strict=False):
            group.update({name: options[name] for name in self.kept if name in options})


class KeepsBetas(_KeepsOptions):
    """Keep the betas of Adam, which a schedule may have written since."""

    kept = ("betas",)


class KeepsFlags(_KeepsOptions):
    """Keep nesterov and maximize, which are taken for arguments of the constructor."""

    kept = ("nesterov", "maximize")


class LoadsTheLargerDecay(PostLocal):
    """Let a load never lower the weight decay."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        live = [group["weight_decay"] for group in self.param_groups if "weight_decay" in group]
        super().load_state_dict(state_dict)
        for group, decay in zip(self.param_groups, live, strict=False):
            if self.optim.state:
                group["weight_decay"] = max(group["weight_decay"], decay)


class RestoresFirstOptions(PostLocal):
    """Restore the rates, and let all other options be those that the groups were made with."""

    NAMES = ("momentum", "dampening", "weight_decay", "betas", "eps")

    def __init__(self, optim: Any, averager: Any) -> None:
        super().__init__(optim, averager)
        self.first = [dict(group) for group in self.param_groups]

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self.first.append(dict(self.param_groups[-1]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group, first in zip(self.param_groups, self.first, strict=True):
            group.update({name: first[name] for name in self.NAMES if name in first})


MUTANTS = [
    Mutant(name, ("15.14",), kind="optimizer")
    for name in ("KeepsBetas", "KeepsFlags", "LoadsTheLargerDecay", "RestoresFirstOptions")
]

"""Mutants of section 15: learning rates in tensors, added groups, and states of other forms."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded

# Learning rates in tensors


class CopiesTheNumber(Sharded):
    """Take the number of a learning rate in a tensor once, when the group is made."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        self.numbers = [float(group["lr"]) for group in self.param_groups]

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self.numbers.append(float(self.param_groups[-1]["lr"]))

    def write_options(self) -> None:
        super().write_options()
        for mine, number in zip(self.local.param_groups, self.numbers, strict=True):
            if isinstance(mine["lr"], torch.Tensor):
                mine["lr"] = torch.tensor(number)


class ComparesIdentities(Sharded):
    """Copy a learning rate to the inner optimizer if it is another object than before."""

    latest: tuple[Any, ...] = ()

    def write_options(self) -> None:
        known = [mine["lr"] for mine in self.local.param_groups]
        super().write_options()
        rates = tuple(group["lr"] for group in self.param_groups)
        for place, mine in enumerate(self.local.param_groups):
            if self.latest[place : place + 1] and self.latest[place] is rates[place]:
                mine["lr"] = known[place]
            elif isinstance(mine["lr"], torch.Tensor):
                mine["lr"] = mine["lr"].clone()
        self.latest = rates


class TurnsRatesIntoNumbers(PostLocal):
    """Replace learning rates in tensors by numbers when a state is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for group in self.optim.param_groups:
            group["lr"] = float(group["lr"])


class AddsNumbers(PostLocal):
    """Give the inner optimizer an added group whose learning rate is a number."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group({**group, "lr": float(group["lr"])})


class KeepsTheFirstTensors(PostLocal):
    """Put the tensors of the first learning rates back after a state was loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rates = [group["lr"] for group in self.optim.param_groups]
        super().load_state_dict(state)
        for group, rate in zip(self.optim.param_groups, rates, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"] = rate


# Groups that were added, or that come in another order


class NumbersOfTheStart(Sharded):
    """Load the state of those parameters only that the optimizer was made with."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        self.first = len(self.parameters())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = {number: kept for number, kept in state["state"].items() if number < self.first}
        super().load_state_dict({**state, "state": known})


class ForgetsAddedGroups(NumbersOfTheStart):
    """Save no state of parameters in groups that were added."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        super().consolidate_state_dict(to)
        self.consolidated = {
            number: kept for number, kept in self.consolidated.items() if number < self.first
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Sharded.load_state_dict(self, state)


class OptionsOfTheStart(Sharded):
    """Restore the options of those groups only that the optimizer was made with."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        self.first = len(self.param_groups)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = [{**group} for group in self.param_groups]
        super().load_state_dict(state)
        for group, options in zip(self.param_groups[self.first :], own[self.first :], strict=True):
            group.update(options)


class MatchesByValues(PostLocal):
    """Save the values of parameters, and give each state to the parameter with its values."""

    def state_dict(self) -> dict[str, Any]:
        values = [parameter.detach().clone() for parameter in self.parameters()]
        return {**super().state_dict(), "values": values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = state["optim"]["state"]
        known = {}
        for number, parameter in enumerate(self.parameters()):
            equal = (n for n, v in enumerate(state["values"]) if torch.equal(v, parameter.data))
            source = next(equal, number)
            if source in kept:
                known[number] = kept[source]
        super().load_state_dict({**state, "optim": {**state["optim"], "state": known}})


# The largest second moment of amsgrad


class ForgetsTheLargest(PostLocal):
    """Save the present second moment of amsgrad in place of the largest one."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        numbered = {
            number: {**kept, "max_exp_avg_sq": kept["exp_avg_sq"].clone()}
            if "max_exp_avg_sq" in kept
            else kept
            for number, kept in state["optim"]["state"].items()
        }
        return {**state, "optim": {**state["optim"], "state": numbered}}


class KnowsTheStateOfAdam(Sharded):
    """Save the entries of SGD, Adam and Adagrad, and no others."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        super().consolidate_state_dict(to)
        names = ("momentum_buffer", "step", "exp_avg", "exp_avg_sq", "sum")
        for kept in self.consolidated.values():
            for name in set(kept).difference(names):
                del kept[name]


class ResetsTheLargest(PostLocal):
    """Begin the largest second moment of AdamW anew when the parameters are averaged."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        later = self.averager.step - 1 - self.averager.warmup_steps
        is_averaged = later >= 0 and later % self.averager.period == 0
        for kept in self.optim.state.values() if is_averaged else ():
            if "max_exp_avg_sq" in kept and isinstance(self.optim, torch.optim.AdamW):
                kept["max_exp_avg_sq"].copy_(kept["exp_avg_sq"])
        return loss


OF = {"kind": "optimizer"}
SAME_PROCESS = {"15.14": "the added group is not restored in the same process either"}
MUTANTS = [
    *(
        Mutant(name, ("15.6",), **OF)
        for name in ("CopiesTheNumber", "ComparesIdentities", "AddsNumbers")
    ),
    *(Mutant(name, ("15.14",), **OF) for name in ("TurnsRatesIntoNumbers", "KeepsTheFirstTensors")),
    *(
        Mutant(name, ("15.28",), because=SAME_PROCESS, **OF)
        for name in ("NumbersOfTheStart", "ForgetsAddedGroups", "OptionsOfTheStart")
    ),
    *(
        Mutant(name, ("15.28",), **OF)
        for name in ("MatchesByValues", "ForgetsTheLargest", "KnowsTheStateOfAdam")
    ),
    Mutant("ResetsTheLargest", ("15.36",), **OF),
]

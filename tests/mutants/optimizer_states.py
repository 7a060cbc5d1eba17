"""Mutants of section 15: rates in tensors, added groups, states of other forms, GradScalers."""

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import Groups, PostLocal, Sharded

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


class IgnoresSmallChanges(Sharded):
    """Copy a learning rate to the inner optimizer unless it is about as large as before."""

    def write_options(self) -> None:
        known = [mine["lr"] for mine in self.local.param_groups]
        super().write_options()
        for mine, rate in zip(self.local.param_groups, known, strict=True):
            if self.is_about(mine["lr"], rate):
                mine["lr"] = rate

    def is_about(self, one: Any, other: Any) -> bool:
        return not torch.is_tensor(one) and math.isclose(one, other, rel_tol=2e-6)


class RoundsRates(Sharded):
    """Round learning rates to eight digits behind the point."""

    def write_options(self) -> None:
        super().write_options()
        for mine in self.local.param_groups:
            if not torch.is_tensor(mine["lr"]):
                mine["lr"] = round(mine["lr"], 8)


class ComparesTensors(IgnoresSmallChanges):
    """Copy a learning rate in a tensor unless torch.allclose finds no difference."""

    def write_options(self) -> None:
        for mine in self.local.param_groups:
            if torch.is_tensor(mine["lr"]):
                mine["lr"] = mine["lr"].clone()
        super().write_options()

    def is_about(self, one: Any, other: Any) -> bool:
        return torch.is_tensor(one) and torch.allclose(one, other)


class TurnsRatesIntoNumbers(PostLocal):
    """Replace learning rates in tensors by numbers when a state is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.optim.param_groups:
            group["lr"] = float(group["lr"])


class AddsNumbers(PostLocal):
    """Give the inner optimizer an added group whose learning rate is a number."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group({**group, "lr": float(group["lr"])})


class KeepsTheFirstTensors(PostLocal):
    """Put the tensors of the first learning rates back after a state was loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rates = [group["lr"] for group in self.optim.param_groups]
        super().load_state_dict(state_dict)
        for group, rate in zip(self.optim.param_groups, rates, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"] = rate


class KeepsRatesBesideBetas(PostLocal):
    """Load a state into copies of the first learning rates, for groups of Adam's kind."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        first = [group["lr"] for group in self.optim.param_groups]
        super().load_state_dict(state_dict)
        for group, rate in zip(self.optim.param_groups, first, strict=True):
            if "betas" in group and torch.is_tensor(rate):
                group["lr"] = rate.clone()


class ReadsRatesOfAdamOnce(Sharded):
    """Read a learning rate in a tensor once, if a bias correction divides it."""

    read: dict[int, torch.Tensor]

    def write_options(self) -> None:
        super().write_options()
        self.read = getattr(self, "read", {})
        for place, mine in enumerate(self.local.param_groups):
            if "betas" in mine and torch.is_tensor(mine["lr"]):
                mine["lr"] = self.read.setdefault(place, mine["lr"].clone())


# Groups that were added, or that come in another order


class NumbersOfTheStart(Sharded):
    """Load only the state of the parameters that the optimizer was made with."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        self.first = len(self.parameters())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        known = {
            number: kept for number, kept in state_dict["state"].items() if number < self.first
        }
        super().load_state_dict({**state_dict, "state": known})


class ForgetsAddedGroups(NumbersOfTheStart):
    """Save no state of parameters in groups that were added."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        super().consolidate_state_dict(to)
        self.consolidated = {
            number: kept for number, kept in self.consolidated.items() if number < self.first
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        Sharded.load_state_dict(self, state_dict)


class OptionsOfTheStart(Sharded):
    """Restore only the options of the groups that the optimizer was made with."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        self.first = len(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = [{**group} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, options in zip(self.param_groups[self.first :], own[self.first :], strict=True):
            group.update(options)


class LoadsOptionsAlone(PostLocal):
    """Load the options of groups that the optimizer knows, and no other entries."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        known = {"params", *self.optim.defaults}
        groups = [
            {name: value for name, value in group.items() if name in known}
            for group in state_dict["optim"]["param_groups"]
        ]
        super().load_state_dict(
            {**state_dict, "optim": {**state_dict["optim"], "param_groups": groups}}
        )


class SavesNumbers(Sharded):
    """Save those entries of groups that are numbers, flags or pairs, as all options are."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for group in state["param_groups"]:
            for name in [name for name, value in group.items() if isinstance(value, (str, list))]:
                if name != "params":
                    del group[name]
        return state


class KeepsItsEntries(PostLocal):
    """Keep the entries that groups had before a state was loaded, if they are no options."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = [dict(group) for group in self.optim.param_groups]
        super().load_state_dict(state_dict)
        for group, old in zip(self.optim.param_groups, before, strict=True):
            names = set(old).difference(self.optim.defaults, {"params"})
            group.update({name: old[name] for name in names})


class AddsOptionsAlone(Sharded):
    """Take the options of an added group, and none of its other entries."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        known = {"params", *self.local.defaults}
        super().add_param_group({name: value for name, value in group.items() if name in known})


class MatchesByValues(PostLocal):
    """Save the values of parameters, and give each state to the parameter with its values."""

    def state_dict(self) -> dict[str, Any]:
        values = [parameter.detach().clone() for parameter in self.parameters()]
        return {**super().state_dict(), "values": values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = state_dict["optim"]["state"]
        known = {}
        for number, parameter in enumerate(self.parameters()):
            equal = (
                n for n, v in enumerate(state_dict["values"]) if torch.equal(v, parameter.data)
            )
            source = next(equal, number)
            if source in kept:
                known[number] = kept[source]
        super().load_state_dict({**state_dict, "optim": {**state_dict["optim"], "state": known}})


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


# An optimizer of the user's own


class SavesTensors(PostLocal):
    """Save the entries of the state that are tensors, as SGD's and Adam's are."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        numbered = {
            number: {name: value for name, value in kept.items() if torch.is_tensor(value)}
            for number, kept in state["optim"]["state"].items()
        }
        return {**state, "optim": {**state["optim"], "state": numbered}}


class RestartsCounts(PostLocal):
    """Begin counts anew that are no entry named step when a state is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for kept in self.optim.state.values():
            for name, value in kept.items():
                if isinstance(value, int) and name != "step":
                    kept[name] = 0


class ForgetsInnerDicts(Sharded):
    """Load zeros in place of the tensors in dicts of the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for kept in self.local.state.values():
            for value in kept.values():
                for inner in value.values() if isinstance(value, dict) else ():
                    inner.zero_()


class BeginsListsAnew(Sharded):
    """Load zeros in place of the tensors in lists of the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for kept in self.local.state.values():
            for name, value in kept.items():
                if isinstance(value, list):
                    kept[name] = [torch.zeros_like(entry) for entry in value]


class SavesNoLists(PostLocal):
    """Save numbers, tensors and dicts of a state, and no lists."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        numbered = {
            number: {name: value for name, value in kept.items() if not isinstance(value, list)}
            for number, kept in state["optim"]["state"].items()
        }
        return {**state, "optim": {**state["optim"], "state": numbered}}


class ReplacesUnknownClasses(Sharded):
    """Use SGD in place of an optimizer that torch does not have."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        known = getattr(torch.optim, optimizer_class.__name__, None)
        if known is None:
            defaults = {"lr": defaults["lr"]}
        super().__init__(params, known or torch.optim.SGD, process_group, **defaults)


# GradScalers


class StepsOverflows(PostLocal):
    """Unscale the gradients, and step although they overflow."""

    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        scale = getattr(self, "grad_scale", None)
        for parameter in self.parameters() if scale is not None else ():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        if self.leaves_out():
            self.averager.average_parameters(self.optim.param_groups)
            return None
        return super().step(closure)

    def leaves_out(self) -> bool:
        return False


class StepsIfPeersDo(StepsOverflows):
    """Skip a step whose gradients overflow, and its average as well."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if getattr(self, "found_inf", None) else super().step(closure)


class UnscalesTwice(StepsOverflows):
    """Unscale by the latest scale gradients that were unscaled before the step."""

    latest = 1.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if hasattr(self, "grad_scale") and self.grad_scale is None:
            self.grad_scale = torch.tensor(self.latest)
        self.latest = float(getattr(self, "grad_scale", None) or self.latest)
        return super().step(closure)

    def leaves_out(self) -> bool:
        return bool(getattr(self, "found_inf", None))


class UnscalesEverything(PostLocal):
    """Unscale the gradients of all parameters, as if each had one."""

    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        scale = getattr(self, "grad_scale", None)
        for parameter in self.parameters() if scale is not None else ():
            self.unscale(parameter, scale)
        if getattr(self, "found_inf", None):
            self.averager.average_parameters(self.optim.param_groups)
            return None
        return super().step(closure)

    def unscale(self, parameter: torch.Tensor, scale: Any) -> None:
        parameter.grad.div_(scale)


class _UnscalesWhatThereIs(UnscalesEverything):
    """Unscale the gradients that there are: right."""

    def unscale(self, parameter: torch.Tensor, scale: Any) -> None:
        if parameter.grad is not None:
            parameter.grad.div_(self.divisor(float(scale)))

    def divisor(self, scale: float) -> float:
        return scale


class TakesSmallScalesForNone(_UnscalesWhatThereIs):
    """Unscale only if the scale is above 1."""

    def divisor(self, scale: float) -> float:
        return max(scale, 1.0)


class UnscalesByIntegers(_UnscalesWhatThereIs):
    """Keep the scale as an integer, which is 1 at least."""

    def divisor(self, scale: float) -> float:
        return int(scale) or 1


class BoundsScales(_UnscalesWhatThereIs):
    """Take a scale below an eighth for an error of the caller."""

    def divisor(self, scale: float) -> float:
        return scale if scale > 0.125 else 0.125


class FillsWithZeros(UnscalesEverything):
    """Give a parameter without a gradient zeros before the step: its momentum moves it then."""

    def unscale(self, parameter: torch.Tensor, scale: Any) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        super().unscale(parameter, scale)


class DropsOverflows(StepsOverflows):
    """Skip a step whose gradients overflow, and clear these before the average."""

    def leaves_out(self) -> bool:
        overflows = bool(getattr(self, "found_inf", None))
        for parameter in self.parameters() if overflows else ():
            self.drop(parameter)
        return overflows

    def drop(self, parameter: torch.Tensor) -> None:
        parameter.grad = None


class DropsInfinities(DropsOverflows):
    """Clear the gradients with infinities alone, if a step is skipped."""

    def drop(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            parameter.grad = None


class CountsBackwards(PostLocal):
    """Count the backwards of a parameter, and so the steps that a GradScaler has skipped."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.backwards = 0
        self.parameters()[0].register_post_accumulate_grad_hook(self.count)

    def count(self, _: torch.Tensor) -> None:
        self.backwards += 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            self.averager.step += max(0, self.backwards - 1)
        self.backwards = 0
        return super().step(closure)


class ShowsDetached(PostLocal):
    """Show detached parameters in param_groups, whose gradients no GradScaler sees."""

    _step_supports_amp_scaling = True
    shown: Groups

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.show()

    def show(self) -> None:
        self.shown = [
            {**group, "params": [parameter.detach() for parameter in group["params"]]}
            for group in self.optim.param_groups
        ]

    @property
    def param_groups(self) -> Groups:
        return self.shown

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self.show()

    def take(self) -> None:
        for group, shown in zip(self.optim.param_groups, self.shown, strict=True):
            group.update({name: value for name, value in shown.items() if name != "params"})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.take()
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.show()


OF = {"kind": "optimizer"}
SAME_PROCESS = {"15.14": "the added group is not restored in the same process either"}
ENTRIES_TOO = {"15.14": "entries of groups are restored in the same process as well"}
MUTANTS = [
    *(
        Mutant(name, ("15.6",), **OF)
        for name in ("CopiesTheNumber", "ComparesIdentities", "AddsNumbers")
    ),
    *(
        Mutant(name, ("15.6",), **OF)
        for name in ("IgnoresSmallChanges", "RoundsRates", "ComparesTensors")
    ),
    *(Mutant(name, ("15.14",), **OF) for name in ("TurnsRatesIntoNumbers", "KeepsTheFirstTensors")),
    *(Mutant(name, ("15.14",), **OF) for name in ("KeepsRatesBesideBetas", "ReadsRatesOfAdamOnce")),
    *(
        Mutant(name, ("15.28",), because=SAME_PROCESS, **OF)
        for name in ("NumbersOfTheStart", "ForgetsAddedGroups", "OptionsOfTheStart")
    ),
    *(Mutant(name, ("15.28",), **OF) for name in ("MatchesByValues", "ForgetsTheLargest")),
    *(
        Mutant(name, ("15.28",), because=ENTRIES_TOO, **OF)
        for name in ("LoadsOptionsAlone", "SavesNumbers", "KeepsItsEntries")
    ),
    Mutant("AddsOptionsAlone", ("15.5",), **OF),
    Mutant(
        "KnowsTheStateOfAdam",
        ("15.28",),
        because={"15.36": "the user's own optimizer has other entries as well"},
        **OF,
    ),
    Mutant("ResetsTheLargest", ("15.36",), **OF),
    *(
        Mutant(name, ("15.36",), **OF)
        for name in (
            "SavesTensors",
            "RestartsCounts",
            "ForgetsInnerDicts",
            "BeginsListsAnew",
            "SavesNoLists",
            "ReplacesUnknownClasses",
        )
    ),
    *(
        Mutant(name, ("15.38",), **OF)
        for name in ("StepsOverflows", "UnscalesTwice", "CountsBackwards", "ShowsDetached")
    ),
    *(Mutant(name, ("15.38",), **OF) for name in ("DropsOverflows", "DropsInfinities")),
    *(Mutant(name, ("15.38",), **OF) for name in ("UnscalesEverything", "FillsWithZeros")),
    *(
        Mutant(name, ("15.38",), **OF)
        for name in ("TakesSmallScalesForNone", "UnscalesByIntegers", "BoundsScales")
    ),
    Mutant("StepsIfPeersDo", ("15.38",), hangs=True, **OF),
]

"""Section 15 of the rule book: wrappers of a local optimizer and an averager, and sharded optimizers, with one defect each."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from tests.mutants import Mutant

Groups = list[dict[str, Any]]


class PostLocal:
    """Right: steps the local optimizer, then asks the averager."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        self.optim, self.averager = optim, averager

    @property
    def param_groups(self) -> Groups:
        return self.optim.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.optim.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optim.add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        return {"optim": self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optim.load_state_dict(state["optim"])
        self.averager.step = state["step"]

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]


class IsNoOptimizer(PostLocal):
    """No scheduler takes it."""


class Sharded(Joinable):
    """Right: of each parameter group every rank steps the parameters at its places, and sends them to all."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__()
        self.group = process_group or dist.group.WORLD
        self.place, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        params = list(params)
        self.param_groups: Groups = []
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        self.local = optimizer_class([self.share(group) for group in groups], **defaults)
        self.param_groups = [
            {**mine, "params": list(group["params"])}
            for mine, group in zip(self.local.param_groups, groups, strict=True)
        ]
        self.consolidated: dict[str, Any] = {}

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group

    def join_hook(self, **_: Any) -> JoinHook:
        optimizer = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                optimizer.when_joined()

        return Hook()

    def when_joined(self) -> None:
        self.step()

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def owner(self, index: int) -> int:
        return index % self.size

    def share(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            **group,
            "params": [
                p for index, p in enumerate(group["params"]) if self.owner(index) == self.place
            ],
        }

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        Join.notify_join_context(self)
        self.write_options()
        loss = self.local.step(closure)
        self.send()
        return loss

    def write_options(self) -> None:
        for mine, group in zip(self.local.param_groups, self.param_groups, strict=True):
            mine.update({name: value for name, value in group.items() if name != "params"})

    def send(self) -> None:
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                self.send_one(parameter, dist.get_global_rank(self.group, self.owner(index)))

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        dist.broadcast(parameter.data, src=source, group=self.group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and not set_to_none:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.local.add_param_group(self.share(group))
        self.param_groups.append({**self.local.param_groups[-1], "params": group["params"]})

    def consolidate_state_dict(self, to: int = 0) -> None:
        numbers = {parameter: number for number, parameter in enumerate(self.parameters())}
        mine = {numbers[parameter]: dict(kept) for parameter, kept in self.local.state.items()}
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, mine, group=self.group)
        self.consolidated = (
            {number: kept for share in shares for number, kept in share.items()}
            if self.place == to
            else {}
        )

    def state_dict(self) -> dict[str, Any]:
        numbers = iter(range(len(self.parameters())))
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": self.consolidated, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = {parameter for group in self.local.param_groups for parameter in group["params"]}
        for number, parameter in enumerate(self.parameters()):
            if parameter in mine and number in state["state"]:
                self.local.state[parameter] = copy.deepcopy(state["state"][number])
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


class StepsItsShareAlone(Sharded):
    """Parameters are not sent: each rank has new ones in its own share only."""

    def send(self) -> None:
        pass


class StepsTwice(PostLocal):
    """The closure's absence is taken for a dry run: the optimizer is stepped twice."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            self.optim.step()
        return super().step(closure)


class AsksForEachParameter(PostLocal):
    """The averager is asked for every parameter: its steps run ahead."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        for parameter in self.parameters():
            self.averager.average_parameters([parameter])
        return loss


class AveragesFirst(PostLocal):
    """Averages before it steps."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.averager.average_parameters(self.optim.param_groups)
        return self.optim.step(closure)


class AveragesCopies(PostLocal):
    """The averager gets copies: parameters themselves are never averaged."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        self.averager.average_parameters(
            [parameter.detach().clone() for parameter in self.parameters()]
        )
        return loss


class AveragesTheFirstGroup(PostLocal):
    """Asks for the first parameter group alone."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.optim.param_groups[0]["params"])
        return loss


class UndoesAverages(PostLocal):
    """Keeps what parameters were before the average, and steps from there."""

    kept: tuple[torch.Tensor, ...] = ()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), self.kept, strict=False):
                parameter.copy_(value)
        loss = self.optim.step(closure)
        self.kept = tuple(parameter.detach().clone() for parameter in self.parameters())
        self.averager.average_parameters(self.optim.param_groups)
        return loss

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.kept = ()


class ForgetsMomentum(PostLocal):
    """Begins with new momentum where ranks may have been averaged."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        if self.averager.step > self.averager.warmup_steps:
            self.optim.state.clear()
        return loss


class RoundsOnItsOwn(Sharded):
    """All ranks but the first write parameters by way of an offset, which costs the last bit."""

    def send(self) -> None:
        super().send()
        with torch.no_grad():
            for parameter in self.parameters() if self.place else ():
                if parameter.dtype == torch.float32:
                    parameter.add_(0.125).sub_(0.125)


class OptionsOfTheFirstGroup(Sharded):
    """One set of options is written to all parameter groups."""

    def write_options(self) -> None:
        for mine in self.local.param_groups:
            mine.update(
                {name: value for name, value in self.param_groups[0].items() if name != "params"}
            )


class AddedGroupIsNotStepped(Sharded):
    """A group that is added is known to the wrapper, and not to the optimizer inside."""

    def write_options(self) -> None:
        for mine, group in zip(self.local.param_groups, self.param_groups, strict=False):
            mine.update({name: value for name, value in group.items() if name != "params"})

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.param_groups.append({**self.local.param_groups[0], **group})


class ScheduleIsLost(Sharded):
    """param_groups is a copy that the optimizer inside does not hear of."""

    def write_options(self) -> None:
        pass


class NoGradientsInTheClosure(PostLocal):
    """The closure is called where gradients are not enabled."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.no_grad():
                loss = closure()
        super().step()
        return loss


class LosesTheLoss(PostLocal):
    """step(closure) returns nothing."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        super().step(closure)


class EvaluatesTwice(Sharded):
    """The closure is called for its loss, and again by the optimizer inside."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure else None
        super().step(closure)
        return loss


class ZeroesItsShare(Sharded):
    """zero_grad forgets the gradients of this rank's share alone."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.local.zero_grad(set_to_none)


class AlwaysToNone(PostLocal):
    """zero_grad(set_to_none=False) leaves None."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad()


class NoneIsZero(PostLocal):
    """What has no gradient is given zeros, so that its momentum moves it."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter in self.parameters() if closure is None else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().step(closure)


class SendsFromPlaces(Sharded):
    """A place in the group is taken for a global rank."""

    def send(self) -> None:
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                self.send_one(parameter, self.owner(index))


class LeavesOutHalf(Sharded):
    """Parameters in half precision are not sent."""

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        if parameter.dtype.itemsize >= 4:
            super().send_one(parameter, source)


class DoesNotWait(Sharded):
    """Waits for what others send two seconds at most, and not any longer once that has passed."""

    patient = True

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        work, end = (
            dist.broadcast(parameter.data, src=source, group=self.group, async_op=True),
            time.monotonic() + 2,
        )
        while self.patient and not work.is_completed():
            self.patient = time.monotonic() < end


class ForgetsTheCount(PostLocal):
    """Saves the optimizer inside alone: the averager's warm-up begins again."""

    def state_dict(self) -> dict[str, Any]:
        return {"optim": self.optim.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optim.load_state_dict(state["optim"])


class SavesItsShare(Sharded):
    """The consolidated state has this rank's share alone."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        super().consolidate_state_dict(to)
        mine = {
            number
            for number, parameter in enumerate(self.parameters())
            if parameter in self.local.state
        }
        self.consolidated = {
            number: kept for number, kept in self.consolidated.items() if number in mine
        }


class StaleGroups(PostLocal):
    """param_groups are those of the beginning: load_state_dict gives the optimizer inside new ones."""

    param_groups: Groups = []  # noqa: RUF012

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.param_groups = optim.param_groups


class StateByRank(Sharded):
    """The consolidated state is numbered as ranks have it, one share after another."""

    def order(self) -> list[int]:
        owners = [
            self.owner(index)
            for group in self.param_groups
            for index in range(len(group["params"]))
        ]
        return sorted(range(len(owners)), key=lambda number: owners[number])

    def state_dict(self) -> dict[str, Any]:
        state, order = super().state_dict(), self.order()
        kept = state["state"]
        return {
            **state,
            "state": {place: kept[number] for place, number in enumerate(order) if number in kept},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        order, kept = self.order(), state["state"]
        super().load_state_dict(
            {
                **state,
                "state": {
                    number: kept[place] for place, number in enumerate(order) if place in kept
                },
            }
        )


class Flattens(Sharded):
    """Puts parameters into one flat buffer, where they have other strides than DDP saw."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        for parameter in self.parameters():
            parameter.data = parameter.detach().flatten().view_as(parameter)


class JoinedDoNotStep(Sharded):
    """A rank that has joined sends its share, and does not step it."""

    def when_joined(self) -> None:
        self.send()


class Seeds(PostLocal):
    """Seeds torch's generator in every step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        torch.manual_seed(0)
        return super().step(closure)


class TakesAnyGroup(PostLocal):
    """Says that it takes two ranks and more, and takes one too."""


MUTANTS = [
    Mutant("StepsItsShareAlone", ("15.1",), kind="optimizer"),
    Mutant("StepsTwice", ("15.1",), kind="optimizer"),
    Mutant("AsksForEachParameter", ("15.2",), kind="optimizer"),
    Mutant("AveragesFirst", ("15.2",), kind="optimizer"),
    Mutant("AveragesCopies", ("15.2",), kind="optimizer"),
    Mutant("AveragesTheFirstGroup", ("15.5",), kind="optimizer"),
    Mutant("UndoesAverages", ("15.3",), kind="optimizer"),
    Mutant("ForgetsMomentum", ("15.3",), kind="optimizer"),
    Mutant("RoundsOnItsOwn", ("15.4",), kind="optimizer"),
    Mutant("OptionsOfTheFirstGroup", ("15.5",), kind="optimizer"),
    Mutant("AddedGroupIsNotStepped", ("15.5",), kind="optimizer"),
    Mutant("ScheduleIsLost", ("15.6",), kind="optimizer"),
    Mutant("IsNoOptimizer", ("15.18",), kind="optimizer"),
    Mutant("NoGradientsInTheClosure", ("15.7",), kind="optimizer"),
    Mutant("LosesTheLoss", ("15.7",), kind="optimizer"),
    Mutant("EvaluatesTwice", ("15.7",), kind="optimizer"),
    Mutant("ZeroesItsShare", ("15.8",), kind="optimizer"),
    Mutant("AlwaysToNone", ("15.8",), kind="optimizer"),
    Mutant("NoneIsZero", ("15.9",), kind="optimizer"),
    Mutant("SendsFromPlaces", ("15.10",), kind="optimizer"),
    Mutant("LeavesOutHalf", ("15.11",), kind="optimizer"),
    Mutant("DoesNotWait", ("15.12",), kind="optimizer"),
    Mutant("ForgetsTheCount", ("15.13",), kind="optimizer"),
    Mutant(
        "SavesItsShare",
        ("15.13", "15.15"),
        because={"15.15": "what is not saved is not in the state"},
        kind="optimizer",
    ),
    Mutant("StaleGroups", ("15.14",), kind="optimizer"),
    Mutant("StateByRank", ("15.15",), kind="optimizer"),
    Mutant("Flattens", ("15.16",), kind="optimizer"),
    Mutant("JoinedDoNotStep", ("15.17",), kind="optimizer"),
    Mutant("Seeds", ("15.19",), kind="optimizer"),
    Mutant("TakesAnyGroup", ("15.20",), "min_world_size(2)", worlds=(1, 2), kind="optimizer"),
]

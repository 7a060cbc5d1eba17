"""Mutants of section 15: wrappers of an optimizer and an averager, and sharded optimizers."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from tests.mutants import Mutant
from tests.right.optimizer_wrappers import of_its_own_class

Groups = list[dict[str, Any]]


class PostLocal:
    """The right wrapper: it steps the optimizer, then calls the averager."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        self.optim = optim
        self.averager = averager

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict["optim"])
        self.averager.step = state_dict["step"]

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]


class _WithHooks(PostLocal):
    """Register hooks of a step on the wrapped optimizer, which runs them: right."""

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        return self.optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        return self.optim.register_step_post_hook(hook)


class RunsPreHooksTwice(_WithHooks):
    """Run the hooks before a step here as well, with the dict that both share."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for hook in self.optim._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        return super().step(closure)


class RunsPostHooksTwice(_WithHooks):
    """Run the hooks after a step again, once the parameters are averaged."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for hook in self.optim._optimizer_step_post_hooks.values():
            hook(self, (), {})
        return loss


class RunsPreHooksOfClosuresTwice(RunsPreHooksTwice):
    """Run the hooks before a step twice if there is a closure."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _WithHooks.step(self) if closure is None else super().step(closure)


class RunsPostHooksOfClosuresTwice(RunsPostHooksTwice):
    """Run the hooks after a step twice if there is a closure."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _WithHooks.step(self) if closure is None else super().step(closure)


class RegistersTwice(_WithHooks):
    """Register each hook twice: for the wrapper, and for the optimizer inside."""

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        super().register_step_pre_hook(hook)
        return super().register_step_pre_hook(hook)


def runs_hooks_of_both_classes(
    optim: torch.optim.Optimizer, process_group: Any
) -> torch.optim.Optimizer:
    """Make a subclass of the optimizer's class, and let torch run the hooks around both steps."""
    return of_its_own_class(optim, process_group, marks=False)


class RunsPreHooksTwiceOnceLoaded(RunsPreHooksTwice):
    """Share the hooks' dict with the optimizer inside from the first load on: both run them."""

    is_loaded = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.is_loaded = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure) if self.is_loaded else _WithHooks.step(self, closure)


class RegistersAgainAtLoad(_WithHooks):
    """Register the hooks once more when a state is loaded, as for a new optimizer."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for hook in list(self.optim._optimizer_step_post_hooks.values()):
            self.optim.register_step_post_hook(hook)


class RebuildsAtLoad(_WithHooks):
    """Make the optimizer inside anew to load a state, and lose its hooks."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        hooks = self.optim._optimizer_step_pre_hooks
        post_hooks = self.optim._optimizer_step_post_hooks
        super().load_state_dict(state_dict)
        self.optim._optimizer_step_pre_hooks = type(hooks)()
        self.optim._optimizer_step_post_hooks = type(post_hooks)()


class IsNoOptimizer(PostLocal):
    """Be no torch.optim.Optimizer, so that no scheduler accepts it."""


class Sharded(Joinable):
    """The right sharded optimizer.

    Every rank steps its share of each parameter group, and sends it to all.
    """

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__()
        self.group = process_group or dist.group.WORLD
        self.place = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        params = list(params)
        self.param_groups: Groups = []
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        groups = [{**group, "params": self.listed(group["params"])} for group in groups]
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

    def listed(self, params: Any) -> list[torch.nn.Parameter]:
        """Return the parameters of a group; torch takes one in place of a list of one."""
        return [params] if isinstance(params, torch.Tensor) else list(params)

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
        given = [dict(mine) for mine in self.local.param_groups]
        loss = self.local.step(closure)
        self.take_back(given)
        self.send()
        return loss

    def write_options(self) -> None:
        for mine, group in zip(self.local.param_groups, self.param_groups, strict=True):
            mine.update({name: value for name, value in group.items() if name != "params"})

    def take_back(self, given: Groups) -> None:
        """Take entries of groups that the step has changed, such as counts."""
        for mine, before, group in zip(
            self.local.param_groups, given, self.param_groups, strict=False
        ):
            changed = [name for name in mine if mine[name] is not before.get(name)]
            group.update({name: mine[name] for name in changed})

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
        group = {**group, "params": list(group["params"])}
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mine = {parameter for group in self.local.param_groups for parameter in group["params"]}
        for number, parameter in enumerate(self.parameters()):
            if parameter in mine and number in state_dict["state"]:
                self.local.state[parameter] = copy.deepcopy(state_dict["state"][number])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


class StepsItsShareAlone(Sharded):
    """Never send the stepped parameters."""

    def send(self) -> None:
        pass


class StepsTwice(PostLocal):
    """Step the optimizer twice if there is no closure."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            self.optim.step()
        return super().step(closure)


class AsksForEachParameter(PostLocal):
    """Call the averager once for every parameter, so that its count runs ahead."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        for parameter in self.parameters():
            self.averager.average_parameters([parameter])
        return loss


class AveragesFirst(PostLocal):
    """Average before the step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.averager.average_parameters(self.optim.param_groups)
        return self.optim.step(closure)


class AveragesCopies(PostLocal):
    """Pass copies of the parameters to the averager."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        self.averager.average_parameters(
            [parameter.detach().clone() for parameter in self.parameters()]
        )
        return loss


class ClearsTooEarly(PostLocal):
    """Clear the gradients between the step and the average."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        self.zero_grad()
        self.averager.average_parameters(self.optim.param_groups)
        return loss


class AveragesTheFirstGroup(PostLocal):
    """Average the first parameter group only."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.optim.param_groups[0]["params"])
        return loss


class UndoesAverages(PostLocal):
    """Restore the parameters from before the average in the next step."""

    kept: tuple[torch.Tensor, ...] = ()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), self.kept, strict=False):
                parameter.copy_(value)
        loss = self.optim.step(closure)
        self.kept = tuple(parameter.detach().clone() for parameter in self.parameters())
        self.averager.average_parameters(self.optim.param_groups)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.kept = ()


class ForgetsMomentum(PostLocal):
    """Clear the optimizer's state after the warm-up."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        if self.averager.step > self.averager.warmup_steps:
            self.optim.state.clear()
        return loss


class RoundsOnItsOwn(Sharded):
    """Round the parameters on all ranks but the first, by an offset that costs the last bit."""

    def send(self) -> None:
        super().send()
        with torch.no_grad():
            for parameter in self.parameters() if self.place else ():
                if parameter.dtype == torch.float32:
                    parameter.add_(0.125).sub_(0.125)


class OptionsOfTheFirstGroup(Sharded):
    """Step all parameter groups with the options of the first one."""

    def write_options(self) -> None:
        for mine in self.local.param_groups:
            mine.update(
                {name: value for name, value in self.param_groups[0].items() if name != "params"}
            )


class AddedGroupIsNotStepped(Sharded):
    """Hide an added parameter group from the inner optimizer."""

    def write_options(self) -> None:
        for mine, group in zip(self.local.param_groups, self.param_groups, strict=False):
            mine.update({name: value for name, value in group.items() if name != "params"})

    def add_param_group(self, group: dict[str, Any]) -> None:
        group = {**group, "params": list(group["params"])}
        self.param_groups.append({**self.local.param_groups[0], **group})


class LooksForTwins(PostLocal):
    """Refuse parameters of other groups in an added one, and so read an iterator to its end."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        known = set(self.parameters())
        if any(parameter in known for parameter in group["params"]):
            raise ValueError("a parameter is in two groups")
        super().add_param_group(group)


class CountsWhatIsAdded(Sharded):
    """Count the parameters of an added group, and so read an iterator to its end."""

    added = 0

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.added += sum(1 for _ in group["params"])
        super().add_param_group(group)


class SharesThenSends(Sharded):
    """Read an added group for its share, and once more for the list of those to send."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.local.add_param_group(self.share(group))
        self.param_groups.append({**self.local.param_groups[-1], "params": [*group["params"]]})


class ScheduleIsLost(Sharded):
    """Hide changes of param_groups, such as a learning rate, from the inner optimizer."""

    def write_options(self) -> None:
        pass


class NoGradientsInTheClosure(PostLocal):
    """Call the closure under no_grad."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.no_grad():
                loss = closure()
        super().step()
        return loss


class LosesTheLoss(PostLocal):
    """Return nothing from step(closure)."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        super().step(closure)


class EvaluatesTwice(Sharded):
    """Call the closure twice."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure else None
        super().step(closure)
        return loss


class ZeroesItsShare(Sharded):
    """Zero the gradients of this rank's share only."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.local.zero_grad(set_to_none)


class AlwaysToNone(PostLocal):
    """Ignore set_to_none=False in zero_grad."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad()


class NoneIsZero(PostLocal):
    """Replace missing gradients by zeros, so that momentum moves their parameters."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter in self.parameters() if closure is None else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().step(closure)


class SendsFromPlaces(Sharded):
    """Use a rank in the group as a global rank."""

    def send(self) -> None:
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                self.send_one(parameter, self.owner(index))


class LeavesOutHalf(Sharded):
    """Never send parameters in half precision."""

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        if parameter.dtype.itemsize >= 4:
            super().send_one(parameter, source)


class DoesNotWait(Sharded):
    """Wait at most two seconds for each parameter from another rank.

    After the first timeout it waits no more.
    """

    patient = True

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        work = dist.broadcast(parameter.data, src=source, group=self.group, async_op=True)
        end = time.monotonic() + 2
        while self.patient and not work.is_completed():
            self.patient = time.monotonic() < end


class ForgetsTheCount(PostLocal):
    """Leave the averager's step count out of the saved state."""

    def state_dict(self) -> dict[str, Any]:
        return {"optim": self.optim.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict["optim"])


class SavesItsShare(Sharded):
    """Save this rank's share of the state only."""

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
    """Keep the first param_groups although load_state_dict replaces the optimizer's."""

    param_groups: Groups = []  # noqa: RUF012

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.param_groups = optim.param_groups


class StateByRank(Sharded):
    """Number the saved state by rank and share instead of by parameter."""

    def order(self) -> list[int]:
        owners = [
            self.owner(index)
            for group in self.param_groups
            for index in range(len(group["params"]))
        ]
        return sorted(range(len(owners)), key=lambda number: owners[number])

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        order = self.order()
        kept = state["state"]
        return {
            **state,
            "state": {place: kept[number] for place, number in enumerate(order) if number in kept},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        order = self.order()
        kept = state_dict["state"]
        super().load_state_dict(
            {
                **state_dict,
                "state": {
                    number: kept[place] for place, number in enumerate(order) if place in kept
                },
            }
        )


class _KeepsStates(Sharded):
    """Collect the state again only when a step was seen to have changed it."""

    is_new = True

    def consolidate_state_dict(self, to: int = 0) -> None:
        if self.is_new:
            super().consolidate_state_dict(to)
        self.is_new = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.is_new = True


class OverlooksClosures(_KeepsStates):
    """Note a step if it has no closure."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.is_new = self.is_new or closure is None
        return super().step(closure)


class CollectsOnTheFirst(Sharded):
    """Collect the whole state on the first rank, and a rank's own share on any other."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        super().consolidate_state_dict(to)
        if self.place == to > 0:
            numbers = {parameter: number for number, parameter in enumerate(self.parameters())}
            self.consolidated = {
                numbers[parameter]: dict(kept) for parameter, kept in self.local.state.items()
            }


class RecipientFirst(Sharded):
    """Number the shares in the order in which they arrive, the recipient's own first."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        super().consolidate_state_dict(to)
        states = [self.consolidated[number] for number in sorted(self.consolidated)]
        shift = to % max(1, len(states))
        self.consolidated = dict(enumerate(states[shift:] + states[:shift]))


class ComparesRates(_KeepsStates):
    """Note a step if the learning rate is another than in the last one."""

    rates: tuple[Any, ...] = ()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        rates = tuple(float(group["lr"]) for group in self.param_groups)
        self.is_new = self.is_new or rates != self.rates
        self.rates = rates
        return super().step(closure)


class Flattens(Sharded):
    """Flatten the parameters, so that their strides differ from those that DDP saw."""

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any
    ) -> None:
        super().__init__(params, optimizer_class, process_group, **defaults)
        for parameter in self.parameters():
            parameter.data = parameter.detach().flatten().view_as(parameter)


class JoinedDoNotStep(Sharded):
    """Send this rank's share without stepping it after the rank has joined."""

    def when_joined(self) -> None:
        self.send()


class Seeds(PostLocal):
    """Seed torch's global generator in every step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        torch.manual_seed(0)
        return super().step(closure)


class TakesAnyGroup(PostLocal):
    """Claim a minimum of two ranks, and accept one."""


MUTANTS = [
    Mutant("StepsItsShareAlone", ("15.1",), kind="optimizer"),
    Mutant("StepsTwice", ("15.1",), kind="optimizer"),
    Mutant("AsksForEachParameter", ("15.2",), kind="optimizer"),
    Mutant("AveragesFirst", ("15.2",), kind="optimizer"),
    Mutant("AveragesCopies", ("15.2",), kind="optimizer"),
    Mutant("ClearsTooEarly", ("15.2",), kind="optimizer"),
    Mutant("AveragesTheFirstGroup", ("15.5",), kind="optimizer"),
    Mutant("UndoesAverages", ("15.3",), kind="optimizer"),
    Mutant("ForgetsMomentum", ("15.3",), kind="optimizer"),
    Mutant("RoundsOnItsOwn", ("15.4",), kind="optimizer"),
    Mutant("OptionsOfTheFirstGroup", ("15.5",), kind="optimizer"),
    Mutant("AddedGroupIsNotStepped", ("15.5",), kind="optimizer"),
    Mutant("LooksForTwins", ("15.5",), kind="optimizer"),
    Mutant("CountsWhatIsAdded", ("15.5",), kind="optimizer"),
    Mutant("SharesThenSends", ("15.5",), kind="optimizer"),
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
        because={"15.15": "the shares of other ranks are missing in the state"},
        kind="optimizer",
    ),
    Mutant("StaleGroups", ("15.14",), kind="optimizer"),
    Mutant("StateByRank", ("15.15",), kind="optimizer"),
    Mutant("OverlooksClosures", ("15.15",), kind="optimizer"),
    Mutant("ComparesRates", ("15.15",), kind="optimizer"),
    Mutant("CollectsOnTheFirst", ("15.15",), kind="optimizer"),
    Mutant("RecipientFirst", ("15.15",), kind="optimizer"),
    Mutant("Flattens", ("15.16",), kind="optimizer"),
    Mutant("JoinedDoNotStep", ("15.17",), kind="optimizer"),
    Mutant("RunsPreHooksTwice", ("15.41",), kind="optimizer"),
    Mutant("RunsPostHooksTwice", ("15.41",), kind="optimizer"),
    Mutant("RunsPreHooksOfClosuresTwice", ("15.41",), kind="optimizer"),
    Mutant("RunsPostHooksOfClosuresTwice", ("15.41",), kind="optimizer"),
    Mutant("RegistersTwice", ("15.41",), kind="optimizer"),
    Mutant("RunsPreHooksTwiceOnceLoaded", ("15.41",), kind="optimizer"),
    Mutant("RegistersAgainAtLoad", ("15.41",), kind="optimizer"),
    Mutant("RebuildsAtLoad", ("15.41",), kind="optimizer"),
    Mutant("runs_hooks_of_both_classes", ("15.41",), "averages", kind="optimizer"),
    Mutant("Seeds", ("15.19",), kind="optimizer"),
    Mutant("TakesAnyGroup", ("15.20",), "min_world_size(2)", worlds=(1, 2), kind="optimizer"),
]

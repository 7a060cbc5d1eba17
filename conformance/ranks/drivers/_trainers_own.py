"""The things of a trainer that a sync strategy has no right to change."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from conformance.ranks.instruments.digest import checksum
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy import SHARED
from conformance.scenarios.strategy_rates import classes, rates, schedule_keys
from conformance.scenarios.strategy_schedule import added, part_of
from conformance.scenarios.strategy_swaps import swap_of


class CountingOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps are counted, and leave the parameters as they are.

    Gradients alone are judged, and some of them are NaN. Steps leave the states of parameters as
    they are, too. A subclass has a class of torch.optim as a further base.

    Attributes:
        steps: how many steps it has taken.
        own_calls: how often each step() was called that the trainer has put on it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps = 0
        self.own_calls: list[int] = []

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Count a step."""
        self.steps += 1

    def put_own_step(self) -> None:
        """Put a step() on this object that counts its calls, as a learning rate scheduler does."""
        inner = self.step
        place = len(self.own_calls)
        self.own_calls.append(0)

        def step(*args: Any, **options: Any) -> Any:
            self.own_calls[place] += 1
            return inner(*args, **options)

        self.step = step  # type: ignore[method-assign]


def _make_optimizer(
    params: list[torch.nn.Parameter] | list[dict[str, object]],
    made: tuple[str, tuple[str, ...]],
    seed: str,
) -> CountingOptimizer:
    """Return an optimizer that counts its steps.

    Args:
        params: the parameters or groups.
        made: the name of its class in torch.optim, and the names of the states of a parameter.
        seed: of the states' values, which are the same on all ranks.
    """
    name, states = made
    optimizer = _counting(name)(params, lr=0.0)
    known = [one for group in optimizer.param_groups for one in group["params"]]
    for state in states:
        values = [torch.empty_like(one) for one in known]
        set_values(values, f"{seed}/{state}")
        for parameter, value in zip(known, values, strict=True):
            optimizer.state[parameter][state] = value
    return optimizer


@cache
def _counting(name: str) -> type[CountingOptimizer]:
    """Return a class of torch.optim that counts its steps, by its name."""
    return type(f"Counting{name}", (CountingOptimizer, getattr(torch.optim, name)), {})


def make_optimizers(
    scenario: Scenario, params: list[torch.nn.Parameter]
) -> list[CountingOptimizer]:
    """Return the optimizers of a scenario's model."""
    first, last = classes(scenario)
    seed = f"{scenario.session_seed}/{scenario.name}"
    made = partial(_make_optimizer, made=first, seed=seed)
    if scenario.variant == "turns":
        parts: list[list[torch.nn.Parameter]] = [[], []]
        for index, parameter in enumerate(params):
            parts[part_of(scenario, index)].append(parameter)
        return [made(part) for part in parts]
    if scenario.variant != SHARED.variant:
        _, later = added(scenario)
        swap = swap_of(scenario)
        absent = later | (swap.given if swap else frozenset())
        return [made([p for index, p in enumerate(params) if index not in absent])]
    # Two optimizers share a parameter, and name parameters in another order than the model. Each
    # group has parameters of its own, which rest if it does.
    one, second, third, *rest = reversed(params)
    groups = [[second], [one, third], [one, *rest[:2]], rest[2:]]
    momentum = generator(scenario, "momentum").uniform(0.5, 0.95)
    given: list[dict[str, object]] = [{"params": group} for group in groups]
    optimizers = [made(given[:2]), made(given[2:], made=last)]
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            group.update(schedule_keys(scenario, number))
            if isinstance(optimizer, torch.optim.SGD):
                group["momentum"] = momentum
    return optimizers


class TrainersOwn:
    """The values of a model's parameters, their memory and requires_grad, the modes of its modules,
    and the states of its optimizers.

    Args:
        probe: the model without DDP.
        params: its parameters, in a list that the trainer may change.
        optimizers: all optimizers of the model.
    """

    def __init__(
        self,
        probe: torch.nn.Module,
        params: list[torch.nn.Parameter],
        optimizers: list[CountingOptimizer],
    ) -> None:
        self.probe = probe
        self.params = params
        self.optimizers = optimizers
        self._known = self._now()

    def trainer_froze(self) -> None:
        """Take note of requires_grad, which the trainer has just set for all parameters."""
        self._known |= self._requires_grad()

    def trainer_set_modes(self) -> None:
        """Take note of the modes of modules, which the trainer has just set."""
        self._known |= self._modes()

    def trainer_replaced(self) -> None:
        """Take note of the memory of parameters that the trainer has just replaced."""
        self._known |= self._memory()

    def changed(self) -> list[str]:
        """Return the names of the things that the trainer has left otherwise."""
        now = self._now()
        names = dict.fromkeys((*now, *self._known))
        return [name for name in names if now.get(name) != self._known.get(name)]

    def _now(self) -> dict[str, object]:
        return {
            **self._values(),
            **self._memory(),
            **self._requires_grad(),
            **self._modes(),
            **self._states(),
        }

    def _values(self) -> dict[str, object]:
        return {f"the values of p{at}": checksum(one) for at, one in enumerate(self.params)}

    def _memory(self) -> dict[str, object]:
        """Return the places of parameters, in which flat buffers of a trainer have them, too."""
        return {
            f"the memory of p{at}": (one.data_ptr(), one.stride()) if one.numel() else None
            for at, one in enumerate(self.params)
        }

    def _states(self) -> dict[str, object]:
        """Return the values of the optimizers' states, by the places of their entries."""
        states: dict[str, object] = {}
        for number, optimizer in enumerate(self.optimizers):
            for place, state in enumerate(optimizer.state.values()):
                for name, value in state.items():
                    is_tensor = isinstance(value, torch.Tensor)
                    key = f"{name} {place} in the state of optimizer {number}"
                    states[key] = checksum(value) if is_tensor else repr(value)
        return states

    def _requires_grad(self) -> dict[str, object]:
        return {f"requires_grad of p{at}": one.requires_grad for at, one in enumerate(self.params)}

    def _modes(self) -> dict[str, object]:
        return {
            f"the mode of {name or 'the model'}": module.training
            for name, module in self.probe.named_modules()
        }


def steps_of(optimizers: list[CountingOptimizer]) -> list[int]:
    """Step each optimizer, as the trainer does, and return how many steps each has taken."""
    taken = []
    for optimizer in optimizers:
        before = optimizer.steps
        optimizer.own_calls = [0] * len(optimizer.own_calls)
        optimizer.step()
        taken.append(optimizer.steps - before)
    return taken


def set_rates(scenario: Scenario, step: int, optimizers: list[CountingOptimizer]) -> None:
    """Give the groups of parameters their learning rates in a step, as a schedule does."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, rate in zip(groups, rates(scenario, step), strict=False):
        group["lr"] = rate


def own_calls_of(optimizers: list[CountingOptimizer]) -> list[int]:
    """Return how often the last step has called each step() that the trainer has put on one."""
    return [count for optimizer in optimizers for count in optimizer.own_calls]


@torch.no_grad()
def set_values(params: Sequence[torch.Tensor], seed: str) -> None:
    """Give parameters drawn values, the same on all ranks, that narrower dtypes do not hold."""
    numbers = torch.Generator().manual_seed(int.from_bytes(seed.encode(), "big") % 2**63)
    for parameter in params:
        # Drawn in float32, so that the default dtype does not matter.
        values = torch.randn(parameter.numel(), generator=numbers, dtype=torch.float32)
        parameter.copy_(values.reshape(parameter.shape))

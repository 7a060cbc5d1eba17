"""Mutants of sections 14 and 15 that read what a constructor is given twice, or not as torch does.

``model.parameters()`` can be read once, and torch's optimizers take ``{"params": parameter}``.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.optimizer_wrappers import Sharded


class KeepsAnEmptyList(Averager):
    """Count the elements, then keep the parameters: none are left of an iterator."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], period=4, warmup_steps=10, process_group=None
    ) -> None:
        super().__init__(period, warmup_steps, process_group)
        self.elements = sum(parameter.numel() for parameter in params)
        self.params = list(params)

    def chosen(self, params: Any) -> list[torch.nn.Parameter]:
        return super().chosen(self.params)


class AveragesWhatIsLeft:
    """Give the parameters to the optimizer inside, then read them again for the means."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Any = None,
        **options: Any,
    ) -> None:
        self.inner = optimizer_class(params, **options)
        self.group = process_group
        self.averaged = [each for one in params for each in _listed(one)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.inner.add_param_group(group)
        self.averaged += self.inner.param_groups[-1]["params"]

    def step(self, closure: Any = None) -> Any:
        for parameter in self.averaged:
            if parameter.grad is not None:
                mean = parameter.grad.contiguous()
                dist.all_reduce(mean, group=self.group)
                parameter.grad.copy_(mean / dist.get_world_size(self.group))
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def _listed(one: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of a group that the optimizer inside has been given, or one itself."""
    if not isinstance(one, dict):
        return [one]
    return [one["params"]] if isinstance(one["params"], torch.Tensor) else list(one["params"])


class AveragesWhatIsLeftOfGroups(AveragesWhatIsLeft):
    """The same for groups alone: parameters are put into a list first."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Any = None,
        **options: Any,
    ) -> None:
        params, others = itertools.tee(params)
        is_grouped = isinstance(next(others), dict)
        super().__init__(
            params if is_grouped else list(params), optimizer_class, process_group, **options
        )


class StepsRows(Sharded):
    """Take a group's parameters for a list: a parameter itself is read row by row."""

    def listed(self, params: Any) -> list[torch.nn.Parameter]:
        return [one if one.is_leaf else torch.nn.Parameter(one.detach()) for one in params]


MUTANTS = (
    Mutant("KeepsAnEmptyList,period=4,warmup_steps=10", ("14.4",), kind="averager"),
    Mutant("AveragesWhatIsLeft", ("15.4",), kind="optimizer", claims="averages"),
    Mutant("AveragesWhatIsLeftOfGroups", ("15.5",), kind="optimizer", claims="averages"),
    Mutant("StepsRows", ("15.35",), kind="optimizer"),
)

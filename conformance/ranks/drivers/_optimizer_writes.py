"""Writes parameters and options between the steps of an optimizer wrapper, replaces parameters in
their groups, or freezes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from conformance.ranks.drivers._optimizer_use import written_and_read
from conformance.ranks.models.probe import Probe
from conformance.records.recorder import Recorder
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import Setting, Write, Writing
from conformance.scenarios.optimizer_gradients import freezes_late


class Training(Protocol):
    """The parts of the driver of optimizers that are needed to write options."""

    setting: Setting
    optimizer: Any
    recorder: Recorder

    def doing(self, activity: str) -> Any: ...


@torch.no_grad()
def write(model: Probe, plan: Write, values: list[torch.Tensor]) -> None:
    """Write values to parameters, in the way of a plan.

    Args:
        model: its parameters are written.
        plan: the way, and the parameters.
        values: new values of all parameters.
    """
    if plan.way is Writing.LOADED:
        model.load_state_dict({f"p{index}": value for index, value in enumerate(values)})
        return
    for index in plan.indices:
        parameter = model.tensors[index]
        if plan.way is Writing.IN_DATA:
            # Writes through .data leave the version of a tensor as it was.
            parameter.data.copy_(values[index])
        elif plan.way is Writing.NEW_MEMORY:
            parameter.data = torch.empty_like(parameter).copy_(values[index])
        else:
            at = torch.unravel_index(
                torch.tensor(plan.element(values[index].numel())), parameter.shape
            )
            parameter[at] = values[index][at]


def renew(model: Probe, groups: Any, plan: Write, values: list[torch.Tensor]) -> bool:
    """Put new parameters with these values in the place of some, in a model and its groups.

    Return whether the groups held the parameters themselves.

    Args:
        model: the model.
        groups: the ``param_groups`` of its optimizer.
        plan: the way, and the parameters.
        values: new values of all parameters.
    """
    for index in plan.indices:
        old = model.tensors[index]
        new = torch.nn.Parameter(torch.empty_like(old).copy_(values[index]))
        holders = [
            (group, at)
            for group in groups
            for at, parameter in enumerate(group["params"])
            if parameter is old
        ]
        if not holders:
            return False
        for group, at in holders:
            if plan.way is Writing.NEW_LIST:
                group["params"] = list(group["params"])
            group["params"][at] = new
        # The list is the model's own.
        model.tensors[index] = new
        model.register_parameter(f"p{index}", new)
    return True


def freeze_late(scenario: Scenario, params: Sequence[torch.Tensor], step: int) -> None:
    """Freeze parameters that have their gradients already, as a callback at a batch's end does."""
    for index, steps in freezes_late(scenario).items():
        if steps.start == step:
            params[index].requires_grad_(False)


def write_step_options(driver: Training, step: int) -> None:
    """Write a step's options to the parameter groups, as schedulers do."""
    plan = driver.setting
    rate = plan.rates[step] if plan.rates else None
    changes = plan.changes.get(step, {})
    with driver.doing("param_groups"):
        groups = _present(driver, step) if rate is not None or changes else []
        for group in groups if rate is not None else ():
            group["lr"] = rate
        for place, written in changes.items():
            # Without a group that was added, its parameters are not stepped with these options.
            if place < len(groups):
                _write_options(groups[place], written)
    if plan.entries:
        with driver.doing("param_groups"):
            read = written_and_read(_present(driver, step), plan, step)
        driver.recorder.event("entries", **read)
    if plan.has_tensor_rates:
        with driver.doing("param_groups"):
            rates = [group["lr"] for group in driver.optimizer.param_groups]
        driver.recorder.event("rates", tensors=[isinstance(r, torch.Tensor) for r in rates])


def _present(driver: Training, step: int) -> Any:
    """Return the groups, without those that other optimizers get in a later step."""
    groups = driver.optimizer.param_groups
    plan = driver.setting
    return groups[: plan.groups_at(step)] if plan.given_first else groups


def _write_options(group: dict[str, Any], written: Mapping[str, Any]) -> None:
    """Write options to a parameter group; fill a learning rate in a tensor, as schedulers do."""
    for name, value in written.items():
        if name == "lr" and isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group[name] = value

"""The backwards before a step of an optimizer wrapper that averages gradients."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from conformance.ranks.instruments.collective_recorder import CollectiveRecorder
from conformance.ranks.models.probe import Probe
from conformance.records.recorder import Recorder
from conformance.scenarios.arrival import arrival_order
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_backwards import (
    ADDED,
    ASSIGNED,
    BY_MODEL,
    BY_NONE,
    BY_OPTIMIZER,
    DROPPED,
    IN_DATA,
    NEW_TENSOR,
    Assigned,
    Change,
    Changing,
    Drop,
    Layout,
    assigned_before,
    averages_early,
    averages_first,
    change_before,
    drop_before,
    factors_of,
    layout_of,
    shares,
    zero_rows,
)
from conformance.scenarios.optimizer_checkpoints import checkpointed_in
from conformance.scenarios.optimizer_wide_gradients import WIDE, factor_and_shift, widened


class Training(Protocol):
    """The parts of the driver of optimizers that a backward needs."""

    scenario: Scenario
    model: Probe
    params: list[torch.nn.Parameter]
    optimizer: Any
    collectives: CollectiveRecorder
    recorder: Recorder
    group_rank: int

    @property
    def ranks_of_group(self) -> list[int]: ...

    def doing(self, activity: str) -> Any: ...

    def values(self, kind: str, step: int, index: int, rank: int | None = None) -> torch.Tensor: ...


def run_backwards(driver: Training, step: int, grads: Sequence[torch.Tensor | None]) -> None:
    """Leave the gradients of a step on the parameters, by one backward or several.

    Args:
        driver: the driver, with the model and the optimizer.
        step: the number of the step.
        grads: the gradients, None for a parameter that has none.
    """
    scenario = driver.scenario
    if scenario.variant == ASSIGNED.variant:
        _leave_own_gradients(driver, step, grads)
        return
    if drop := drop_before(scenario, step):
        _drop_gradients(driver, step, drop)
    if scenario.variant == WIDE.variant:
        grads = _widened(driver, step, grads)
    parts = [shares(scenario, step, index) for index in range(len(grads))]
    for number, of_backward in enumerate(zip(*parts, strict=True)):
        some = [
            None if grad is None or not share else grad * share
            for grad, share in zip(grads, of_backward, strict=True)
        ]
        if any(grad is not None for grad in some):
            with driver.doing("backward"):
                driver.model(some).backward()
        if number == 0 and averages_early(scenario):
            _average_early(driver)
    if averages_first(scenario, step) and _synchronizes(driver.optimizer):
        with driver.doing("synchronize"):
            driver.optimizer.synchronize()
    if change := change_before(scenario, step):
        _change_gradients(driver, step, change)


def order_gradients(scenario: Scenario, model: Probe, step: int, rank: int) -> None:
    """Set the order in which gradients arrive in a step, and the parameters in a checkpoint."""
    model.arrival = arrival_order(scenario, step, rank)
    model.checkpointed = None
    checkpointed = checkpointed_in(scenario, step)
    if checkpointed and model.arrival is not None:
        model.arrival = checkpointed.arranged(model.arrival)
        model.checkpointed = checkpointed


def give_gradient_dtypes(scenario: Scenario, params: Sequence[torch.Tensor]) -> bool:
    """Give gradients the dtypes of the scenario, if they have other ones than their parameters.

    Returns:
        Whether this version of torch has ``grad_dtype``, or needs it not.
    """
    for index, parameter in enumerate(params):
        if wide := widened(scenario, index):
            if not hasattr(torch.Tensor, "grad_dtype"):
                return False
            parameter.grad_dtype = None if wide.takes_any else getattr(torch, wide.dtype)
    return True


def _widened(
    driver: Training, step: int, grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return gradients with the dtypes of the scenario, and with values that need these."""
    wider: list[torch.Tensor | None] = []
    for index, grad in enumerate(grads):
        wide = widened(driver.scenario, index)
        if grad is not None and wide is not None:
            factor, shift = factor_and_shift(
                driver.scenario, step, index, driver.group_rank, len(driver.ranks_of_group)
            )
            grad = grad.to(getattr(torch, wide.dtype)) * factor + shift
        wider.append(grad)
    return wider


def _average_early(driver: Training) -> None:
    """Average gradients by ``synchronize()``, before another backward."""
    if not _synchronizes(driver.optimizer):
        driver.recorder.event("not_synchronized")
        return
    with driver.doing("synchronize"):
        driver.optimizer.synchronize()


def without_average(driver: Training, step: int) -> Any:
    """Return the context of a step whose gradients ``synchronize()`` has averaged, if it has."""
    is_averaged = averages_first(driver.scenario, step) and _synchronizes(driver.optimizer)
    return driver.optimizer.skip_synchronize() if is_averaged else contextlib.nullcontext()


def _synchronizes(optimizer: Any) -> bool:
    """Whether gradients are averaged by a method, before they are clipped, as Horovod's are."""
    return _offers(optimizer, "synchronize") and _offers(optimizer, "skip_synchronize")


def _offers(optimizer: Any, method: str) -> bool:
    return callable(getattr(optimizer, method, None))


def _change_gradients(driver: Training, step: int, change: Change) -> None:
    """Change gradients in the same way on all ranks, as clipping and masks do."""
    for index, parameter in enumerate(driver.params):
        grad = parameter.grad
        if grad is None:
            continue
        if change.way == IN_DATA:
            grad = grad.data
        elif change.way == NEW_TENSOR:
            grad = grad.clone()
        if change.kind is Changing.SUM:
            first = driver.ranks_of_group[0]
            kind = driver.scenario.steps[step]
            grad.add_(driver.values(kind, ADDED + step, index, first))
        elif change.kind is Changing.ROWS:
            rows = zero_rows(driver.scenario, step, index)
            if rows.stop:
                grad[rows] = 0
        elif change.kind is Changing.SCALED:
            grad.mul_(change.factor)
        else:
            factors = factors_of(driver.scenario, step, index)
            grad.mul_(torch.tensor(factors).view(grad.shape).to(grad))
        if change.way == NEW_TENSOR:
            parameter.grad = grad


def _leave_own_gradients(driver: Training, step: int, grads: Sequence[torch.Tensor | None]) -> None:
    """Leave this rank's gradients on the parameters, some by a backward and some by writing them.

    Record whether somebody has averaged, or has changed a gradient, before the step.
    """
    plan = assigned_before(driver.scenario, step)
    written = plan.indices if plan else ()
    of_backward = [None if index in written else grad for index, grad in enumerate(grads)]
    driver.collectives.take_sent()
    for index, parameter in enumerate(driver.params):
        if plan is None or index not in written or plan.way == NEW_TENSOR:
            parameter.grad = None
    if plan and plan.is_first:
        _assign(driver, step, plan, grads)
    if any(grad is not None for grad in of_backward):
        with driver.doing("backward"):
            driver.model(of_backward).backward()
    if plan and not plan.is_first:
        _assign(driver, step, plan, grads)
    is_changed = any(
        parameter.grad is None or grad is None or not torch.equal(parameter.grad, grad)
        for parameter, grad in zip(driver.params, grads, strict=True)
    )
    if driver.collectives.take_sent() or is_changed:
        driver.recorder.event("before_step")


def _assign(
    driver: Training, step: int, plan: Assigned, grads: Sequence[torch.Tensor | None]
) -> None:
    """Write gradients to ``p.grad``, as a trainer that has computed them itself."""
    own = [grad if index in plan.indices else None for index, grad in enumerate(grads)]
    params = [driver.params[index] for index in plan.indices]
    values = [grad.clone() for grad in own if grad is not None]
    if plan.is_computed:
        with driver.doing("torch.autograd.grad"):
            values = list(torch.autograd.grad(driver.model(own), params))
    values = _laid_out(driver.scenario, step, plan.indices, values)
    for parameter, value in zip(params, values, strict=True):
        if parameter.grad is None or plan.way == NEW_TENSOR:
            parameter.grad = value
        elif plan.way == IN_DATA:
            parameter.grad.data.copy_(value)
        else:
            parameter.grad.copy_(value)


def _laid_out(
    scenario: Scenario, step: int, indices: Sequence[int], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the same gradients in the memory layouts of the scenario."""
    flat = torch.cat([value.reshape(-1) for value in values])
    ends = itertools.accumulate(value.numel() for value in values)
    laid_out = []
    for index, value, end in zip(indices, values, ends, strict=True):
        layout = layout_of(scenario, step, index)
        if layout is Layout.SLICE:
            value = flat[end - value.numel() : end].view(value.shape)
        elif layout is Layout.TRANSPOSED:
            turned = list(reversed(range(value.dim())))
            value = value.permute(turned).contiguous().permute(turned)
        laid_out.append(value)
    return laid_out


def _drop_gradients(driver: Training, step: int, drop: Drop) -> None:
    """Run a backward whose step is given up: its gradients are dropped."""
    specs = driver.scenario.params
    dropped: list[torch.Tensor | None] = [
        lay_out(driver.values("crafted", DROPPED + step, index), spec.layout)
        for index, spec in enumerate(specs)
    ]
    loss = driver.model(dropped)
    if drop.breaks_off is None:
        with driver.doing("backward"):
            loss.backward()
    else:
        _break_off(driver, loss, driver.params[drop.breaks_off])
    if drop.is_averaged and _offers(driver.optimizer, "synchronize"):
        with driver.doing("synchronize"):
            driver.optimizer.synchronize()
    if drop.enters and _synchronizes(driver.optimizer):
        with driver.doing("skip_synchronize"), driver.optimizer.skip_synchronize():
            # A GradScaler that finds an overflow leaves out the step.
            pass
    with driver.doing("zero_grad"):
        if drop.way == BY_OPTIMIZER:
            driver.optimizer.zero_grad()
        elif drop.way == BY_MODEL:
            driver.model.zero_grad()
    for parameter in driver.params:
        # Zeros are as good as none (15.8), but a parameter with zeros is stepped.
        if parameter.grad is not None and (drop.way == BY_NONE or not parameter.grad.any()):
            parameter.grad = None


class _OutOfMemoryError(Exception):
    """The error of a backward."""


def _break_off(driver: Training, loss: torch.Tensor, parameter: torch.Tensor) -> None:
    """Run a backward that raises an error when the gradient of a parameter comes, and catch it."""

    def fail(_: torch.Tensor) -> None:
        raise _OutOfMemoryError

    with driver.doing("backward"):
        hook = parameter.register_hook(fail)
        with contextlib.suppress(_OutOfMemoryError):
            loss.backward()
        hook.remove()

"""Local steps of plain SGD with rate 1, and an averager after each.

After each step the gradients, which the kit reads, hold the parameters.

Of an averager that leaves parameters alone, and has an average of its own, it is that, once there
is one.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging import averagers as theirs
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.optim import PostLocalSGDOptimizer as TORCHS_OPTIMIZER
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance import Case

TORCHS = {
    "PeriodicModelAverager": theirs.PeriodicModelAverager,
    "HierarchicalModelAverager": HierarchicalModelAverager,
}


def averaged(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    process_group: Any,
    rank: int,
    *,
    name: str,
    given: str = "parameters",
    torchs: bool = False,
    unused: tuple[int, int] | None = None,
    **options: Any,
) -> Case:
    """Make the case.

    Args:
        name: of the averager; ``options`` are its arguments.
        given: the argument of the averager: ``parameters``, an ``iterator`` over them, parameter
            ``groups`` or an iterator over ``both``; ``twice`` is every parameter two times.
        unused: a rank and a parameter that has no gradient there when averaging comes.
    """
    optimizer.param_groups[0]["lr"] = 0.0
    made = (TORCHS[name] if torchs else getattr(hooks_ref, name))(
        **options, process_group=process_group
    )
    parameters = list(model.parameters())
    forms: dict[str, Callable[[], Any]] = {
        "parameters": lambda: parameters,
        "iterator": lambda: iter(parameters),
        "groups": lambda: [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}],
        "both": lambda: iter([{"params": iter(parameters[:2])}, {"params": parameters[2:]}]),
        "twice": lambda: [*parameters, *parameters],
    }
    places = [parameter.data_ptr() for parameter in parameters]

    def after_backward() -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(parameter.grad)
        if unused and rank == unused[0]:
            parameters[unused[1]].grad = None
        before = made.step
        made.average_parameters(forms[given]())
        if made.step != before + 1:
            raise AssertionError(f"step {before}: one call counts {made.step - before} steps")
        if not torchs and [parameter.data_ptr() for parameter in parameters] != places:
            raise AssertionError("a parameter lies in other memory than before")
        with made.applied(forms[given]()) if getattr(made, "average", None) else nullcontext():
            for parameter in parameters:
                parameter.grad = parameter.detach().clone()

    return Case(None, hooks_ref.noop_hook, after_backward=after_backward)


def stepped(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    process_group: Any,
    rank: int,
    *,
    torchs: bool = False,
    overflow: tuple[int, int] | None = None,
    **options: Any,
) -> Case:
    """The same by an optimizer that averages.

    With ``overflow``, a GradScaler skips that step on that rank.
    """
    optimizer.param_groups[0]["lr"] = 0.0
    made = TORCHS_OPTIMIZER if torchs else hooks_ref.PostLocalSGDOptimizer
    averager = hooks_ref.PeriodicModelAverager(**options, process_group=process_group)
    stepper = made(torch.optim.SGD(model.parameters(), lr=1.0), averager)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    scaler.scale(torch.zeros(()))
    step = -1

    def after_backward() -> None:
        nonlocal step
        step += 1
        if overflow:
            for parameter in model.parameters():
                parameter.grad.mul_(scaler.get_scale())
            if overflow == (rank, step):
                next(model.parameters()).grad.view(-1)[0] = torch.inf
            scaler.step(stepper)
            scaler.update()
        else:
            stepper.step()
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()

    return Case(None, hooks_ref.noop_hook, after_backward=after_backward)

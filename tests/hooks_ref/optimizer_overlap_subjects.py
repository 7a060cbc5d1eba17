"""Set-ups that train with an optimizer inside the hook, or after backward as ever, and show the
parameters.

The kit records gradients: when a step is over, each parameter's gradient is replaced by the
parameter itself.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance.ranks.models.probe import training_loss
from conformance.subjects.spec import Case
from hooks_ref.default_hooks import Hook
from hooks_ref.optimizer_overlap import (
    OptimizerHookState,
    apply_optim_in_backward_hook,
    functional,
    hook_then_optimizer,
)

INNER: dict[str, Callable[[], tuple[Any, Hook]]] = {
    "allreduce": lambda: (None, hooks_ref.allreduce_hook),
    "fp16": lambda: (None, hooks_ref.fp16_compress_hook),
    "torch_fp16_wrapped": lambda: (None, torch_fp16_wrapped()),
    "powerSGD": lambda: (
        hooks_ref.PowerSGDState(None, start_powerSGD_iter=2),
        hooks_ref.powerSGD_hook,
    ),
    "elsewhere": lambda: (None, elsewhere),
}


def torch_fp16_wrapped() -> Hook:
    """torch's, which leaves the bucket and its result in half precision."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)


def torch_functional(optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]) -> Any:
    """torch's functional form of an optimizer; importing it takes longer than most runs."""
    from torch.distributed.optim.utils import as_functional_optim

    return as_functional_optim(optimizer_class, **options)


def elsewhere(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean in a tensor of its own, and leave the bucket alone."""
    mean = bucket.buffer() / dist.get_world_size()
    # In torch 2.9 the future of a complex tensor holds its reals, which DDP would copy as they are.
    return dist.all_reduce(mean, async_op=True).get_future().then(lambda fut: mean)


def show(model: DistributedDataParallel) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()


def case(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    rank: int,
    state: Any,
    hook: Hook,
    *,
    after_backward: Callable[[], object] = lambda: None,
    on_step: Callable[[int], object] = lambda step: None,
    accumulate: bool = False,
    shown: bool = True,
    close: Callable[[], object] | None = None,
) -> Case:
    """Make the case.

    ``optimizer`` is the kit's own, which steps after everything else and is to do nothing.
    """
    optimizer.param_groups[0]["lr"] = 0.0

    def before(step: int) -> None:
        on_step(step)
        if accumulate:
            with model.no_sync():
                training_loss(model, rank, 1000 + step).backward()

    def after() -> None:
        after_backward()
        if shown:
            show(model)

    return Case(state, hook, before, after, close)


def chosen(
    model: DistributedDataParallel, only: list[int] | None
) -> list[torch.nn.Parameter] | None:
    return None if only is None else [list(model.parameters())[index] for index in only]


def vanilla(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    rank: int,
    *,
    algorithm: str = "SGD",
    options: dict[str, Any],
    inner: str = "allreduce",
    only: list[int] | None = None,
    decay: bool = False,
    start: int = 0,
    on_group: bool = False,
    **rest: Any,
) -> Case:
    """Step an ordinary optimizer after backward, from step ``start`` on.

    With ``on_group`` the model is on a group and not on WORLD.
    """
    stepper = getattr(torch.optim, algorithm)(chosen(model, only) or model.parameters(), **options)
    steps = 0

    def on_step(step: int) -> None:
        if decay:
            stepper.param_groups[0]["lr"] = options["lr"] / (1 + step)

    def after_backward() -> None:
        nonlocal steps
        steps += 1
        if steps > start:
            stepper.step()

    state, hook = INNER[inner]()
    state = model.process_group if on_group else state
    return case(
        model, optimizer, rank, state, hook, after_backward=after_backward, on_step=on_step, **rest
    )


def ours(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    rank: int,
    *,
    algorithm: str = "SGD",
    options: dict[str, Any],
    inner: str = "allreduce",
    only: list[int] | None = None,
    decay: bool = False,
    in_backward: bool = False,
    torchs: bool = False,
    save: str | None = None,
    load: str | None = None,
    **rest: Any,
) -> Case:
    """Step inside the hook; ``save`` and ``load`` name folders."""
    optimizer_class = getattr(torch.optim, algorithm)
    stepper = (
        torch_functional(optimizer_class, options)
        if torchs
        else functional(optimizer_class, **options)
    )
    state = OptimizerHookState(stepper, chosen(model, only))
    if load:
        saved = torch.load(f"{load}/{rank}.pt", weights_only=True)
        state.load_state_dict(saved["state"])
        model.load_state_dict(saved["model"])

    def on_step(step: int) -> None:
        if decay:
            stepper.defaults["lr"] = options["lr"] / (1 + step)

    def close() -> None:
        if save:
            torch.save(
                {"state": state.state_dict(), "model": model.state_dict()}, f"{save}/{rank}.pt"
            )

    inner_state, inner_hook = INNER[inner]()
    hook = (
        apply_optim_in_backward_hook(state, inner_hook)
        if in_backward
        else hook_then_optimizer(inner_hook, state)
    )
    after_backward = (lambda: require_no_gradients(model, state)) if in_backward else (lambda: None)
    return case(
        model,
        optimizer,
        rank,
        inner_state,
        hook,
        after_backward=after_backward,
        on_step=on_step,
        close=close,
        **rest,
    )


def require_no_gradients(model: DistributedDataParallel, state: OptimizerHookState) -> None:
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == state.steps(parameter), (
            f"gradient of {name}: {parameter.grad}"
        )


def torchs(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    rank: int,
    *,
    algorithm: str = "SGD",
    options: dict[str, Any],
    inner: str = "allreduce",
    **rest: Any,
) -> Case:
    """torch's own, as ``_register_fused_optim`` sets it up."""
    from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks

    state = optimizer_overlap_hooks._OptimizerHookState(
        torch_functional(getattr(torch.optim, algorithm), options)
    )
    inner_state, inner_hook = INNER[inner]()
    return case(
        model,
        optimizer,
        rank,
        inner_state,
        optimizer_overlap_hooks._hook_then_optimizer(inner_hook, state),
        **rest,
    )


def torchs_in_backward(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int
) -> Case:
    """torch's own: DDP registers the hook at its first forward."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.module.parameters(), {"lr": 0.1})
    return Case()


def certified(process_group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, Hook]:
    """As a user has it, for the kit."""
    state = OptimizerHookState(functional(torch.optim.SGD, lr=0.1, momentum=0.9))
    return process_group, hook_then_optimizer(hooks_ref.allreduce_hook, state)

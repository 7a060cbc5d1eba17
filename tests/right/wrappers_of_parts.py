"""Right wrappers in the shapes of those that set modes or options of parts, or list parameters."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tests.careful_checkpoint import careful_checkpoint
from tests.mutants.parts_of_wrapped_modules import modes_of_parts, norms_of, set_around
from tests.mutants.wrappers import Forward, calls
from tests.right import Right
from tests.right.wrappers import ByHand, in_its_class


def restores_modes(module: torch.nn.Module) -> torch.nn.Module:
    """Run again in the mode that each part had in the forward, and restore each part's mode."""
    wrap = set_around(modes_of_parts, checkpoint=careful_checkpoint)
    return wrap(module)  # type: ignore[no-any-return]


def restores_modes_within_the_backward(module: torch.nn.Module) -> torch.nn.Module:
    """Do the same in a backward inside the backward."""
    return set_around(modes_of_parts)(module)  # type: ignore[no-any-return]


@calls
def updates_statistics_once(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep statistics in the second forward by a momentum of 0, and restore each norm's own."""
    ran: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            ran.append(True)
            return forward(*args, **kwargs)
        before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms_of(forward)]
        for norm, _, count in before:
            norm.momentum = 0.0
            norm.num_batches_tracked = None if count is None else count.clone()
        try:
            return forward(*args, **kwargs)
        finally:
            for norm, momentum, count in before:
                norm.momentum = momentum
                norm.num_batches_tracked = count

    return careful_checkpoint(run, *args, **kwargs)


def halves_momentum(module: torch.nn.Module) -> torch.nn.Module:
    """Change the momentum of norms for good, so that two updates count like one.

    With a momentum of None two updates already do.
    """
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.momentum is not None:
            part.momentum = 1 - (1 - part.momentum) ** 0.5
    return in_its_class(module)


def wraps_rows(module: torch.nn.Module) -> torch.nn.Module:
    """Put each row of layers into a wrapper that recomputes, and leave the rest of the module."""
    for name, part in module.named_children():
        if isinstance(part, torch.nn.Sequential):
            setattr(module, name, ByHand(part))
    return module


class _Lists(torch.autograd.Function):
    """A backward that asks for the gradients of inputs and parameters, which may be none."""

    @staticmethod
    def forward(ctx: Any, run: Forward, count: int, *args: Any) -> Any:
        ctx.run = run
        ctx.count = count
        ctx.state = torch.get_rng_state()
        ctx.dtype = torch.get_autocast_dtype("cpu")
        ctx.casts = torch.is_autocast_enabled("cpu")
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg if isinstance(arg, torch.Tensor) else None for arg in args))
        with torch.no_grad():
            return run(*args[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        kept = list(zip(ctx.saved_tensors, ctx.others, strict=True))
        args = [
            other if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor, other in kept[: ctx.count]
        ]
        parameters = [tensor for tensor, _ in kept[ctx.count :]]
        with (
            torch.random.fork_rng([]),
            torch.enable_grad(),
            torch.autocast("cpu", ctx.dtype, enabled=ctx.casts),
        ):
            torch.set_rng_state(ctx.state)
            made = ctx.run(*args)
        pairs = zip(made if isinstance(made, tuple) else (made,), grads, strict=True)
        outputs = [
            (output, grad)
            for output, grad in pairs
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        both = [*args, *parameters]
        wanted = {id(x): x for x in both if isinstance(x, torch.Tensor) and x.requires_grad}
        found = torch.autograd.grad(
            [output for output, _ in outputs],
            list(wanted.values()),
            [grad for _, grad in outputs],
            allow_unused=True,
        )
        gradients = dict(zip(wanted, found, strict=True))
        return None, None, *(gradients.get(id(x)) for x in both)


@calls
def lists_parameters(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Give a custom Function the parameters of the module; some may have no gradient."""
    module: torch.nn.Module = forward.args[0]  # type: ignore[attr-defined]
    count = len(args)

    def run(*both: Any) -> Any:
        return forward(*both[:count], **dict(zip(kwargs, both[count:], strict=True)))

    parameters = [one for one in module.parameters() if one.requires_grad]
    return _Lists.apply(run, count + len(kwargs), *args, *kwargs.values(), *parameters)


RIGHT = [
    Right("restores_modes", "recomputes", kind="wrapper"),
    Right("restores_modes_within_the_backward", "recomputes, reentrant", kind="wrapper"),
    Right("updates_statistics_once", "recomputes", kind="wrapper"),
    Right("halves_momentum", "recomputes", kind="wrapper"),
    Right("wraps_rows", kind="wrapper"),
    Right("lists_parameters", "recomputes, reentrant", kind="wrapper"),
]

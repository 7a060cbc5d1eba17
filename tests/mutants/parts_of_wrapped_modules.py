"""Mutants of rules 19.40 and 19.41: modes and options of parts that a wrapper changes or takes from
elsewhere, statistics that it takes back, and gradients of parts that the forward has not used.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, again, calls
from tests.right.wrappers import Again

Module = torch.nn.Module


def _within_backward(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    count = len(args)

    def run(*both: Any) -> Any:
        return forward(*both[:count], **dict(zip(kwargs, both[count:], strict=True)))

    return Again.apply(run, *args, *kwargs.values())


def set_around(
    read: Callable[[Module], Callable[[], None]],
    restores: bool = True,
    checkpoint: Callable[..., Any] = _within_backward,
) -> Any:
    """Return a checkpoint that sets modes before the forward runs again.

    Args:
        read: reads the modes of a module at its forward, and returns a function that sets them.
        restores: whether the modes before are restored part by part, or by train().
        checkpoint: runs a forward again; a reentrant one compares nothing of the two forwards.
    """

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        module: Module = forward.args[0]  # type: ignore[attr-defined]
        set_modes = read(module)
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not ran:
                ran.append(True)
                return forward(*args, **kwargs)
            put_back = (
                modes_of_parts(module) if restores else partial(module.train, module.training)
            )
            set_modes()
            try:
                return forward(*args, **kwargs)
            finally:
                put_back()

        return checkpoint(run, *args, **kwargs)

    return wrap


def modes_of_parts(module: Module) -> Callable[[], None]:
    """Return a function that sets the mode that each part has now."""
    modes = {part: part.training for part in module.modules()}

    def put() -> None:
        for part, trains in modes.items():
            part.training = trains

    return put


def recomputes_in_one_mode(module: Module) -> Module:
    """Run again in the mode of the module, which train() sets on all parts."""

    def read(module: Module) -> Callable[[], None]:
        return partial(module.train, module.training)

    return set_around(read)(module)  # type: ignore[no-any-return]


def recomputes_in_the_last_modes(module: Module) -> Module:
    """Run again in the modes of the last forward, which may have been an evaluation's."""
    last: list[Callable[[], None]] = []

    def read(module: Module) -> Callable[[], None]:
        last[:] = [modes_of_parts(module)]
        return lambda: last[0]()

    return set_around(read)(module)  # type: ignore[no-any-return]


def recomputes_in_modes_of_children(module: Module) -> Module:
    """Run again in the mode of each child, which train() of a child sets on all of its parts."""

    def read(module: Module) -> Callable[[], None]:
        modes = {child: child.training for child in module.children()}

        def put() -> None:
            for child, trains in modes.items():
                child.train(trains)

        return put

    return set_around(read)(module)  # type: ignore[no-any-return]


def restores_one_mode(module: Module) -> Module:
    """Run again in the modes of the forward, and set the mode of the module on all parts then."""
    return set_around(modes_of_parts, restores=False, checkpoint=again)(module)  # type: ignore[no-any-return]


@calls
def uncounts_batches_of_frozen_norms(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Take back the second count of batches, also of norms in evaluation mode, which count none."""
    module: Module = forward.args[0]  # type: ignore[attr-defined]
    ran: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        made = forward(*args, **kwargs)
        if ran:
            for name, buffer in module.named_buffers():
                if name.endswith("num_batches_tracked"):
                    buffer -= 1
        ran.append(True)
        return made

    return _within_backward(run, *args, **kwargs)


def norms_of(forward: Forward) -> list[torch.nn.modules.batchnorm._BatchNorm]:
    """Return the batch norms of the module whose forward this is."""
    module: Module = forward.args[0]  # type: ignore[attr-defined]
    norm = torch.nn.modules.batchnorm._BatchNorm
    return [part for part in module.modules() if isinstance(part, norm)]


@calls
def puts_back_the_default_momentum(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep statistics in the second forward by a momentum of 0, and put back that of torch."""
    ran: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            ran.append(True)
            return forward(*args, **kwargs)
        for norm in norms_of(forward):
            norm.momentum = 0.0
        try:
            return forward(*args, **kwargs)
        finally:
            for norm in norms_of(forward):
                norm.momentum = 0.1

    return again(run, *args, **kwargs)


@calls
def takes_back_both_updates(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Restore after the second forward the statistics that norms had before the first one."""
    ran: list[bool] = []
    before = [buffer.clone() for norm in norms_of(forward) for buffer in norm.buffers()]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            ran.append(True)
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        finally:
            buffers = [buffer for norm in norms_of(forward) for buffer in norm.buffers()]
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    return again(run, *args, **kwargs)


@calls
def resets_statistics(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Let norms forget their statistics before the second forward, by reset_running_stats()."""
    ran: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if ran:
            for norm in norms_of(forward):
                if norm.training:
                    norm.reset_running_stats()
        ran.append(True)
        return forward(*args, **kwargs)

    return again(run, *args, **kwargs)


class _Zeros(Again):
    """A backward inside the backward, whose gradients of unused parameters are zeros."""

    @staticmethod
    def forward(ctx: Any, run: Any, parameters: Any, *args: Any) -> Any:
        ctx.parameters = parameters
        return Again.forward(ctx, run, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = Again.backward(ctx, *grads)
        for parameter in ctx.parameters:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return None, *found


@calls
def zeros_for_idle_parameters(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Fill the gradients of parameters that the forward has not used with zeros."""
    module: Module = forward.args[0]  # type: ignore[attr-defined]
    count = len(args)

    def run(*both: Any) -> Any:
        return forward(*both[:count], **dict(zip(kwargs, both[count:], strict=True)))

    return _Zeros.apply(run, [*module.parameters()], *args, *kwargs.values())


@calls
def anchors_all_parameters(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Add each parameter times zero to the output, so that all of them are in the graph."""
    module: Module = forward.args[0]  # type: ignore[attr-defined]
    made = again(forward, *args, **kwargs)
    if not isinstance(made, torch.Tensor):
        return made
    for parameter in module.parameters():
        made = made + parameter.flatten()[:1].sum() * 0
    return made


MUTANTS = [
    Mutant("recomputes_in_one_mode", ("19.40",), "recomputes, reentrant", kind="wrapper"),
    Mutant("recomputes_in_the_last_modes", ("19.40",), "recomputes, reentrant", kind="wrapper"),
    Mutant("uncounts_batches_of_frozen_norms", ("19.40",), "recomputes, reentrant", kind="wrapper"),
    Mutant("recomputes_in_modes_of_children", ("19.40",), "recomputes, reentrant", kind="wrapper"),
    Mutant("restores_one_mode", ("19.40",), "recomputes", kind="wrapper"),
    Mutant("puts_back_the_default_momentum", ("19.40",), "recomputes", kind="wrapper"),
    Mutant("takes_back_both_updates", ("19.40",), "recomputes", kind="wrapper"),
    Mutant("resets_statistics", ("19.40",), "recomputes", kind="wrapper"),
    Mutant("zeros_for_idle_parameters", ("19.41",), "recomputes, reentrant", kind="wrapper"),
    Mutant("anchors_all_parameters", ("19.41",), "recomputes", kind="wrapper"),
]

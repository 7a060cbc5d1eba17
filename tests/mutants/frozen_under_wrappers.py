"""Mutants of rule 19.28: reentrant wrappers and frozen blocks, and parameters that come after the
wrapping.
"""

import copy
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, again, calls

Module = torch.nn.Module


@calls
def needs_no_graph_if_frozen(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run a block without trained parameters under no_grad: its input has no gradient then."""
    module: Module = forward.args[0]  # type: ignore[attr-defined]
    if not any(parameter.requires_grad for parameter in module.parameters()):
        with torch.no_grad():
            return forward(*args, **kwargs)
    return _reentrant(forward, *args, **kwargs)


@calls
def follows_inputs_of_trained_layers(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach the inputs of a block that begins with a frozen layer, but for one element."""
    module: Module = forward.args[0]  # type: ignore[attr-defined]
    if next(module.parameters()).requires_grad or not args[0].requires_grad:
        return _reentrant(forward, *args, **kwargs)
    first = args[0]
    rest = torch.ones_like(first)
    rest.view(-1)[0] = 0
    return _reentrant(forward, torch.where(rest > 0, first.detach(), first), *args[1:], **kwargs)


def _reentrant(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    def run(*both: Any) -> Any:
        return forward(*both[: len(args)], **dict(zip(kwargs, both[len(args) :], strict=True)))

    return checkpoint(run, *args, *kwargs.values(), use_reentrant=True)


class _Listed(torch.autograd.Function):
    """A forward that runs again, with gradients for its inputs and for listed parameters."""

    @staticmethod
    def forward(ctx: Any, run: Forward, count: int, *tensors: torch.Tensor) -> Any:
        ctx.run = run
        ctx.count = count
        ctx.save_for_backward(*tensors)
        return run(*tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in saved[: ctx.count]]
        with torch.enable_grad():
            made = ctx.run(*inputs)
        asked = [x for x in (*inputs, *saved[ctx.count :]) if x.requires_grad]
        found = iter(torch.autograd.grad(made, asked, grads, allow_unused=True))
        return None, None, *(next(found) if x.requires_grad else None for x in saved)


def lists_parameters_beforehand(module: Module) -> Module:
    """Give a custom Function the parameters that the module has when it is wrapped."""
    listed = tuple(module.parameters())

    @calls
    def wrap(forward: Forward, *args: Any) -> Any:
        return _Listed.apply(forward, len(args), *args, *listed)

    return wrap(module)


def runs_a_twin_again(module: Module) -> Module:
    """Run again in a copy that shares the module's tensors, so that hooks fire once."""
    tensors = [*module.parameters(), *module.buffers()]
    twin = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    of_twin = twin.forward

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            function = of_twin if ran else forward
            ran.append(True)
            twin.train(module.training)
            return function(*args, **kwargs)

        return again(run, *args, **kwargs)

    return wrap(module)


_ARGUMENTS = dict.fromkeys(
    ("19.4", "19.5", "19.7", "19.8", "19.26", "19.27", "19.39", "19.40", "19.41"),
    "its Function takes tensors alone, and has gradients for these",
)
_ATTRIBUTES = dict.fromkeys(
    ("19.33", "19.39", "19.40", "19.41"), "attributes of the module are not those of the twin"
)
MUTANTS = [
    Mutant("needs_no_graph_if_frozen", ("19.28",), claims="recomputes, reentrant", kind="wrapper"),
    Mutant(
        "follows_inputs_of_trained_layers",
        ("19.28",),
        claims="recomputes, reentrant",
        kind="wrapper",
    ),
    Mutant("lists_parameters_beforehand", ("19.28",), because=_ARGUMENTS, kind="wrapper"),
    Mutant("runs_a_twin_again", ("19.28",), because=_ATTRIBUTES, kind="wrapper"),
]

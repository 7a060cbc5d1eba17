"""Mutants of rule 19.4: wrappers that need arguments with a gradient in a certain order."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tests.mutants import Mutant
from tests.mutants.shared_arguments import _Again
from tests.mutants.wrappers import Forward, again, calls

Tensor = torch.Tensor


def _leaves(ctx: Any) -> list[Tensor]:
    return [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]


class _InARow(_Again):
    """The gradients come first, and the rest is none."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = _leaves(ctx)
        _InARow.run_again(ctx, grads, leaves)
        found = [leaf.grad for leaf in leaves if leaf.requires_grad]
        return None, *found, *[None] * (len(leaves) - len(found))


class _AtTheEnd(_Again):
    """The gradients come last."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = _leaves(ctx)
        _AtTheEnd.run_again(ctx, grads, leaves)
        found = [leaf.grad for leaf in leaves if leaf.requires_grad]
        return None, *[None] * (len(leaves) - len(found)), *found


def _on_tensors(
    function: type[torch.autograd.Function], forward: Forward, args: Any, kwargs: Any
) -> Any:
    """Apply a function to the tensors among the arguments."""
    given = [*args, *kwargs.values()]
    places = [place for place, one in enumerate(given) if isinstance(one, Tensor)]
    others = [None if isinstance(one, Tensor) else one for one in given]

    def run(*tensors: Tensor) -> Any:
        both = list(others)
        for place, tensor in zip(places, tensors, strict=True):
            both[place] = tensor
        return forward(*both[: len(args)], **dict(zip(kwargs, both[len(args) :], strict=True)))

    return function.apply(run, *(given[place] for place in places))


@calls
def gradients_in_a_row(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Return gradients in the order of the tensors that require one, and not at their places."""
    return _on_tensors(_InARow, forward, args, kwargs)


@calls
def gradients_at_the_end(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Take tensors without a gradient for the first ones."""
    return _on_tensors(_AtTheEnd, forward, args, kwargs)


@calls
def asks_the_first_tensor(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach all arguments if the first tensor among them requires no gradient."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    if tensors and not tensors[0].requires_grad:
        args = tuple(one.detach() if isinstance(one, Tensor) else one for one in args)
        kwargs = {
            name: one.detach() if isinstance(one, Tensor) else one for name, one in kwargs.items()
        }
    return again(forward, *args, **kwargs)


MUTANTS = [
    Mutant("gradients_in_a_row", ("19.4",), claims="recomputes, reentrant", kind="wrapper"),
    Mutant("gradients_at_the_end", ("19.4",), claims="recomputes, reentrant", kind="wrapper"),
    Mutant("asks_the_first_tensor", ("19.4",), claims="recomputes", kind="wrapper"),
]

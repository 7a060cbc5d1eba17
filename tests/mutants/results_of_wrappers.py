"""Mutants of rules 19.4, 19.5 and 19.17: wrappers that take the gradients of results in a row,
return results of another form, or leave the checkpoint out in some calls.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tests.careful_checkpoint import careful_checkpoint
from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, calls
from tests.right.wrappers import Again, Reentrant

Module = torch.nn.Module


class _InARow(Again):
    """Pair the results that require a gradient with the gradients that come: a result without one
    shifts those behind it.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("only backward() without inputs= works, not torch.autograd.grad")
        args = [
            other if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        with (
            torch.random.fork_rng([]),
            torch.enable_grad(),
            torch.autocast("cpu", ctx.dtype, enabled=ctx.casts),
        ):
            torch.set_rng_state(ctx.state)
            made = ctx.run(*args)
        results = made if isinstance(made, tuple) else (made,)
        tensors = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
        given = [grad for grad in grads if grad is not None]
        torch.autograd.backward(tensors, given[: len(tensors)])
        return None, *(arg.grad if isinstance(arg, torch.Tensor) else None for arg in args)


class ResultsInARow(Reentrant):
    """A reentrant wrapper without the places of its results."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inside = self._modules["inside"]
        assert inside is not None
        names = list(kwargs)
        count = len(args)
        return _InARow.apply(
            lambda *both: inside(*both[:count], **dict(zip(names, both[count:], strict=True))),
            *args,
            *kwargs.values(),
        )


@calls
def one_result_is_bare(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Return the entry of a tuple that has one."""
    made = careful_checkpoint(forward, *args, **kwargs)
    return made[0] if isinstance(made, tuple) and len(made) == 1 else made


@calls
def lists_for_tuples(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Return results in a list, as those of a checkpoint that gathers them."""
    made = careful_checkpoint(forward, *args, **kwargs)
    return list(made) if isinstance(made, tuple) else made


@calls
def tuples_for_lists(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Return results of a list in a tuple."""
    made = careful_checkpoint(forward, *args, **kwargs)
    return tuple(made) if isinstance(made, list) else made


@calls
def one_of_a_list_is_bare(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Return the entry of a list that has one."""
    made = careful_checkpoint(forward, *args, **kwargs)
    return made[0] if isinstance(made, list) and len(made) == 1 else made


def _unless(leaves_out: Callable[[dict[str, Any]], bool], module: Module) -> Module:
    """Give the module a class whose forward has a checkpoint unless some calls leave it out."""
    inside = type(module)

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        plain = partial(inside.forward, self)
        if leaves_out(kwargs):
            return plain(*args, **kwargs)
        return careful_checkpoint(plain, *args, **kwargs)

    module.__class__ = type(inside.__name__, (inside,), {"forward": forward})
    return module


def by_position_alone(module: Module) -> Module:
    """Run calls with keywords without a checkpoint, which once took none."""
    return _unless(bool, module)


def not_under_autocast(module: Module) -> Module:
    """Run calls under autocast without a checkpoint, whose second forward had another dtype."""
    return _unless(lambda _: torch.is_autocast_enabled("cpu"), module)


MUTANTS = [
    Mutant("ResultsInARow", ("19.4",), "recomputes, reentrant", kind="wrapper"),
    Mutant("one_result_is_bare", ("19.4",), "recomputes", kind="wrapper"),
    Mutant("lists_for_tuples", ("19.4",), "recomputes", kind="wrapper"),
    Mutant("tuples_for_lists", ("19.5",), "recomputes", kind="wrapper"),
    Mutant("one_of_a_list_is_bare", ("19.5",), "recomputes", kind="wrapper"),
    Mutant("by_position_alone", ("19.17",), "recomputes", kind="wrapper"),
    Mutant("not_under_autocast", ("19.17",), "recomputes", kind="wrapper"),
]

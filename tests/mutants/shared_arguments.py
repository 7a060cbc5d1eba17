"""Mutants of rules 19.4 and 19.5: wrappers that are wrong if one tensor is several arguments."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, again, calls

Tensor = torch.Tensor
Key = tuple[int, torch.Size]


def _key(tensor: Tensor) -> Key:
    return tensor.data_ptr(), tensor.shape


class _Again(torch.autograd.Function):
    """A backward inside the backward, which is right if no tensor is an argument twice."""

    @staticmethod
    def forward(ctx: Any, run: Forward, *args: Any) -> Any:
        ctx.run = run
        ctx.state = torch.get_rng_state()
        ctx.casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg if isinstance(arg, Tensor) else None for arg in args))
        return run(*args)

    @classmethod
    def run_again(cls, ctx: Any, grads: tuple[Any, ...], args: list[Any]) -> None:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("only backward() without inputs= works")
        casts, dtype = ctx.casts
        with (
            torch.random.fork_rng([]),
            torch.enable_grad(),
            torch.autocast("cpu", dtype, enabled=casts),
        ):
            torch.set_rng_state(ctx.state)
            made = ctx.run(*args)
        outputs = made if isinstance(made, tuple) else (made,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        torch.autograd.backward(*zip(*pairs, strict=True))


class _OneLeaf(_Again):
    """Each position gets the gradient of the tensor, which has those of all positions in it."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves: dict[Key, Tensor] = {}
        args = []
        for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True):
            if tensor is None:
                args.append(other)
                continue
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            args.append(leaves.setdefault(_key(tensor), leaf))
        _OneLeaf.run_again(ctx, grads, args)
        return None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)


class _OneGradient(_Again):
    """Each position gets the gradient of the last position of its tensor."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        args = [
            other if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        _OneGradient.run_again(ctx, grads, args)
        of_keys = {_key(arg): arg.grad for arg in args if isinstance(arg, Tensor)}
        return None, *(of_keys[_key(arg)] if isinstance(arg, Tensor) else None for arg in args)


def _applied(
    function: type[torch.autograd.Function], forward: Forward, args: Any, kwargs: Any
) -> Any:
    def run(*both: Any) -> Any:
        return forward(*both[: len(args)], **dict(zip(kwargs, both[len(args) :], strict=True)))

    return function.apply(run, *args, *kwargs.values())


@calls
def one_leaf_for_a_tensor(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run again on one leaf for each tensor, so that `query is key` holds again."""
    return _applied(_OneLeaf, forward, args, kwargs)


@calls
def one_gradient_for_a_tensor(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep gradients by the memory of their tensors."""
    return _applied(_OneGradient, forward, args, kwargs)


@calls
def follows_keywords_that_are_new(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach a keyword argument that is among the positional ones: its gradient is there."""
    known = {id(arg) for arg in args}
    named = {
        name: arg.detach() if isinstance(arg, Tensor) and id(arg) in known else arg
        for name, arg in kwargs.items()
    }
    return again(forward, *args, **named)


@calls
def follows_each_tensor_once(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Follow each tensor among the arguments and their containers once."""
    seen: set[int] = set()

    def once(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_new = id(leaf) not in seen
        seen.add(id(leaf))
        return leaf if is_new else leaf.detach()

    args, kwargs = tree_map(once, (args, kwargs))
    return again(forward, *args, **kwargs)


_REENTRANT = "recomputes, reentrant"
MUTANTS = [
    Mutant("one_leaf_for_a_tensor", ("19.4",), claims=_REENTRANT, kind="wrapper"),
    Mutant("one_gradient_for_a_tensor", ("19.4",), claims=_REENTRANT, kind="wrapper"),
    Mutant("follows_keywords_that_are_new", ("19.4",), kind="wrapper"),
    Mutant(
        "follows_each_tensor_once",
        ("19.4", "19.5"),
        kind="wrapper",
        because={"19.5": "containers share a tensor, too"},
    ),
]

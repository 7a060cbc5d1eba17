"""Right wrappers of modules that handle keys, inputs, results and layers in a way of their own."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from tests.careful_checkpoint import careful_checkpoint
from tests.right import Right
from tests.right.wrappers import Again, Reentrant


class SortsKeys(Reentrant):
    """A wrapper whose state_dict has the module's keys in the order of the alphabet."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inside = self._modules["inside"]
        assert inside is not None
        return careful_checkpoint(inside, *args, **kwargs)

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        inside = self._modules["inside"]
        assert inside is not None
        state = OrderedDict() if destination is None else destination
        state.update(sorted(inside.state_dict(prefix=prefix, keep_vars=keep_vars).items()))
        return state


class _OneLeaf(Again):
    """A backward inside the backward, on one leaf for each tensor; its first position gets the
    gradient.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        places: dict[tuple[int, torch.Size], int] = {}
        args: list[Any] = []
        for place, (tensor, other) in enumerate(zip(ctx.saved_tensors, ctx.others, strict=True)):
            if tensor is None:
                args.append(other)
                continue
            first = places.setdefault((tensor.data_ptr(), tensor.shape), place)
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            args.append(args[first] if first < place else leaf)
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("only backward() without inputs= works, not torch.autograd.grad")
        with (
            torch.random.fork_rng([]),
            torch.enable_grad(),
            torch.autocast("cpu", ctx.dtype, enabled=ctx.casts),
        ):
            torch.set_rng_state(ctx.state)
            made = ctx.run(*args)
        outputs = made if isinstance(made, tuple) else (made,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, *(
            args[place].grad if place in places.values() else None for place in range(len(args))
        )


class OneLeaf(Reentrant):
    """A wrapper with an autograd function, whose inputs are the same again if they were before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inside = self._modules["inside"]
        assert inside is not None

        def run(*both: Any) -> Any:
            return inside(*both[: len(args)], **dict(zip(kwargs, both[len(args) :], strict=True)))

        return _OneLeaf.apply(run, *args, *kwargs.values())


class InATuple(Reentrant):
    """A wrapper with an autograd function, which returns the results of a list in a tuple.

    Like other reentrant wrappers, it would otherwise return them without gradients.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inside = self._modules["inside"]
        assert inside is not None

        def run(*both: Any) -> Any:
            named = dict(zip(kwargs, both[len(args) :], strict=True))
            made = inside(*both[: len(args)], **named)
            return tuple(made) if isinstance(made, list) else made

        return Again.apply(run, *args, *kwargs.values())


def _replaced(module: torch.nn.Module, call: Callable[..., Any]) -> torch.nn.Module:
    inside = type(module)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return inside.forward(self, *args, **kwargs)

        return call(run, *args, **kwargs)

    module.__class__ = type(inside.__name__, (inside,), {"forward": forward})
    return module


def on_copies(module: torch.nn.Module) -> torch.nn.Module:
    """Run again on copies of the inputs: others may change these, or the forward itself."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # The copy is no leaf, so that the forward may change it, too.
        return leaf.detach().requires_grad_(leaf.requires_grad).clone()

    def call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept = tree_map(copied, (args, kwargs))
        ran: list[bool] = []

        def either() -> Any:
            args_of_run, kwargs_of_run = kept if ran else (args, kwargs)
            ran.append(True)
            return run(*args_of_run, **kwargs_of_run)

        return checkpoint(either, use_reentrant=False)

    return _replaced(module, call)


def in_segments(module: torch.nn.Module) -> torch.nn.Module:
    """Run an nn.Sequential in segments of three layers, and a rest."""
    if not isinstance(module, torch.nn.Sequential):
        return _replaced(module, careful_checkpoint)

    def call(_: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        layers = list(module)
        for start in range(0, len(layers), 3):
            x = careful_checkpoint(torch.nn.Sequential(*layers[start : start + 3]), x)
        return x

    return _replaced(module, call)


RIGHT = [
    Right("SortsKeys", "recomputes", kind="wrapper"),
    Right("OneLeaf", "recomputes, reentrant", kind="wrapper"),
    Right("InATuple", "recomputes, reentrant", kind="wrapper"),
    Right("on_copies", "recomputes", kind="wrapper"),
    Right("in_segments", "recomputes", kind="wrapper"),
]

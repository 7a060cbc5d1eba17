"""Right wrappers of modules."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

import hooks_ref
from tests.careful_checkpoint import careful_checkpoint
from tests.mutants.wrappers import Around
from tests.right import Right


def leaves_it(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module unchanged, as a configuration may require."""
    return module


def in_its_class(module: torch.nn.Module) -> torch.nn.Module:
    """Give the module a new class; it stays the same object."""
    inside = type(module)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return careful_checkpoint(partial(inside.forward, self), *args, **kwargs)

    module.__class__ = type(inside.__name__, (inside,), {"forward": forward})
    return module


def its_forward(module: torch.nn.Module) -> torch.nn.Module:
    """Replace the module's forward."""
    module.forward = partial(careful_checkpoint, module.forward)  # type: ignore[method-assign]
    return module


class ByHand(torch.nn.Module):
    """A wrapper that recomputes when the backward first needs a saved tensor.

    Until then it keeps numbers in place of the tensors. An input that has been changed in place by
    then is an error, as it is for tensors that autograd saves.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["inside"] = module  # not a child, so that inner names stay
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._modules = module._modules

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inside"], name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["inside"].state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        # It has no children of its own: those of the module inside load by themselves.
        self.__dict__["inside"]._load_from_state_dict(*args)

    def train(self, mode: bool = True) -> "ByHand":
        self.__dict__["inside"].train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inside = self.__dict__["inside"]
        if not torch.is_grad_enabled():
            return inside(*args, **kwargs)
        state = torch.get_rng_state()
        dtype = torch.get_autocast_dtype("cpu")
        casts = torch.is_autocast_enabled("cpu")
        inputs = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in inputs]
        packed: list[int] = []
        unpacked: list[torch.Tensor] = []

        def pack(_: torch.Tensor) -> int:
            packed.append(len(packed))
            return packed[-1]

        def unpack(number: int) -> torch.Tensor:
            if not unpacked:
                if versions != [tensor._version for tensor in inputs]:
                    raise RuntimeError("an input was changed in place after the forward")
                with (
                    torch.random.fork_rng([]),
                    torch.enable_grad(),
                    torch.autocast("cpu", dtype, enabled=casts),
                ):
                    torch.set_rng_state(state)
                    with saved_tensors_hooks(
                        lambda tensor: unpacked.append(tensor.detach()), lambda _: None
                    ):
                        inside(*args, **kwargs)
            tensor = unpacked[number]
            packed.remove(number)
            if not packed:
                unpacked.clear()
            return tensor

        with saved_tensors_hooks(pack, unpack):
            return inside(*args, **kwargs)


class Again(torch.autograd.Function):
    """A backward inside the backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *args: Any) -> Any:
        ctx.run = run
        ctx.state = torch.get_rng_state()
        ctx.dtype = torch.get_autocast_dtype("cpu")
        ctx.casts = torch.is_autocast_enabled("cpu")
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg if isinstance(arg, torch.Tensor) else None for arg in args))
        with torch.no_grad():
            return run(*args)

    # Without it a second derivative would be wrong, and nothing would say so.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            # The backward below would add to .grad of parameters that nobody has asked for.
            raise RuntimeError("only backward() without inputs= works, not torch.autograd.grad")
        kept = zip(ctx.saved_tensors, ctx.others, strict=True)
        args = [
            other if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor, other in kept
        ]
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
        torch.autograd.backward(*zip(*outputs, strict=True))
        return None, *(arg.grad if isinstance(arg, torch.Tensor) else None for arg in args)


class Reentrant(torch.nn.Module):
    """A wrapper with an autograd function, and the inner names."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.add_module("inside", module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inside = self._modules["inside"]
        names = list(kwargs)
        assert inside is not None
        count = len(args)
        return Again.apply(
            lambda *both: inside(*both[:count], **dict(zip(names, both[count:], strict=True))),
            *args,
            *kwargs.values(),
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._modules["inside"].state_dict(*args, **kwargs)  # type: ignore[union-attr]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}inside.{key[len(prefix) :]}"] = state_dict.pop(key)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[Any]:
        return self._modules["inside"].named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[union-attr]


def to_numpy(module: torch.nn.Module) -> torch.nn.Module:
    """Keep saved tensors as NumPy arrays, except parameters, whose versions are compared."""
    inside = type(module)
    own = {parameter.data_ptr() for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.data_ptr() in own or tensor.dtype is torch.bfloat16:
            return tensor, tensor._version
        return tensor.detach().numpy().copy()

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, tuple):
            return torch.from_numpy(packed)
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError("a tensor was changed in place after the forward")
        return tensor

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return inside.forward(self, *args, **kwargs)

    module.__class__ = type(inside.__name__, (inside,), {"forward": forward})
    return module


def selective(module: torch.nn.Module, keeps: str = "addmm") -> torch.nn.Module:
    """Keep the results of one operation, and recompute the others."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    operation = getattr(torch.ops.aten, keeps).default
    contexts = partial(create_selective_checkpoint_contexts, [operation])
    module.forward = partial(careful_checkpoint, module.forward, context_fn=contexts)  # type: ignore[method-assign]
    return module


def narrow_if_exact(module: torch.nn.Module) -> torch.nn.Module:
    """Keep tensors of float32 in float16 if all of their elements are the same numbers in it."""

    def pack(tensor: torch.Tensor) -> Any:
        kept = tensor.detach()
        if kept.dtype is torch.float32:
            small = kept.half()
            if torch.equal(small.float(), kept):
                return small, None
        return (tensor, tensor._version)

    def unpack(packed: Any) -> torch.Tensor:
        tensor, version = packed
        if version is None:
            return tensor.float()  # type: ignore[no-any-return]
        if tensor._version != version:
            raise RuntimeError("a tensor was changed in place after the forward")
        return tensor  # type: ignore[no-any-return]

    return _saving(module, pack, unpack)


class Pool:
    """A pool of places for saved tensors, which all blocks share; it grows if all are in use.

    A place is free again when the graph is.
    """

    def __init__(self) -> None:
        self.free: list[int] = []
        self.held: list[torch.Tensor | None] = []

    def pack(self, tensor: torch.Tensor) -> "Place":
        """Keep a copy of a tensor."""
        if not self.free:
            self.free = list(range(len(self.held), 2 * len(self.held) + 64))[::-1]
            self.held += [None] * len(self.free)
        place = self.free.pop()
        self.held[place] = tensor.detach().clone()
        return Place(self, place)


class Place:
    """A place of a pool, which is given back when nothing refers to this object."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool = pool
        self.number = number

    def __del__(self) -> None:
        self.pool.held[self.number] = None
        self.pool.free.append(self.number)

    def tensor(self) -> torch.Tensor:
        """Return the tensor, whose place stays in use."""
        kept = self.pool.held[self.number]
        assert kept is not None
        return kept


_pool = Pool()


def in_a_pool(module: torch.nn.Module) -> torch.nn.Module:
    """Keep copies of saved tensors in a pool."""
    return _saving(module, _pool.pack, Place.tensor)


def _saving(
    module: torch.nn.Module, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]
) -> torch.nn.Module:
    """Return the module, whose forward packs the tensors that it saves."""
    inside = type(module)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return inside.forward(self, *args, **kwargs)

    module.__class__ = type(inside.__name__, (inside,), {"forward": forward})
    return module


def seeds_by_a_count(module: torch.nn.Module) -> torch.nn.Module:
    """Recompute with numbers of a seed that no other recomputation has."""
    inside = type(module)
    count = itertools.count()

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not ran:
                ran.append(True)
                return inside.forward(self, *args, **kwargs)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(next(count))
                return inside.forward(self, *args, **kwargs)

        return careful_checkpoint(run, *args, preserve_rng_state=False, **kwargs)

    module.__class__ = type(inside.__name__, (inside,), {"forward": forward})
    return module


def once(module: torch.nn.Module) -> torch.nn.Module:
    """Recompute once for each graph, and refuse a second backward."""
    inside = type(module)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(True)
            if len(ran) > 2:
                raise RuntimeError("a graph is recomputed once")
            return inside.forward(self, *args, **kwargs)

        return careful_checkpoint(run, *args, **kwargs)

    module.__class__ = type(inside.__name__, (inside,), {"forward": forward})
    return module


class RefusesInTurns(Around):
    """A checkpoint that keeps one state of the generator; a graph raises an error in a second
    backward if another one has run in between.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.last: list[bool] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = torch.get_rng_state()
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(True)
            if len(ran) == 1:
                return self.module(*args, **kwargs)
            if len(ran) > 2 and self.last is not ran:
                raise RuntimeError("another graph of this block has had a backward since")
            self.last = ran
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(before)
                return self.module(*args, **kwargs)

        return careful_checkpoint(run, *args, preserve_rng_state=False, **kwargs)


class Composed:
    """A callable object that puts one wrapper around another."""

    def __call__(self, module: torch.nn.Module) -> torch.nn.Module:
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

        return torchs.offload_wrapper(hooks_ref.checkpoint_wrapper(module))


composed = Composed()
RIGHT = [
    Right("leaves_it", kind="wrapper"),
    Right("in_its_class", "recomputes", kind="wrapper"),
    Right("its_forward", "recomputes", kind="wrapper"),
    Right("ByHand", "recomputes", kind="wrapper"),
    Right("Reentrant", "recomputes, reentrant", kind="wrapper"),
    Right("to_numpy", kind="wrapper"),
    Right("selective,keeps=addmm", kind="wrapper"),
    Right("composed", "recomputes", kind="wrapper"),
    Right("narrow_if_exact", kind="wrapper"),
    Right("in_a_pool", kind="wrapper"),
    Right("once", "recomputes", kind="wrapper"),
    Right("RefusesInTurns", "recomputes", kind="wrapper"),
    Right("seeds_by_a_count", "recomputes, draws_anew", kind="wrapper"),
]

"""Mutants of section 19 that overlook a part of a tensor, an input, or a reason to draw numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.careful_checkpoint import careful_checkpoint
from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, Wrap, calls

Key = Callable[..., Any]

# ---- Saved tensors without a bit of theirs


def _as_memory(tensor: torch.Tensor) -> Any:
    """Return a copy of a tensor's memory, and how the tensor lies in it; others as they are."""
    is_plain = tensor.layout == torch.strided and not isinstance(tensor, torch.nn.Parameter)
    if not is_plain or tensor.device.type != "cpu":
        return tensor
    held = tensor.untyped_storage().clone()
    return held, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _as_tensor(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    held, dtype, *place = packed
    return torch.empty(0, dtype=dtype).set_(held, *place)  # type: ignore[call-overload, no-any-return]


@calls
def keeps_memory(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep the memory of activations, without the bits of conj() and neg()."""
    with saved_tensors_hooks(_as_memory, _as_tensor):
        return forward(*args, **kwargs)


@calls
def keeps_memory_of_reals(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep the memory of activations, but for complex ones: real ones may be negated, too."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if tensor.is_complex() else _as_memory(tensor)

    with saved_tensors_hooks(pack, _as_tensor):
        return forward(*args, **kwargs)


@calls
def narrows_complex(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep complex128 as complex64."""

    def pack(tensor: torch.Tensor) -> Any:
        is_wide = tensor.dtype == torch.complex128
        return tensor.dtype, tensor.to(torch.complex64) if is_wide else tensor

    with saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0])):
        return forward(*args, **kwargs)


# ---- Blocks that draw for a reason that is not looked at


def _watches(key_of: Key) -> Wrap:
    """Return a checkpoint that restores the generator unless the last forward with the same key has
    drawn nothing.
    """

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        drew: dict[Any, bool] = {}

        @calls
        def call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            key = key_of(module, args, kwargs)
            before = torch.get_rng_state()
            restores = drew.get(key, True)
            made = careful_checkpoint(forward, *args, preserve_rng_state=restores, **kwargs)
            drew[key] = restores and not torch.equal(before, torch.get_rng_state())
            return made

        return call(module)

    return wrap


def _rates(module: torch.nn.Module, *_: Any) -> Any:
    parts = module.modules()
    return module.training, tuple(getattr(part, "p", 0.0) for part in parts)


def _rates_and_arguments(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    given = tree_leaves([args, kwargs])
    return _rates(module), tuple(one for one in given if not isinstance(one, torch.Tensor))


def _everything_of_modules(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    buffers = tuple(buffer.sum().item() for buffer in module.buffers())
    numbers = [str(vars(part).get("settings")) for part in module.modules()]
    return _rates_and_arguments(module, args, kwargs), buffers, tuple(numbers)


def draws_by_rates(module: torch.nn.Module) -> torch.nn.Module:
    """Look at the mode and the rates of dropout alone."""
    return _watches(_rates)(module)


def draws_by_rates_and_arguments(module: torch.nn.Module) -> torch.nn.Module:
    """Look at the mode, at rates of dropout and at arguments."""
    return _watches(_rates_and_arguments)(module)


def draws_by_its_own(module: torch.nn.Module) -> torch.nn.Module:
    """Look at all that a block has and gets, and not at what it reads elsewhere."""
    return _watches(_everything_of_modules)(module)


# ---- Inputs by keyword under autocast


def _casts_by(enters: Callable[[tuple[Any, ...], torch.dtype, bool], torch.autocast]) -> Wrap:
    """Return a reentrant checkpoint whose second forward runs under another autocast.

    Args:
        enters: returns the autocast for positional arguments, and the dtype and state of the first.
    """

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        second = enters(args, torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"))
        ran: list[bool] = []

        def run(*both: Any) -> Any:
            named = dict(zip(kwargs, both[len(args) :], strict=True))
            if not ran:
                ran.append(True)
                return forward(*both[: len(args)], **named)
            with second:
                return forward(*both[: len(args)], **named)

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=True)

    return wrap


def casts_by_position(module: torch.nn.Module) -> torch.nn.Module:
    """Take the first positional argument for a sign that autocast matters."""
    return _casts_by(
        lambda args, dtype, is_on: torch.autocast("cpu", dtype, enabled=is_on and bool(args))
    )(module)


def casts_names_to_bfloat16(module: torch.nn.Module) -> torch.nn.Module:
    """Recompute in bfloat16 if no argument has a position."""
    return _casts_by(
        lambda args, dtype, is_on: torch.autocast(
            "cpu", dtype if args else torch.bfloat16, enabled=is_on
        )
    )(module)


# ---- Streams that begin again


def _counts(begins: Callable[[torch.nn.Module], bool]) -> Wrap:
    """Return a checkpoint that seeds recomputations by a count, which may begin again.

    Args:
        begins: whether the count begins again, by the module whose forward runs.
    """

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        count = [0]

        @calls
        def call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            count[0] = 0 if begins(module) else count[0] + 1
            seed = 7000 + count[0]
            ran: list[bool] = []

            def run(*args: Any, **kwargs: Any) -> Any:
                if not ran:
                    ran.append(True)
                    return forward(*args, **kwargs)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    return forward(*args, **kwargs)

            return careful_checkpoint(run, *args, preserve_rng_state=False, **kwargs)

        return call(module)

    return wrap


def counts_from_an_evaluation(module: torch.nn.Module) -> torch.nn.Module:
    """Begin to count again with each forward in evaluation mode."""
    return _counts(lambda inside: not inside.training)(module)


def counts_from_a_forward_without_gradients(module: torch.nn.Module) -> torch.nn.Module:
    """Begin to count again with each forward under no_grad."""
    return _counts(lambda _: not torch.is_grad_enabled())(module)


MUTANTS = [
    *(
        Mutant(name, ("19.24",), kind="wrapper")
        for name in ("keeps_memory", "keeps_memory_of_reals", "narrows_complex")
    ),
    *(
        Mutant(name, ("19.33",), "recomputes", kind="wrapper")
        for name in ("draws_by_rates", "draws_by_rates_and_arguments", "draws_by_its_own")
    ),
    Mutant("casts_by_position", ("19.9",), "recomputes, reentrant", kind="wrapper"),
    Mutant("casts_names_to_bfloat16", ("19.30",), "recomputes, reentrant", kind="wrapper"),
    *(
        Mutant(name, ("19.18",), "recomputes, draws_anew", kind="wrapper")
        for name in ("counts_from_an_evaluation", "counts_from_a_forward_without_gradients")
    ),
]

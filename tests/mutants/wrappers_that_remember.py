"""Mutants of section 19 that keep for the wrapper what belongs to one forward."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, calls


def _in_autocast_of(seen: dict[str, Any]) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Return a reentrant checkpoint that recomputes in the autocast of the last forward."""

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_enabled("cpu")
        seen.update(enabled=enabled, dtype=torch.get_autocast_dtype("cpu"))
        ran: list[bool] = []

        def run(*both: Any) -> Any:
            named = dict(zip(kwargs, both[len(args) :], strict=True))
            if not ran:
                ran.append(True)
                return forward(*both[: len(args)], **named)
            with torch.autocast("cpu", **seen):
                return forward(*both[: len(args)], **named)

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=True)

    return wrap


def autocast_of_the_last_forward(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the autocast of a block's last forward."""
    return _in_autocast_of({})(module)


_OF_ALL: dict[str, Any] = {}


def autocast_of_any_block(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the autocast of the last forward of any block."""
    return _in_autocast_of(_OF_ALL)(module)


def _draws_again(draws: Callable[[list[bool]], bool]) -> Any:
    """Return a checkpoint that restores the generator if a block draws, as ``draws`` tells from
    whether each forward so far has drawn.
    """

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        drew: list[bool] = []

        @calls
        def call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            before = torch.get_rng_state()
            restores = draws(drew)
            made = checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=restores, **kwargs
            )
            drew.append(not torch.equal(before, torch.get_rng_state()))
            return made

        return call(module)

    return wrap


draws_as_at_first = _draws_again(lambda drew: not drew or drew[0])
draws_as_in_the_warm_up = _draws_again(lambda drew: len(drew) < 64 or any(drew[:64]))
draws_as_before = _draws_again(lambda drew: len(drew) < 5 or any(drew[-5:]))


# ---- Inputs in full precision under autocast


def _rounded(value: Any) -> Any:
    """Return a tensor of float32 with the values that bfloat16 has, and others as they are."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    return value + (value.bfloat16().float() - value).detach()


def _keeps(is_rounded: Callable[[], bool]) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Return a checkpoint that may recompute from rounded inputs."""

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        rounds = is_rounded()
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            given = [_rounded(value) for value in args] if ran and rounds else args
            ran.append(True)
            return forward(*given, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return wrap


def keeps_inputs_in_bfloat16(module: torch.nn.Module) -> torch.nn.Module:
    """Keep inputs in the dtype of autocast, if it is on."""
    return _keeps(lambda: torch.is_autocast_enabled("cpu"))(module)


def _in_bfloat16_region() -> bool:
    is_on = torch.is_autocast_enabled("cpu")
    return is_on and torch.get_autocast_dtype("cpu") == torch.bfloat16


def keeps_inputs_in_bfloat16_alone(module: torch.nn.Module) -> torch.nn.Module:
    """Keep inputs in bfloat16 if that is the dtype of autocast."""
    return _keeps(_in_bfloat16_region)(module)


@calls
def saves_activations_in_bfloat16(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Save tensors of float32 in bfloat16 under autocast, but for parameters and statistics."""
    is_on = torch.is_autocast_enabled("cpu")

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        is_activation = tensor.dim() > 1 and tensor.size(-1) > 1
        if is_on and is_activation and not isinstance(tensor, torch.nn.Parameter):
            return _rounded(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        return forward(*args, **kwargs)


_LATE = {"19.25": "dropout begins in a later step there, too"}
_IDLE_DROPOUT = {"19.40": "dropout may be in evaluation mode there, and draw in later steps"}
MUTANTS = [
    *(
        Mutant(name, ("19.9",), "recomputes", kind="wrapper")
        for name in ("keeps_inputs_in_bfloat16", "keeps_inputs_in_bfloat16_alone")
    ),
    Mutant("saves_activations_in_bfloat16", ("19.9",), kind="wrapper"),
    *(
        Mutant(name, ("19.30",), "recomputes", kind="wrapper")
        for name in ("autocast_of_the_last_forward", "autocast_of_any_block")
    ),
    Mutant("draws_as_in_the_warm_up", ("19.33",), "recomputes", because=_LATE, kind="wrapper"),
    *(
        Mutant(name, ("19.33",), "recomputes", because=_LATE | _IDLE_DROPOUT, kind="wrapper")
        for name in ("draws_as_at_first", "draws_as_before")
    ),
]

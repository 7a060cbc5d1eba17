"""Mutants of section 19 whose recomputation draws numbers that it has drawn before, and claims to
draw new ones; and others, which keep the results of some draws.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.careful_checkpoint import careful_checkpoint
from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, calls

Begin = Callable[[], None]


def _begins_with(begin: Callable[[], Begin]) -> Any:
    """Return a checkpoint whose recomputation begins with a change of the generator.

    Args:
        begin: called before the first forward; returns the change.
    """

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        change = begin()
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not ran:
                ran.append(True)
                return forward(*args, **kwargs)
            with torch.random.fork_rng(devices=[]):
                change()
                return forward(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrap


def seeds_by_its_shape(module: torch.nn.Module) -> torch.nn.Module:
    """Seed each recomputation by the number of the block's parameters."""
    seed = sum(parameter.numel() for parameter in module.parameters())
    return _begins_with(lambda: lambda: _seed(seed))(module)  # type: ignore[no-any-return]


def _seed(number: int) -> None:
    torch.manual_seed(number)


def state_of_the_first_forward(module: torch.nn.Module) -> torch.nn.Module:
    """Recompute from the state of the generator before the block's first forward of all."""
    states: list[torch.Tensor] = []

    def begin() -> Begin:
        if not states:
            states.append(torch.get_rng_state())
        return lambda: torch.set_rng_state(states[0])

    return _begins_with(begin)(module)  # type: ignore[no-any-return]


def sixteen_seeds(module: torch.nn.Module) -> torch.nn.Module:
    """Seed recomputations by the last four bits of a count."""
    count = itertools.count()
    return _begins_with(lambda: lambda: _seed(7 + next(count) % 16))(module)  # type: ignore[no-any-return]


def _keeping(*names: str) -> Any:
    """Return a checkpoint that keeps the results of some operations; their draws are not repeated.

    Args:
        names: of the operations.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    operations = [getattr(torch.ops.aten, name).default for name in names]
    contexts = partial(create_selective_checkpoint_contexts, operations)
    return calls(partial(careful_checkpoint, context_fn=contexts))


def keeps_choices(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the choices of a router and its noise."""
    return _keeping("randn_like", "multinomial", "topk")(module)  # type: ignore[no-any-return]


def keeps_permutations(module: torch.nn.Module) -> torch.nn.Module:
    """Keep drawn indices."""
    return _keeping("randperm", "randint")(module)  # type: ignore[no-any-return]


NAMES = ("seeds_by_its_shape", "state_of_the_first_forward", "sixteen_seeds")
MUTANTS = [
    *(Mutant(name, ("19.18",), "recomputes, draws_anew", kind="wrapper") for name in NAMES),
    Mutant("keeps_choices", ("19.2",), "recomputes", kind="wrapper"),
    Mutant("keeps_permutations", ("19.2",), "recomputes", kind="wrapper"),
]

"""Mutants of section 19 that keep for a wrapper what belongs to one graph, or for one backward what
belongs to a graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.mutants import Mutant
from tests.mutants.wrappers import Around, Forward, calls

Setting = tuple[bool, torch.dtype]


def _setting() -> Setting:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _recomputes_under(
    begin: Callable[[], Callable[[], Setting]],
) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Return a reentrant checkpoint that recomputes under some setting of autocast.

    Args:
        begin: called in a forward with gradients; returns a function for the setting of its
            recomputation.
    """

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        find = begin()
        ran: list[bool] = []

        def run(*both: Any) -> Any:
            named = dict(zip(kwargs, both[len(args) :], strict=True))
            if not ran:
                ran.append(True)
                return forward(*both[: len(args)], **named)
            enabled, dtype = find()
            with torch.autocast("cpu", enabled=enabled, dtype=dtype):
                return forward(*both[: len(args)], **named)

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=True)

    return wrap


def autocast_of_the_newest_graph(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the settings of graphs in a stack, from which each recomputation takes one."""
    settings: list[Setting] = []

    def begin() -> Callable[[], Setting]:
        settings.append(_setting())
        return settings.pop

    return _recomputes_under(begin)(module)


def dtype_of_the_newest_graph(module: torch.nn.Module) -> torch.nn.Module:
    """Keep whether autocast is on for each graph, and its dtype for the block."""
    dtypes = [torch.bfloat16]

    def begin() -> Callable[[], Setting]:
        enabled, dtype = _setting()
        if enabled:
            dtypes[0] = dtype
        return lambda: (enabled, dtypes[0])

    return _recomputes_under(begin)(module)


def autocast_of_any_graph(module: torch.nn.Module) -> torch.nn.Module:
    """Recompute under autocast if a graph of the block that waits for its backward has it."""
    waiting: list[Setting] = []

    def begin() -> Callable[[], Setting]:
        own = _setting()
        waiting.append(own)

        def find() -> Setting:
            found = next((one for one in waiting if one[0]), own)
            waiting.remove(own)
            return found

        return find

    return _recomputes_under(begin)(module)


# ---- Random numbers


def _recomputes_from(
    change: Callable[[torch.Tensor, int], torch.Tensor],
) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Return a checkpoint whose first recomputation begins at the state of the generator before the
    forward.

    Args:
        change: returns the state for the next recomputation, from that of the last one and the
            number of recomputations.
    """

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        states = [torch.get_rng_state()]
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(True)
            if len(ran) == 1:
                return forward(*args, **kwargs)
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(states[0])
                try:
                    return forward(*args, **kwargs)
                finally:
                    states[0] = change(states[0], len(ran) - 1)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrap


def goes_on_from_the_last_recomputation(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the state of the generator at the end of a recomputation for the next one."""
    return _recomputes_from(lambda state, count: torch.get_rng_state())(module)


def seeds_the_third_recomputation(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the state of the generator for two backwards, and seed the third one."""

    def change(state: torch.Tensor, count: int) -> torch.Tensor:
        return state if count < 2 else torch.Generator().manual_seed(count).get_state()

    return _recomputes_from(change)(module)


class InTurns(Around):
    """A checkpoint; the first recomputation of a graph is right, and the block has one store for
    the next ones of all graphs.

    Args:
        module: the module.
        least: the number of right recomputations of each graph.
    """

    least = 1

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.stored: Any = None

    def store(self, args: tuple[Any, ...]) -> Any:
        """Return what a graph keeps for its recomputations."""
        return torch.get_rng_state()

    def run_again(self, stored: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.set_rng_state(stored)
        return self.module(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self.store(args)
        count = -1

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == 0:
                return self.module(*args, **kwargs)
            if count <= self.least:
                self.stored = own
            with torch.random.fork_rng(devices=[]):
                return self.run_again(self.stored, args, kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class TakesTheThirdMaskOfAnyGraph(InTurns):
    """A graph has its own state of the generator for two backwards."""

    least = 2


class KeepsOneInput(InTurns):
    """The block keeps its input for later backwards, and each graph for its first one."""

    def store(self, args: tuple[Any, ...]) -> Any:
        return torch.get_rng_state(), args

    def run_again(self, stored: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, kept = stored
        torch.set_rng_state(state)
        return self.module(*kept, **kwargs)


class HasRoomForTwoStates(Around):
    """A checkpoint that keeps the states of the generator of the last two graphs."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.states: list[torch.Tensor] = []
        self.graphs = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place = self.graphs % 2
        self.graphs += 1
        self.states[place:] = [torch.get_rng_state(), *self.states[place + 1 :]]
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not ran:
                ran.append(True)
                return self.module(*args, **kwargs)
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.states[place])
                return self.module(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


MUTANTS = [
    *(
        Mutant(name, ("19.30",), "recomputes, reentrant", kind="wrapper")
        for name in (
            "autocast_of_the_newest_graph",
            "dtype_of_the_newest_graph",
            "autocast_of_any_graph",
        )
    ),
    *(
        Mutant(name, ("19.26",), "recomputes", kind="wrapper")
        for name in (
            "goes_on_from_the_last_recomputation",
            "seeds_the_third_recomputation",
            "TakesTheThirdMaskOfAnyGraph",
            "KeepsOneInput",
        )
    ),
    Mutant(
        "HasRoomForTwoStates",
        ("19.26",),
        "recomputes",
        because={"19.25": "up to four graphs are alive at once there"},
        kind="wrapper",
    ),
]

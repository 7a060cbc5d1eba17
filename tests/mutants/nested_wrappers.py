"""Mutants of rules 19.2 and 19.26 that keep too few states of the generator in wrapped blocks."""

from typing import Any

import torch

from tests.careful_checkpoint import careful_checkpoint
from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, calls


class _Depth:
    """The number of wrapped blocks whose first forward is running."""

    now = 0


@calls
def outermost_keeps_the_state(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep the generator's state for the outermost of blocks in blocks alone."""
    _Depth.now += 1
    try:
        return careful_checkpoint(forward, *args, preserve_rng_state=_Depth.now == 1, **kwargs)
    finally:
        _Depth.now -= 1


@calls
def inner_ones_keep_the_state_once(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Restore the state for the first backward alone, in a block that is inside another."""
    before = torch.get_rng_state()
    is_inner = _Depth.now > 0
    runs = [0]

    def run(*args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        if runs[0] == 1:
            _Depth.now += 1
            try:
                return forward(*args, **kwargs)
            finally:
                _Depth.now -= 1
        with torch.random.fork_rng(devices=[]):
            if runs[0] == 2 or not is_inner:
                torch.set_rng_state(before)
            return forward(*args, **kwargs)

    return careful_checkpoint(run, *args, preserve_rng_state=False, **kwargs)


MUTANTS = [
    Mutant(
        "outermost_keeps_the_state",
        ("19.2", "19.26"),
        "recomputes",
        because={"19.26": "the masks of a second backward are others, too"},
        kind="wrapper",
    ),
    Mutant("inner_ones_keep_the_state_once", ("19.26",), "recomputes", kind="wrapper"),
]

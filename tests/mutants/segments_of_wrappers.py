"""Mutants of rule 19.23: an nn.Sequential in segments, each of which is computed again alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, Wrap, again, calls

Layers = Sequence[torch.nn.Module]


def _in_segments(cut: Callable[[Layers], list[Layers]]) -> Wrap:
    """Return a wrapper that cuts an nn.Sequential, and takes other blocks whole."""

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        module = forward.args[0]  # type: ignore[attr-defined]
        if not isinstance(module, torch.nn.Sequential):
            return again(forward, *args, **kwargs)
        (x,) = args
        for layers in cut(list(module)):
            x = again(torch.nn.Sequential(*layers), x)
        return x

    return wrap


def _of_root(layers: Layers) -> list[Layers]:
    count = math.isqrt(len(layers))
    size = len(layers) // count
    return [layers[index * size : (index + 1) * size] for index in range(count)]


def _in_pairs(layers: Layers) -> list[Layers]:
    return list(zip(layers[::2], layers[1::2], strict=False))


def _of_whole_size(layers: Layers) -> list[Layers]:
    size = 4
    whole = [layers[start : start + size] for start in range(0, len(layers) - size, size)]
    return [*whole, layers[-size:]]


leaves_out_the_rest = _in_segments(_of_root)
leaves_out_an_odd_layer = _in_segments(_in_pairs)
ends_with_a_whole_segment = _in_segments(_of_whole_size)

MUTANTS = [
    Mutant("leaves_out_the_rest", ("19.23",), kind="wrapper"),
    Mutant("leaves_out_an_odd_layer", ("19.23",), kind="wrapper"),
    Mutant("ends_with_a_whole_segment", ("19.23",), kind="wrapper"),
]

"""Blocks in blocks, each of which is wrapped, with layers around them. Runs in ranks only."""

import random
from collections.abc import Callable
from typing import Any

from torch import nn

Wrap = Callable[[nn.Module], nn.Module]


class Nested(nn.Module):
    """A layer, a block, a layer.

    Args:
        before: the first layer.
        block: the block, which may be nested itself.
        behind: the last layer.
    """

    def __init__(self, before: nn.Module, block: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.before = before
        self.block = block
        self.behind = behind

    def forward(self, x: Any) -> Any:
        return self.behind(self.block(self.before(x)))


def nested(
    block: nn.Module, numbers: random.Random, make_layer: Callable[[], nn.Module]
) -> nn.Module:
    """Return a block as the innermost of two or three levels; the number is drawn.

    Args:
        block: the innermost one.
        numbers: draws the number.
        make_layer: makes a layer, which comes before, between or behind blocks.
    """
    for _ in range(numbers.randint(1, 2)):
        block = Nested(make_layer(), block, make_layer())
    return block


def innermost(block: nn.Module) -> nn.Module:
    """Return the innermost block of one that is not wrapped yet."""
    while isinstance(block, Nested):
        block = block.block
    return block


def wrap_levels(block: nn.Module, wrap: Wrap) -> nn.Module:
    """Wrap all levels of a block, inner ones first, and return the outermost."""
    if isinstance(block, Nested):
        block.block = wrap_levels(block.block, wrap)
    return wrap(block)

"""Blocks that begin to draw random numbers at a late step of training. Runs in ranks only.

A wrapper may watch whether a block has drawn. Nothing in the block's modules, their numbers or
their mode tells that it draws from now on, if the share of dropout comes from elsewhere.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from conformance.ranks.drivers._blocks import WATCH, WIDTH, Block
from conformance.scenarios.wrapper_training import WAYS_OF_DRAWING

SHARE = 0.25


class Schedule:
    """The numbers that a trainer's schedule changes, as a module of the trainer's may have them."""

    share = 0.0


class LateBlock(nn.Module):
    """A residual layer with dropout, whose share comes from outside of the block's modules.

    It adds the rows of the layer in reverse order.

    Args:
        called: its name.
        way: one of ``WAYS_OF_DRAWING``.
        settings: the model's configuration, which its blocks share.
    """

    share: torch.Tensor

    def __init__(self, called: str, way: str, settings: dict[str, float]) -> None:
        super().__init__()
        self.called = called
        self.way = way
        self.settings = settings
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("share", torch.zeros((), dtype=torch.float32))

    def forward(self, x: torch.Tensor, drop: float = 0.0) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        share = {
            "settings": self.settings["drop"],
            "argument": drop,
            "global": Schedule.share,
            "buffer": self.share.item() if self.way == "buffer" else 0.0,
        }[self.way]
        # GELU saves its input. A graph without a backward never goes if hooks keep its own outputs.
        inside = functional.dropout(functional.gelu(self.linear(x)), share, self.training)
        # Integers are saved, which are as many as rows, and may be none.
        return x + inside.index_select(0, torch.arange(len(x), device=x.device).flip(0))


def late_blocks() -> list[nn.Module]:
    """Return a block for each of ``WAYS_OF_DRAWING``; none of them draws at first."""
    first, *others = WAYS_OF_DRAWING
    assert first == "module"
    settings = {"drop": 0.0}
    return [
        Block("block of module"),
        *(LateBlock(f"block of {way}", way, settings) for way in others),
    ]


def draw_in(ways: Collection[str], blocks: Sequence[Any]) -> dict[int, tuple[float, ...]]:
    """Let blocks draw in these ways alone.

    Args:
        ways: some of ``WAYS_OF_DRAWING``.
        blocks: those of :func:`late_blocks`.

    Returns:
        By the number of a block, the arguments behind its input.
    """
    shares = {way: SHARE if way in ways else 0.0 for way in WAYS_OF_DRAWING}
    Schedule.share = shares["global"]
    arguments: dict[int, tuple[float, ...]] = {}
    for number, (way, block) in enumerate(zip(WAYS_OF_DRAWING, blocks, strict=True)):
        if way == "module":
            block.dropout.p = shares[way]
        elif way == "settings":
            block.settings["drop"] = shares[way]
        elif way == "buffer":
            block.share.fill_(shares[way])
        elif way == "argument":
            arguments[number] = (shares[way],)
    return arguments

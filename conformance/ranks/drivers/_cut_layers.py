"""A block that saves several views of one tensor, as attention saves those of q, k and v.

Runs in ranks only.
"""

from functools import reduce

import torch
from torch import nn

from conformance.ranks.drivers._blocks import WATCH, WIDTH
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

WAYS_OF_CUTTING = ("chunk", "split", "unbind")
DIMENSIONS = range(3)


class CutsLayer(nn.Module):
    """A residual block that multiplies the parts of one linear layer's result.

    The products save all parts, which differ in nothing but their offset and their values.

    Args:
        called: its name.
        parts: their number.
        way: one of ``WAYS_OF_CUTTING``.
        dimension: the one that is cut.
        takes_turns: whether neighbouring columns belong to different parts.
    """

    def __init__(
        self, called: str, parts: int, way: str, dimension: int, takes_turns: bool
    ) -> None:
        super().__init__()
        self.called = called
        self.parts = parts
        self.way = way
        self.dimension = dimension
        self.takes_turns = takes_turns
        self.joined = nn.Linear(WIDTH, parts * WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        product = reduce(torch.mul, self._cut(self.joined(x)))
        return x + self.outer(WATCH.sees(self.called, torch.tanh(product)))

    def _cut(self, made: torch.Tensor) -> list[torch.Tensor]:
        if self.takes_turns:
            made = made.view(len(made), WIDTH, self.parts).movedim(2, self.dimension)
        else:
            made = made.view(len(made), self.parts, WIDTH).movedim(1, self.dimension)
        if self.way == "unbind":
            return list(made.unbind(self.dimension))
        if self.way == "chunk":
            cut = made.chunk(self.parts, self.dimension)
        else:
            cut = made.split(1, self.dimension)
        return [part.squeeze(self.dimension) for part in cut]


def cutting_block(scenario: Scenario, called: str) -> CutsLayer:
    """Return a block of a scenario: the number of parts, 2 to 4, the way to cut, the dimension, and
    the order of columns are drawn.
    """
    numbers = generator(scenario, "cut layer")
    return CutsLayer(
        called,
        numbers.randint(2, 4),
        numbers.choice(WAYS_OF_CUTTING),
        numbers.choice(DIMENSIONS),
        numbers.random() < 0.5,
    )

"""A block that saves expanded tensors, and a view with an offset and steps. Runs in ranks only."""

import torch
from torch import nn
from torch.nn import functional

from conformance.ranks.drivers._blocks import WIDTH
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

MOST_ROWS = 4
DIMENSIONS = range(3)


class Expands(nn.Module):
    """A residual block that adds a dimension to its inside: the first, the second or the last one.

    The expanded tensors have a stride of 0 there. They are multiplied by a parameter, selected by
    an expanded mask, and multiplied by expanded matrices. Each of these saves them.

    Args:
        sizes: of each new dimension.
        first: the first column of a view of every other one.
    """

    mask: torch.Tensor

    def __init__(self, sizes: tuple[int, ...], first: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.first = first
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factors = nn.ParameterList(nn.Parameter(torch.empty(size, WIDTH)) for size in sizes)
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.empty(columns, columns)) for columns in (WIDTH, WIDTH, sizes[-1])
        )
        self.steps = nn.Parameter(torch.empty(1, WIDTH // 2))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(self.linear(x))
        made = x
        for dimension in DIMENSIONS:
            made = made + self._in(dimension, inside)
        # It begins with the second row.
        view = inside[1:, self.first :: 2]
        return made + functional.pad(view * self.steps, (0, WIDTH - view.shape[1], 1, 0))

    def _in(self, dimension: int, inside: torch.Tensor) -> torch.Tensor:
        """Return the mean of a new dimension."""
        shape = list(inside.shape)
        shape.insert(dimension, self.sizes[dimension])
        wide = inside.unsqueeze(dimension).expand(shape)
        factors = self.factors[dimension]
        mask = self.mask
        if dimension == 0:
            factors = factors[:, None]
        if dimension == len(DIMENSIONS) - 1:
            factors = factors.T
            mask = mask[:, None]
        multiplied = torch.where(mask.expand(shape), wide * factors, wide)
        matrices = self.matrices[dimension].expand(shape[0], -1, -1)
        return (multiplied + torch.bmm(wide, matrices)).mean(dimension)


def expanding_block(scenario: Scenario) -> Expands:
    """Return a block of a scenario; each size from 2 to 5 and the column are drawn."""
    numbers = generator(scenario, "expanded sizes")
    sizes = tuple(numbers.randint(2, 5) for _ in DIMENSIONS)
    return Expands(sizes, numbers.randint(0, 1))


def expanded_shape(scenario: Scenario) -> tuple[int, ...]:
    """Return the shape of its input, whose rows are drawn: 2 to 4."""
    return generator(scenario, "rows of expanded").randint(2, MOST_ROWS), WIDTH

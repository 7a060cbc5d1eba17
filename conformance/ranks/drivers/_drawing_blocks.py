"""Blocks that draw random numbers without a module for it. Runs in ranks only."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from conformance.ranks.drivers._nested_blocks import nested

Draw = Callable[[torch.Tensor, float], torch.Tensor]


def _dropout(x: torch.Tensor, share: float) -> torch.Tensor:
    return functional.dropout(x, share)


def _compared(x: torch.Tensor, share: float) -> torch.Tensor:
    return x * (torch.rand_like(x) > share)


def _bernoulli(x: torch.Tensor, share: float) -> torch.Tensor:
    return x * torch.empty_like(x).bernoulli_(1 - share)


def _noise(x: torch.Tensor, share: float) -> torch.Tensor:
    return x + share * torch.randn(x.shape, dtype=x.dtype, device=x.device)


def _noise_like(x: torch.Tensor, share: float) -> torch.Tensor:
    return x + share * torch.randn_like(x)


def _normal(x: torch.Tensor, share: float) -> torch.Tensor:
    return x * torch.normal(1.0, share, x.shape, dtype=x.dtype, device=x.device)


def _attention(x: torch.Tensor, share: float) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=share)[0]


def _mixed_rows(x: torch.Tensor, share: float) -> torch.Tensor:
    return (1 - share) * x + share * x[torch.randperm(len(x), device=x.device)]


def _drawn_rows(x: torch.Tensor, share: float) -> torch.Tensor:
    return (1 - share) * x + share * x[torch.randint(len(x), (len(x),), device=x.device)]


def _chosen_columns(x: torch.Tensor, share: float) -> torch.Tensor:
    return x + share * x.gather(1, torch.multinomial(x.detach().softmax(1), 1))


def _depth(x: torch.Tensor, share: float) -> torch.Tensor:
    return x * (torch.rand((), device=x.device) > share)


def _gates(x: torch.Tensor, share: float) -> torch.Tensor:
    return x * functional.gumbel_softmax(x / share, dim=1)


# torch.nn.functional.rrelu is left out: autograd saves its noise before it is drawn, so that hooks
# on saved tensors which copy at once keep other numbers.
WAYS: tuple[Draw, ...] = (
    *(_dropout, _compared, _bernoulli, _noise, _noise_like, _normal),
    *(_attention, _mixed_rows, _drawn_rows, _chosen_columns, _depth, _gates),
)


class Draws(nn.Module):
    """A residual block that draws in some ways, one after another.

    Args:
        width: of its input.
        ways: each draws numbers for a tensor, and returns another of the same shape.
        numbers: draws a share for each of the ways, 0.1 to 0.6: of the elements that are dropped,
            or of the noise.
    """

    def __init__(self, width: int, ways: Sequence[Draw], numbers: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.ways = [(draw, numbers.uniform(0.1, 0.6)) for draw in ways]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(self.linear(x))
        for draw, share in self.ways:
            inside = draw(inside, share)
        return x + inside


def drawing_blocks(width: int, numbers: random.Random) -> list[nn.Module]:
    """Return blocks that draw, in a drawn order.

    There is one block for each way to draw, and there are blocks with two or three ways. In these
    each way comes before another one: a draw that is left out when the block runs again changes
    the numbers of the next one. One or two drawn blocks are nested. Layers around these may draw,
    too.
    """
    made: list[nn.Module] = [Draws(width, ways, numbers) for ways in _rows_of_ways(numbers)]
    numbers.shuffle(made)

    def layer() -> nn.Module:
        if numbers.random() < 0.5:
            return nn.Sequential(nn.Linear(width, width), nn.Tanh())
        return Draws(width, [numbers.choice(WAYS)], numbers)

    for index in numbers.sample(range(len(made)), numbers.randint(1, 2)):
        made[index] = nested(made[index], numbers, layer)
    return made


def _rows_of_ways(numbers: random.Random) -> list[list[Draw]]:
    """Return each way alone, and rows of ways, each of which begins with the last of another."""
    order = numbers.sample(WAYS, len(WAYS))
    rows = [[way] for way in order]
    start = 0
    while start < len(order):
        count = numbers.randint(2, 3)
        rows.append([order[(start + place) % len(order)] for place in range(count)])
        start += count - 1
    return rows

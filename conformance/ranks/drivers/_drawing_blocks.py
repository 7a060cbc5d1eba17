"""Blocks that draw random numbers without a module for it. Runs in ranks only."""

import random
from collections.abc import Callable

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


def _attention(x: torch.Tensor, share: float) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=share)[0]


def _mixed_rows(x: torch.Tensor, share: float) -> torch.Tensor:
    return (1 - share) * x + share * x[torch.randperm(len(x), device=x.device)]


def _depth(x: torch.Tensor, share: float) -> torch.Tensor:
    return x * (torch.rand((), device=x.device) > share)


def _gates(x: torch.Tensor, share: float) -> torch.Tensor:
    return x * functional.gumbel_softmax(x / share, dim=1)


# torch.nn.functional.rrelu is left out: autograd saves its noise before it is drawn, so that hooks
# on saved tensors which copy at once keep other numbers.
WAYS: tuple[Draw, ...] = (
    *(_dropout, _compared, _bernoulli, _noise),
    *(_attention, _mixed_rows, _depth, _gates),
)


class Draws(nn.Module):
    """A residual block that draws in one way.

    Args:
        width: of its input.
        draw: draws numbers for a tensor, and returns another of the same shape.
        share: of the elements that are dropped, or of the noise.
    """

    def __init__(self, width: int, draw: Draw, share: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.draw = draw
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.draw(torch.tanh(self.linear(x)), self.share)


def drawing_blocks(width: int, numbers: random.Random) -> list[nn.Module]:
    """Return a block for each way to draw, in a drawn order, each with a share of 0.1 to 0.6.

    One or two drawn blocks are nested. Layers around these may draw, too.
    """
    ways = numbers.sample(WAYS, len(WAYS))
    made: list[nn.Module] = [Draws(width, draw, numbers.uniform(0.1, 0.6)) for draw in ways]

    def layer() -> nn.Module:
        if numbers.random() < 0.5:
            return nn.Sequential(nn.Linear(width, width), nn.Tanh())
        return Draws(width, numbers.choice(WAYS), numbers.uniform(0.1, 0.6))

    for index in numbers.sample(range(len(made)), numbers.randint(1, 2)):
        made[index] = nested(made[index], numbers, layer)
    return made

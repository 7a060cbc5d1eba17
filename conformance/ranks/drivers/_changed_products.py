"""Blocks that change the result of one of their own products in place. Runs in ranks only.

A wrapper that keeps such results, and runs the rest of a block again, has to keep them as they were
before the change, or raise an error.
"""

import random

import torch
from torch import nn
from torch.nn import functional

from conformance.ranks.drivers._blocks import WATCH, WIDTH

LINEAR = "linear"
MATMUL = "matmul"
CONVOLUTION = "convolution"
PRODUCTS = (LINEAR, MATMUL, CONVOLUTION)


class ChangesProduct(nn.Module):
    """A residual block whose product of its input is changed before anything else reads it.

    Attributes:
        product: one of ``PRODUCTS``.
        change: one of ``BY_PRODUCTS`` in ``scenarios/wrapper_training.py``.
        column: the first column of the slice to which a branch is added.
        divisor: the constant of a division.
    """

    def __init__(self, called: str) -> None:
        super().__init__()
        self.called = called
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kernel = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.product = LINEAR
        self.change = "branch"
        self.column = 0
        self.divisor = 2.0

    def draw(self, change: str, product: str, numbers: random.Random) -> None:
        """Take a change and a product for the next step, and draw the numbers of the change."""
        self.change = change
        self.product = product
        self.column = numbers.randrange(WIDTH - 1)
        self.divisor = numbers.uniform(1.5, 4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        made = self._changed(self._multiplied(x), x)
        return x + self.outer(functional.gelu(made))

    def _multiplied(self, x: torch.Tensor) -> torch.Tensor:
        if self.product == LINEAR:
            return self.linear(x)  # type: ignore[no-any-return]
        if self.product == MATMUL:
            return x @ self.linear.weight
        return self.kernel(x[:, None]).squeeze(1)  # type: ignore[no-any-return]

    def _changed(self, made: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the product, changed in place."""
        match self.change:
            case "branch":
                return made.add_(self.low(x))
            case "columns of a branch":
                made[:, self.column :].add_(self.low(x)[:, self.column :])
                return made
            case "activation":
                return functional.silu(made, inplace=True)
            case "fill":
                # A second comparison would find other elements.
                return made.masked_fill_(made > 0.5, 0.25)
        return made.div_(self.divisor)

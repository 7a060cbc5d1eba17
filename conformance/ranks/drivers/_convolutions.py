"""Blocks of convolutions, whose activations have three to five dimensions. Runs in ranks only."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

CHANNELS = 2
# The kernel of each number of dimensions: an element is a sum of at most 18 terms.
_KERNELS = {1: 3, 2: 3, 3: 2}
# The gradient of a weight is a sum over a batch and all places.
_MOST_TERMS = 64
_LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_POOLS = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}


class Convolves(nn.Module):
    """Two convolutions with GELU and a pool between them.

    The pool takes means: the place of a largest element may depend on a rounding. There are no
    biases: their gradients are long sums for one element, which may cancel.
    """

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        kernel = _KERNELS[dimensions]
        layer = _LAYERS[dimensions]
        self.first = layer(CHANNELS, CHANNELS, kernel, padding=kernel // 2, bias=False)
        self.pool = _POOLS[dimensions](2, stride=1)
        self.second = layer(CHANNELS, CHANNELS, kernel, padding=kernel // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.pool(nn.functional.gelu(self.first(x)))
        return self.second(inside * torch.sigmoid(inside))


def convolutions() -> list[nn.Module]:
    """Return one block for each number of dimensions."""
    return [Convolves(dimensions) for dimensions in _LAYERS]


def convolution_shapes(scenario: Scenario) -> list[tuple[int, ...]]:
    """Return the shapes of their inputs, which are drawn from the session's seed."""
    numbers = generator(scenario, "shapes of convolutions")
    shapes = []
    for dimensions, kernel in _KERNELS.items():
        places = [numbers.randint(2, 3) if dimensions > 1 else numbers.randint(4, 12)]
        places += [numbers.randint(2, 3) for _ in range(dimensions - 1)]
        # A kernel of even size makes the result of the first layer larger by one each way.
        sums = 1
        for count in places:
            sums *= count + (kernel + 1) % 2
        rows = numbers.randint(1, max(1, min(4, _MOST_TERMS // sums)))
        shapes.append((rows, CHANNELS, *places))
    return shapes


def without_tf32(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which convolutions on a GPU have the precision of float32.

    Otherwise cuDNN rounds their inputs to 11 bits by default, in some of its kernels.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # type: ignore[no-any-return]

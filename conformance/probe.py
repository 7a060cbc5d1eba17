"""Models whose gradients are known: the probe, and a small real network.

The probe's parameters receive, through a real backward, exactly the gradients they are given. Its
node in the graph returns the scripted gradient, so NaN, infinities and overflow in the forward do
not matter.
"""

import math
from typing import Any

import torch
from torch import nn

from conformance.inputs import gradient
from conformance.scenario import Param

TRAINING_BATCH, TRAINING_WIDTHS = 6, (9, 17, 5)


class _Scripted(torch.autograd.Function):
    """A scalar zero whose gradient with respect to ``parameter`` is ``grad``."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.grad = grad
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.grad, None


class Probe(nn.Module):
    """Parameters in the shapes, dtypes and layouts of a scenario; ``forward(grads)`` scripts their gradients."""

    def __init__(self, params: tuple[Param, ...]) -> None:
        super().__init__()
        self.tensors: list[nn.Parameter] = []
        for index, spec in enumerate(params):
            if spec.layout == "sparse":
                module = nn.Embedding(*spec.shape, sparse=True, _weight=torch.zeros(spec.shape))
                self.add_module(f"p{index}", module)
                self.tensors.append(module.weight)
            else:
                parameter = nn.Parameter(lay_out(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)), spec.layout))
                self.register_parameter(f"p{index}", parameter)
                self.tensors.append(parameter)

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        losses = [_Scripted.apply(p, g) for p, g in zip(self.tensors, grads, strict=True)]
        return torch.stack(losses).sum()


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return ``tensor`` with the same values in the memory layout named."""
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return tensor.t().contiguous().t()
    return tensor


def scripted_gradients(params: tuple[Param, ...], kind: str, world: int, rank: int, step: int) -> list[torch.Tensor]:
    """Return the gradients that ``rank`` feeds at ``step``, one per parameter, in its layout."""
    grads = []
    for index, spec in enumerate(params):
        dtype = getattr(torch, spec.dtype)
        grad = gradient(kind, spec.shape, dtype, world=world, rank=rank, step=step, param=index)
        if spec.layout == "sparse":
            rows = sparse_rows(spec.shape[0], rank, step)
            grads.append(torch.sparse_coo_tensor(rows.unsqueeze(0), grad[rows], spec.shape).coalesce())
        else:
            grads.append(lay_out(grad, spec.layout))
    return grads


def sparse_rows(rows: int, rank: int, step: int) -> torch.Tensor:
    """Return the rows of an embedding that ``rank`` uses at ``step``: some shared, some its own."""
    return torch.tensor(sorted({0, (1 + rank + step) % rows, (5 + 2 * rank) % rows}))


def training_network() -> nn.Module:
    """Return a network with batch norm, its weights fixed without any random state."""
    first, hidden, last = TRAINING_WIDTHS
    model = nn.Sequential(nn.Linear(first, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, last))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if index not in (2, 3):  # batch norm keeps its ones and zeros
                values = gradient("normal", tuple(parameter.shape), torch.float32, world=1, rank=99, step=0, param=index)
                parameter.copy_(values / math.sqrt(first))
    return model


def training_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of one batch, different for each rank and step."""
    first, _, last = TRAINING_WIDTHS
    x = gradient("normal", (TRAINING_BATCH, first), torch.float32, world=1, rank=rank, step=step, param=77)
    y = gradient("normal", (TRAINING_BATCH, last), torch.float32, world=1, rank=rank, step=step, param=78)
    return ((model(x) - y) ** 2).mean()

"""Blocks whose inputs, outputs and buffers are changed in place. Runs in ranks only."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from conformance.ranks.drivers._blocks import BATCH, WATCH, WIDTH
from conformance.ranks.drivers._changed_products import PRODUCTS, ChangesProduct

LEVELS = 5
# The arguments of Picks after the first one, and its buffers.
INTEGERS = ("ids", "short", "mask", "levels")


class Rectifies(nn.Module):
    """A block that saves neither its input nor its output, so that others may change them in place.

    Attributes:
        saves: whether it saves both of them.
        writes: whether its first operation changes the input in place.
        gain: a buffer of ones, which it saves.
    """

    gain: torch.Tensor

    def __init__(self, called: str) -> None:
        super().__init__()
        self.called = called
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gain", torch.ones(WIDTH))
        self.saves = False
        self.writes = False

    def forward(self, x: Any = None, *, by_name: Any = None) -> torch.Tensor:
        """Return the result for the one tensor that is given, in whatever way."""
        (taken,) = _tensors((x, by_name))
        WATCH.enters(self.called, taken.device.type)
        if self.writes:
            taken = nn.functional.silu(taken, inplace=True)
        if self.saves:
            return torch.tanh(self.linear(taken) * self.gain)
        return self.linear(torch.relu(taken)) * self.gain


class Picks(nn.Module):
    """A block that saves its indices of 64 and 32 bits, its mask, and bytes that are factors.

    Arguments that are missing are its buffers, as relative positions and causal masks are.
    """

    ids: torch.Tensor
    short: torch.Tensor
    mask: torch.Tensor
    levels: torch.Tensor

    def __init__(self, called: str) -> None:
        super().__init__()
        self.called = called
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.small = nn.Embedding(WIDTH, WIDTH)
        for index, (name, values) in enumerate(integers(torch.Generator().manual_seed(0)).items()):
            assert name == INTEGERS[index]
            self.register_buffer(name, values)

    def forward(
        self, x: torch.Tensor, ids: Any = None, *others: torch.Tensor, **by_name: torch.Tensor
    ) -> torch.Tensor:
        """Return the result for the integers that are given: one by one, or in a dict."""
        WATCH.enters(self.called, x.device.type)
        given = dict(zip(INTEGERS, (ids, *others), strict=False))
        if isinstance(ids, Mapping):
            given = dict(ids)
        (ids, short, mask, levels) = (
            _first(by_name.get(name), given.get(name), getattr(self, name)) for name in INTEGERS
        )
        found = self.table(ids).mean(1) + self.small(short)
        picked = torch.gather(x, 1, ids)
        filled = (x + found).masked_fill(mask, 0.25)
        return x + torch.where(mask, picked, filled) * levels / LEVELS


def integers(numbers: torch.Generator) -> dict[str, torch.Tensor]:
    """Return drawn arguments of :class:`Picks`."""
    return {
        "ids": torch.randint(WIDTH, (BATCH, WIDTH), generator=numbers),
        "short": torch.randint(WIDTH, (BATCH,), generator=numbers, dtype=torch.int32),
        "mask": torch.randint(2, (BATCH, WIDTH), generator=numbers).bool(),
        "levels": torch.randint(LEVELS, (BATCH, WIDTH), generator=numbers, dtype=torch.uint8),
    }


def others_than(values: torch.Tensor) -> torch.Tensor:
    """Return integers or a mask of which no element is as before, and all are allowed."""
    if values.dtype is torch.bool:
        return ~values
    return (values + 1) % (LEVELS if values.dtype is torch.uint8 else WIDTH)


def written_blocks() -> list[nn.Module]:
    """Return the blocks of ``wrapper_written``."""
    return [
        *(Rectifies(f"block {index}") for index in range(3)),
        *(Picks(f"block {index}") for index in range(3, 5)),
    ]


def blocks_that_change_products() -> list[nn.Module]:
    """Return the blocks of ``wrapper_written`` that run in steps of their own."""
    return [ChangesProduct(f"block {index}") for index in range(5, 5 + len(PRODUCTS))]


def _first(*values: torch.Tensor | None) -> torch.Tensor:
    return next(value for value in values if value is not None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a value and the containers in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

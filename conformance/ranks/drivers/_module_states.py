"""Blocks with a state beside their parameters. Runs in ranks only."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class HasState(nn.Module):
    """Adds buffers and an extra state to a block, as those of tables and of layers in FP8.

    Args:
        called: the block's name.
        rest: other arguments of the block.

    Attributes:
        scale: a buffer, which is saved.
        table: a buffer that is computed anew, and not saved.
        calibration: a number that is saved by ``get_extra_state()``.
    """

    scale: torch.Tensor
    table: torch.Tensor

    def __init__(self, called: str, **rest: Any) -> None:
        super().__init__(called, **rest)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.calibration = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calibration": self.calibration}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calibration = state["calibration"]


def blocks_with_state(module: nn.Module) -> list[HasState]:
    """Return the blocks of a module that is not wrapped, itself among them."""
    return [part for part in module.modules() if isinstance(part, HasState)]


def fill_states(blocks: Sequence[HasState], which: int) -> None:
    """Give the buffers and extra states of blocks known values, which differ for each ``which``."""
    for index, block in enumerate(blocks):
        for buffer in block.buffers():
            buffer.fill_(100 * which + index)
        block.calibration = 100 * which + index


def states(blocks: Sequence[HasState]) -> dict[str, Any]:
    """Return the values of buffers and extra states, by names for records."""
    found: dict[str, Any] = {}
    for index, block in enumerate(blocks):
        for name, buffer in block.named_buffers():
            found[f"buffer {name} of block {index}"] = buffer.tolist()
        found[f"extra state of block {index}"] = block.calibration
    return found


def right_states(saved: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the values after a load: buffers that are not saved stay as they were before it."""
    return {
        name: before[name] if name.startswith("buffer table ") else value
        for name, value in saved.items()
    }

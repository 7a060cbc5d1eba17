"""Gradients that a trainer sets aside when a step ends, as methods for several tasks do."""

from collections import deque

import torch

from conformance.ranks.instruments.digest import checksum

_STEPS = 8


class SetAside:
    """The gradients of the last eight steps, and their bits."""

    def __init__(self) -> None:
        self._kept: deque[list[tuple[int, torch.Tensor, str]]] = deque(maxlen=_STEPS)

    def take(self, params: list[torch.nn.Parameter]) -> None:
        """Keep the gradients of a step, before the trainer clears them."""
        grads = [(index, parameter.grad) for index, parameter in enumerate(params)]
        self._kept.append(
            [(index, grad, checksum(grad)) for index, grad in grads if grad is not None]
        )

    def changed(self) -> list[int]:
        """Return the numbers of the parameters with a gradient that has other bits by now."""
        found = {
            index
            for of_step in self._kept
            for index, grad, bits in of_step
            if checksum(grad) != bits
        }
        return sorted(found)

"""Observations of wrapped modules: hooks that count, generators, and hooks on saved tensors."""

from collections.abc import Callable
from typing import Any

import torch

from conformance.ranks.drivers._blocks import WATCH
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments import process_state
from conformance.scenarios.profiles import CUDA


class Hooks:
    """Counting hooks on the first block, on a layer in it, and on its wrapper."""

    def __init__(self, net: Any) -> None:
        self._fired: dict[str, int] = {}
        self.register("block", net.blocks[0])
        self.register("layer", net.blocks[0].inner)

    def register(self, name: str, module: torch.nn.Module) -> None:
        """Put one hook of each kind on a module."""
        module.register_forward_pre_hook(self._counts(f"{name}: forward pre-hook"))
        module.register_forward_hook(self._counts(f"{name}: forward hook"))
        module.register_full_backward_hook(self._counts(f"{name}: full backward hook"))

    def _counts(self, name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            key = f"{name} in the {WATCH.phase}"
            self._fired[key] = self._fired.get(key, 0) + 1

        return count

    def record(self, driver: RankDriver) -> None:
        """Record the counts, without forward hooks that fire again in a repeated forward."""
        again = ("forward pre-hook in the backward", "forward hook in the backward")
        fired = {name: count for name, count in self._fired.items() if not name.endswith(again)}
        driver.recorder.event("fired", hooks=fired)
        self._fired.clear()


def generators() -> str:
    """Return the states of the generators that dropout draws from."""
    states = process_state.rng()
    return " ".join(states[name] for name in ("torch", CUDA) if name in states)

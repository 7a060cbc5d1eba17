"""Observations of wrapped modules: hooks that count or change, generators, and those on saved
tensors.
"""

from collections.abc import Callable
from typing import Any

import torch

from conformance.ranks.drivers._blocks import WATCH
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments import process_state
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import CUDA
from conformance.scenarios.seeds import generator


class Hooks:
    """Hooks on the first block, on a layer in it, and on its wrapper.

    Some count, and the others multiply by a drawn factor, so that their order does not matter.

    Args:
        net: the network.
        scenario: the factors are drawn for it.
    """

    def __init__(self, net: Any, scenario: Scenario) -> None:
        self._fired: dict[str, int] = {}
        self._numbers = generator(scenario, "factors of hooks")
        self.register("block", net.blocks[0])
        self.register("layer", net.blocks[0].inner)

    def register(self, name: str, module: torch.nn.Module) -> None:
        """Put one hook of each kind on a module."""
        module.register_forward_pre_hook(self._counts(f"{name}: forward pre-hook"))
        module.register_forward_hook(self._counts(f"{name}: forward hook"))
        module.register_full_backward_hook(self._counts(f"{name}: full backward hook"))
        self._change(module)

    def _change(self, module: torch.nn.Module) -> None:
        """Put hooks on a module that change its input, its output and the input's gradient."""
        by_position, by_keyword, of_output, of_gradient = (
            self._numbers.uniform(0.5, 0.9) for _ in range(4)
        )

        def before(_: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            (x,) = args
            return (x * by_position,)

        def before_with_names(_: Any, args: tuple[torch.Tensor], kwargs: Any) -> Any:
            (x,) = args
            return (x * by_keyword,), kwargs

        def behind(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * of_output

        def backward(_: Any, grads: Any, of_outputs: Any) -> Any:
            return tuple(None if grad is None else grad * of_gradient for grad in grads)

        module.register_forward_pre_hook(before)
        module.register_forward_pre_hook(before_with_names, with_kwargs=True)
        module.register_forward_hook(behind)
        module.register_full_backward_hook(backward)

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

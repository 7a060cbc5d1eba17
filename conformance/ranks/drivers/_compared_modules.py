"""Comparisons of wrapped modules with the modules inside them. Runs in ranks only."""

import copy
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conformance.ranks.drivers._blocks import WIDTH, Block, Wrap, filled, network
from conformance.ranks.drivers._module_states import (
    HasState,
    blocks_with_state,
    fill_states,
    right_states,
    states,
)
from conformance.ranks.drivers.base import RankDriver

# The names under which DDP and torch.compile hold a module.
_NAMES_AROUND = ("module", "_orig_mod")
# The number of the inputs of a block that is copied.
_INPUT = 70


Compare = Callable[[str, Callable[[], Any], Any], None]


@dataclass(frozen=True)
class _Side:
    """A module with or without the wrapper.

    Attributes:
        module: the module.
        blocks: the blocks with a state inside it, as they were before the wrapping.
    """

    module: torch.nn.Module
    blocks: list[HasState]


class ModuleComparison:
    """Compares wrapped modules with the modules inside them, alone and in a network.

    Args:
        driver: of this rank.
        wrap: wraps a module.
        compare: records the value of a function beside the value that it should be, by name.
        inputs: returns the inputs that belong to a number.
    """

    def __init__(
        self,
        driver: RankDriver,
        wrap: Wrap,
        compare: Compare,
        inputs: Callable[[int], torch.Tensor],
    ) -> None:
        self._driver = driver
        self._wrap = wrap
        self._compare = compare
        self._inputs = inputs

    def run(self) -> None:
        """Record all comparisons."""
        self._driver.begin_step(0, "none")
        with self._driver.doing("wrapped module"):
            self._compare_modules()
            self._compare_copies()

    def _network(self) -> Any:
        return network(self._driver.scenario).to(self._driver.device)

    def _compare_modules(self) -> None:
        alone = self._network().blocks[0]
        net = self._network()
        names = {id(parameter): name for name, parameter in alone.named_parameters()}
        plain = self._network()
        of_alone = blocks_with_state(alone)
        of_net = blocks_with_state(net)
        net.blocks[2].block = self._wrap(net.blocks[2].block)  # a wrapper inside a wrapper
        net.wrap(self._wrap)
        wrapped = self._wrap(alone)
        for place, module, bare in (
            ("wrapper", _Side(wrapped, of_alone), plain.blocks[0]),
            ("network", _Side(net, of_net), plain),
        ):
            without = _Side(bare, blocks_with_state(bare))
            self._compare_names(place, module.module, bare)
            self._compare_states(place, module, without)
            for name in _NAMES_AROUND:
                # As DDP and torch.compile hold a module: their part of a key is not the wrapper's.
                pair = (
                    _Side(torch.nn.ModuleDict({name: side.module}), side.blocks)
                    for side in (module, without)
                )
                self._compare_states(f"{place} in a module as {name}", *pair)
        self._compare(
            "parameters: wrapper",
            lambda: sorted(names.get(id(p), "another") for p in wrapped.parameters()),
            sorted(names.values()),
        )
        self._compare("attribute: width", lambda: wrapped.width, WIDTH)
        self._compare(
            "attribute: inner.out_features", lambda: wrapped.inner.out_features, 2 * WIDTH
        )
        self._compare(
            "attribute: item 1 of a Sequential", lambda: net.blocks[1][1].called, "second"
        )
        self._compare_modes(wrapped, alone)

    def _compare_names(self, place: str, module: torch.nn.Module, bare: torch.nn.Module) -> None:
        def names(named: Iterable[tuple[str, Any]]) -> list[str]:
            return [name for name, _ in named]

        compare = self._compare
        for prefix in ("", "a.", *(f"{name}." for name in _NAMES_AROUND)):
            behind = f" with the prefix {prefix}" if prefix else ""
            compare(f"keys: {place}{behind}", partial(_keys, module, prefix), _keys(bare, prefix))
        compare(
            f"parameter names: {place}",
            lambda: names(module.named_parameters()),
            names(bare.named_parameters()),
        )
        compare(
            f"buffer names: {place}",
            lambda: names(module.named_buffers()),
            names(bare.named_buffers()),
        )

    def _compare_states(self, place: str, module: _Side, bare: _Side) -> None:
        """Load the state of one module into the other, strictly."""

        def loaded(source: _Side, target: _Side, which: int) -> list[str]:
            filled(source.module, which)
            fill_states(source.blocks, which)
            values = [parameter.detach().clone() for parameter in source.module.parameters()]
            saved = states(source.blocks)
            state = {
                key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for key, value in source.module.state_dict().items()
            }
            # Other values, also if the source is the target.
            filled(target.module, which + 10)
            fill_states(target.blocks, which + 10)
            right = right_states(saved, states(target.blocks))
            target.module.load_state_dict(state, strict=True)
            pairs = enumerate(zip(target.module.parameters(), values, strict=True))
            now = states(target.blocks)
            return [
                *(
                    f"parameter {index}"
                    for index, (parameter, value) in pairs
                    if not torch.equal(parameter, value)
                ),
                *(name for name, value in right.items() if now[name] != value),
            ]

        self._compare(
            f"load: saved without the wrapper, loaded with it: {place}",
            lambda: loaded(bare, module, 1),
            [],
        )
        self._compare(
            f"load: saved with the wrapper, loaded without it: {place}",
            lambda: loaded(module, bare, 2),
            [],
        )
        self._compare(
            f"load: saved and loaded with the wrapper: {place}",
            lambda: loaded(module, module, 3),
            [],
        )

    def _compare_modes(self, wrapped: torch.nn.Module, inside: torch.nn.Module) -> None:
        """Change the wrapper's mode, and record the mode of the module inside."""

        def training(change: Callable[[], object]) -> list[bool]:
            change()
            return sorted({part.training for part in inside.modules()})

        def dtypes() -> list[str]:
            wrapped.to(torch.float64)
            return sorted({str(p.dtype) for p in inside.parameters()})

        def frozen() -> list[bool]:
            wrapped.requires_grad_(False)
            return sorted({p.requires_grad for p in inside.parameters()})

        self._compare("mode: eval()", lambda: training(wrapped.eval), [False])
        self._compare("mode: train()", lambda: training(wrapped.train), [True])
        self._compare("mode: to(float64)", dtypes, ["torch.float64"])
        self._compare("mode: requires_grad_(False)", frozen, [False])

    def _compare_copies(self) -> None:
        """Record whether a copy is a module of its own, and a saved state the same."""
        wrapped = self._wrap(filled(Block("block"), 4).to(self._driver.device))
        x = self._inputs(_INPUT).requires_grad_()

        def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
            module.zero_grad()
            module(x).square().sum().backward()
            grads = [parameter.grad for parameter in module.parameters()]
            return [torch.empty(0) if grad is None else grad.clone() for grad in grads]

        def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
            return len(some) == len(others) and all(map(torch.equal, some, others))

        def differences_of_copy() -> list[str]:
            right = gradients(wrapped)
            other = copy.deepcopy(wrapped)
            is_same = all(grad.numel() for grad in right) and are_equal(gradients(other), right)
            filled(other, 5)
            is_separate = are_equal(gradients(wrapped), right)
            found = []
            if not is_same:
                found.append("its gradients differ")
            if not is_separate:
                found.append("it shares parameters")
            return found

        def keys_from_file() -> list[str]:
            file = io.BytesIO()
            torch.save(wrapped.state_dict(), file)
            file.seek(0)
            return sorted(torch.load(file, weights_only=True))

        self._compare("copy: deepcopy", differences_of_copy, [])
        self._compare("copy: state_dict through torch.save", keys_from_file, _keys(Block("block")))


def _keys(module: torch.nn.Module, prefix: str = "") -> list[str]:
    """Return the keys of a state_dict; their order says nothing."""
    return sorted(module.state_dict(prefix=prefix))

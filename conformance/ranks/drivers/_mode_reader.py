"""The modes of torch and of modules, as hooks and steps in a join context find them.

The modes of modules are the mode of training of each module, and requires_grad of each parameter.
The random generators, the gradients of parameters and the hyperparameters of modules and joinables
are read with them.
"""

import collections
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.ranks.drivers._joinables import Counter
from conformance.ranks.drivers._lasting_changes import (
    LastingChanges,
    Number,
    attribute,
    of_group,
    settings_put_back,
)
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.digest import digest
from conformance.ranks.instruments.process_settings import modes
from conformance.ranks.instruments.process_state import rng
from conformance.scenarios.seeds import generator

# The events at which the modes are read, and their places for people.
_PLACES = {
    "begun": "in the body",
    "took": "in the body",
    "leaving": "at the end of the body",
    "left": "after the context",
    "came_out": "after an exception",
    "notified": "in a step",
    "main": "in a main hook",
    "post": "in a post hook",
}


_CHANGED = "in the body, as it has changed them"
# Hyperparameters of the modules of the kit's model.
_NUMBERS = ("p", "momentum", "eps")


class ModeReader:
    """Reads the modes of torch and of modules, and records each change in a context.

    Args:
        driver: of this rank.
        draws: whether the body of each context draws from the global random generators.

    Attributes:
        draws: as in the arguments.
        modules: the modules whose modes of training are read, by name.
        parameters: the parameters whose requires_grad and gradients are read, by name.
        numbers: the hyperparameters that are read, by name.
        changes: those that the body of the next context makes for good, if it makes any.
    """

    def __init__(self, driver: RankDriver, draws: bool = False) -> None:
        self.driver = driver
        self.draws = draws
        self.modules: dict[str, torch.nn.Module] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.numbers: dict[str, Number] = {}
        self.changes: LastingChanges | None = None
        self._frozen: set[str] = set()
        self._is_joining = False
        self._known: dict[str, str] = {}
        self._known_modules: dict[str, dict[str, Any]] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._drawn = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Read them before and after a context; each event of the block is a reading, too."""
        self._known = {}
        self._drawn = 0
        self._counts.clear()
        with settings_put_back():
            self._read("before the context")
            yield
            # Once more: the context and its hooks may have been collected since.
            self._read("after the context")
        self.driver.recorder.event("modes_read", counts=dict(self._counts))

    def at(self, event: str) -> None:
        """Read them at an event, if it is a place for it."""
        if event in ("leaving", "left", "came_out"):
            self._is_joining = event == "leaving"
        if event == "begun" and self.draws:
            self._read(_PLACES[event])
        if event in ("begun", "took") and self.draws:
            self._drawn += 1
            _draw_numbers()
        if self.changes and event == self.changes.event:
            frozen = {name: self.parameters[name] for name in sorted(self._frozen)}
            self.changes.make(self.modules, frozen, self.numbers)
            self._read(_CHANGED, changes=True)
        if event in _PLACES:
            self._read(_PLACES[event])

    def _at_collective(self) -> None:
        """Read the modes of modules as the join, or a hook, issues a collective.

        The modes of torch are those of a joinable's own code there.
        """
        if self._is_joining:
            self._read("in a collective of the join", self._known)

    def _read(
        self, place: str, modes_of_torch: dict[str, str] | None = None, changes: bool = False
    ) -> None:
        """Read them, and record the reading if it differs from the one before.

        Args:
            place: of the reading, for people.
            modes_of_torch: known ones; by default they are read.
            changes: the body has just changed them for good.
        """
        known = modes() if modes_of_torch is None else modes_of_torch
        of_modules = {
            "training": {name: module.training for name, module in self.modules.items()},
            "requires_grad": {
                name: parameter.requires_grad for name, parameter in self.parameters.items()
            },
            "generators": rng(),
            "gradients": {
                name: "" if parameter.grad is None else digest(parameter.grad)
                for name, parameter in self.parameters.items()
            },
            "hyperparameters": {name: number.read() for name, number in self.numbers.items()},
        }
        self._counts[place] += 1
        is_known = (known, of_modules) == (self._known, self._known_modules)
        if is_known and not changes and self._counts.total() > 1:
            return
        self._known = known
        self._known_modules = of_modules
        self.driver.recorder.event(
            "modes", place=place, modes=known, drawn=self._drawn, changes=changes, **of_modules
        )

    def watch(self, name: str, part: Any) -> None:
        """Read the modes of a module and of its parts, or requires_grad of other tensors.

        Args:
            name: of the part, for people.
            part: a module, an optimizer, a tensor, or a list of tensors; others have no modes.
        """
        tensors: list[Any] = []
        if isinstance(part, torch.nn.Module):
            for path, module in part.named_modules():
                self.modules[f"{name}.{path}" if path else name] = module
            self.parameters |= {
                f"{name}.{path}": parameter for path, parameter in part.named_parameters()
            }
        elif isinstance(part, torch.optim.Optimizer):
            tensors = [tensor for group in part.param_groups for tensor in group["params"]]
        elif isinstance(part, (list, tuple)):
            tensors = list(part)
        elif isinstance(part, torch.Tensor):
            tensors = [part]
        for place, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf:
                self.parameters[f"{name}[{place}]"] = tensor

    def watch_model(self, model: torch.nn.Module) -> None:
        """Read the modes of a model of the kit's, also while its own hooks are at work."""
        self.watch("model", model)
        for path, module in self.modules.items():
            for name in _NUMBERS:
                if isinstance(getattr(module, name, None), float):
                    self.numbers[f"{path}.{name}"] = attribute(module, name)
        self.driver.collectives.before_each = self._at_collective
        self._frozen = {
            name for name, parameter in self.parameters.items() if not parameter.requires_grad
        }

    def draw(self, context: int) -> None:
        """Set a drawn mode of training on each module, and another one on its parts.

        Each frozen parameter of a model of the kit's is trained or not, as drawn. The others are
        trained, whatever an earlier context has left.
        """
        draw = generator(self.driver.scenario, f"training/{context}")
        for module in self.modules.values():
            # Not by train() and eval(), which set the modes of all parts.
            module.training = draw.random() < 0.5
        if not self._frozen:
            return
        for name, parameter in self.parameters.items():
            parameter.requires_grad = name not in self._frozen or draw.random() < 0.5


def _draw_numbers() -> None:
    """Draw from each global random generator on the CPU, as the body of a loop does."""
    torch.rand(1)
    random.random()
    if numpy := sys.modules.get("numpy"):
        numpy.random.random()


class ReadingCounter(Counter):
    """A joinable of the kit in which modes are read.

    Args:
        reader: reads them.
    """

    def __init__(self, reader: ModeReader, index: int, notify: Callable[[Any], Any]) -> None:
        super().__init__(reader.driver, index, notify)
        self.reader = reader
        # As those of an optimizer, and of a joinable of a user's own.
        self.param_groups = [{"params": [], "lr": 0.1}]
        self.rate = 0.5
        if reader.draws:
            reader.numbers[f"joinable {index}.lr"] = of_group(self, "lr")
            reader.numbers[f"joinable {index}.rate"] = attribute(self, "rate")

    def note(self, name: str, /, **fields: Any) -> None:
        super().note(name, **fields)
        self.reader.at(name)

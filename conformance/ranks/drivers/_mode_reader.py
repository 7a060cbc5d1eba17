"""The modes of torch and of modules, as hooks and steps in a join context find them."""

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.ranks.drivers._joinables import Counter
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.process_settings import modes
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


class ModeReader:
    """Reads the modes of torch and of modules, and records each change in a context.

    Args:
        driver: of this rank.

    Attributes:
        modules: the modules whose modes of training are read, by name.
    """

    def __init__(self, driver: RankDriver) -> None:
        self.driver = driver
        self.modules: dict[str, torch.nn.Module] = {}
        self._known: dict[str, str] = {}
        self._known_modules: dict[str, bool] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Read them before and after a context; each event of the block is a reading, too."""
        self._known = {}
        self._counts.clear()
        self._read("before the context")
        yield
        self.driver.recorder.event("modes_read", counts=dict(self._counts))

    def at(self, event: str) -> None:
        """Read them at an event, if it is a place for it."""
        if event in _PLACES:
            self._read(_PLACES[event])

    def _read(self, place: str) -> None:
        known = modes()
        of_modules = {name: module.training for name, module in self.modules.items()}
        self._counts[place] += 1
        if (known, of_modules) == (self._known, self._known_modules) and self._counts.total() > 1:
            return
        self._known = known
        self._known_modules = of_modules
        self.driver.recorder.event("modes", place=place, modes=known, training=of_modules)

    def watch(self, name: str, module: torch.nn.Module) -> None:
        """Read the mode of training of a module, and those of its parts."""
        for path, part in module.named_modules():
            self.modules[f"{name}.{path}" if path else name] = part

    def draw(self, context: int) -> None:
        """Set a drawn mode of training on each module, and another one on its parts."""
        draw = generator(self.driver.scenario, f"training/{context}")
        for module in self.modules.values():
            # Not by train() and eval(), which set the modes of all parts.
            module.training = draw.random() < 0.5


class ReadingCounter(Counter):
    """A joinable of the kit in which modes are read.

    Args:
        reader: reads them.
    """

    def __init__(self, reader: ModeReader, index: int, notify: Callable[[Any], Any]) -> None:
        super().__init__(reader.driver, index, notify)
        self.reader = reader

    def note(self, name: str, /, **fields: Any) -> None:
        super().note(name, **fields)
        self.reader.at(name)

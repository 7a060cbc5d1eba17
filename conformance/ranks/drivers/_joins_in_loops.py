"""The variants for a context that is judged, in the loops of real programs: settings and groups."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from conformance.ranks.drivers._contexts import Steps
from conformance.ranks.drivers._joinables import Model
from conformance.ranks.drivers._joins_in_training import ContextInTraining
from conformance.ranks.drivers._mode_reader import ModeReader, ReadingCounter
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.default_dtype import default_dtype
from conformance.scenarios.join_loop_draws import (
    AUTOCAST,
    DETERMINISTIC,
    DISABLED,
    FLOAT64,
    INFERENCE,
    NO_GRAD,
    RAISES,
    THROWS,
    loop_contexts,
)
from conformance.scenarios.joinable import joinables_of
from conformance.scenarios.seeds import generator


class Blocks(Model):
    """A probe beside modules without parameters, whose number and nesting are drawn."""

    def __init__(self, driver: RankDriver) -> None:
        super().__init__(driver)
        draw = generator(driver.scenario, "blocks")
        self.blocks = torch.nn.ModuleList(_block(draw) for _ in range(draw.randint(2, 4)))


def _block(draw: random.Random) -> torch.nn.Module:
    leaves: list[torch.nn.Module] = [
        torch.nn.Dropout(0.5),
        torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False),
        torch.nn.Identity(),
    ]
    draw.shuffle(leaves)
    return torch.nn.Sequential(*leaves[:2], torch.nn.Sequential(leaves[2]))


@contextmanager
def under(settings: tuple[str, ...]) -> Iterator[None]:
    """Run a block under settings of torch."""
    with ExitStack() as stack:
        if NO_GRAD in settings:
            stack.enter_context(torch.no_grad())
        if INFERENCE in settings:
            stack.enter_context(torch.inference_mode())
        if AUTOCAST in settings:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        if FLOAT64 in settings:
            stack.enter_context(default_dtype("float64"))
        if DETERMINISTIC in settings:
            stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            torch.set_deterministic_debug_mode("warn")
        yield


class ContextInLoops(ContextInTraining):
    """A context that is judged; each public method is a variant of the scenarios."""

    def modes(self) -> None:
        """Run contexts under drawn settings, and with a model of drawn modes of training."""
        self.reader = ModeReader(self.driver)
        counters = [
            ReadingCounter(self.reader, index, self.notify)
            for index in range(joinables_of(self.driver.scenario))
        ]
        ddp = self._ddp(Blocks(self.driver))
        self.reader.watch("model", ddp)
        trains = self._trains(ddp, steps_too=False)
        contexts = loop_contexts(self.driver.scenario, self.driver.world)
        for number, context in enumerate(contexts):
            self.reader.draw(number)
            joinables: list[Any] = [counters[index] for index in context.joinables]
            steps: list[Callable[[], object]] = [counter.step for counter in joinables]
            if context.place_of_model >= 0:
                joinables.insert(context.place_of_model, ddp)
                steps.insert(context.place_of_model, trains)
            with under(context.settings):
                self._end(context.ending, number, joinables, self.own(context.inputs), steps)

    def _end(
        self, ending: str, number: int, joinables: list[Any], inputs: int, steps: Steps
    ) -> None:
        """Run a context to its end, which may be an exception."""
        if ending == RAISES:
            self.break_off(joinables, inputs, steps, number)
        elif ending == THROWS:
            self.run_to_its_error(joinables, inputs, steps, throw_on_early_termination=True)
        else:
            self.run(joinables, inputs, steps, enable=ending != DISABLED)

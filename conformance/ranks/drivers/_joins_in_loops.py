"""The variants for a context that is judged, in the loops of real programs: settings and groups."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from conformance.ranks.drivers._contexts import Steps
from conformance.ranks.drivers._joinables import Counter, Finisher, Model
from conformance.ranks.drivers._joins_in_training import ContextInTraining
from conformance.ranks.drivers._lasting_changes import LastingChanges
from conformance.ranks.drivers._mode_reader import ModeReader, ReadingCounter
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.default_dtype import default_dtype
from conformance.ranks.instruments.global_seeds import kept_generators
from conformance.scenarios.join_loop_draws import (
    AUTOCAST,
    DETERMINISTIC,
    DISABLED,
    FLOAT64,
    INFERENCE,
    NO_GRAD,
    RAISES,
    THROWS,
    LoopContext,
    group_of_loop,
    loop_contexts,
)
from conformance.scenarios.joinable import KEYWORDS, joinables_of
from conformance.scenarios.seeds import generator


class Blocks(Model):
    """A probe beside other modules, whose number and nesting are drawn.

    Their parameters are frozen, so that DDP does not wait for their gradients.
    """

    def __init__(self, driver: RankDriver) -> None:
        super().__init__(driver)
        draw = generator(driver.scenario, "blocks")
        self.blocks = torch.nn.ModuleList(_block(draw) for _ in range(draw.randint(2, 4)))
        self.blocks.requires_grad_(False).to(driver.device)


def _block(draw: random.Random) -> torch.nn.Module:
    leaves: list[torch.nn.Module] = [
        torch.nn.Dropout(0.5),
        torch.nn.BatchNorm1d(3, track_running_stats=False),
        torch.nn.Linear(2, 3),
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

    _plan: tuple[LoopContext, ...] = ()
    _counters: Mapping[bool, list[Counter]] = {}
    _keeps_context = False
    _kept: Any = None
    _has_begun = False

    def modes(self) -> None:
        """Run contexts under drawn settings, and with a model of drawn modes of training."""
        with kept_generators():
            self._run_in_modes()

    def _run_in_modes(self) -> None:
        self.reader = ModeReader(self.driver, draws=True)
        counters = [
            ReadingCounter(self.reader, index, self.notify)
            for index in range(joinables_of(self.driver.scenario))
        ]
        ddp = self._ddp(Blocks(self.driver))
        self.reader.watch_model(ddp)
        trains = self._trains(ddp, steps_too=False)
        contexts = loop_contexts(self.driver.scenario, self.driver.world)
        for number, context in enumerate(contexts):
            self.reader.draw(number)
            self.reader.changes = LastingChanges(
                generator(self.driver.scenario, f"changes/{number}"), context
            )
            joinables: list[Any] = [counters[index] for index in context.joinables]
            steps: list[Callable[[], object]] = [counter.step for counter in joinables]
            if context.place_of_model >= 0:
                joinables.insert(context.place_of_model, ddp)
                steps.insert(context.place_of_model, trains)
            with under(context.settings):
                self._end(context.ending, number, joinables, self.own(context.inputs), steps)

    def two_groups(self) -> None:
        """Run contexts on two groups in turn, and contexts of one group within those of the other;
        some end in another way.

        A rank that is in one group alone skips the contexts of the other one.
        """
        self._plan = loop_contexts(self.driver.scenario, self.driver.world)
        self._counters = {
            on_part: [
                Counter(self.driver, index, self.notify, group)
                for index in range(joinables_of(self.driver.scenario))
            ]
            for on_part, group in ((False, self.driver.group), (True, self.driver.twin_group))
        }
        for number, context in enumerate(self._plan):
            if context.nested_at < 0:
                self._run_on_group(number)

    def entered(self) -> None:
        """Enter one context object again and again; stop if it refuses that."""
        self._keeps_context = True
        counters = self.counters()
        steps = [counter.step for counter in counters]
        for number, context in enumerate(loop_contexts(self.driver.scenario, self.driver.world)):
            self._has_begun = False
            inputs = self.own(context.inputs)
            if context.ending == RAISES:
                self.break_off(counters, inputs, steps, number)
            else:
                self.run_to_its_error(counters, inputs, steps, **KEYWORDS)
            if not self._has_begun:
                return

    def failing(self) -> None:
        """Run contexts of one joinable; a collective of one of them fails on a rank."""
        counters = self.counters()[:1]
        for inputs in self.lengths:
            self.count(counters, self.own(inputs))

    def fails_last(self) -> None:
        """Run contexts of joinables with a collective in their post hooks, one of which fails."""
        count = joinables_of(self.driver.scenario)
        finishers = [Finisher(self.driver, index, self.notify) for index in range(count)]
        self.fail_at_end(finishers, [finisher.step for finisher in finishers])

    fails_early = fails_last

    def _run_on_group(self, number: int) -> None:
        """Run a context, and the next one within it if that is nested."""
        ranks = group_of_loop(self.driver.scenario, self.driver.world, number)
        is_outer = number + 1 < len(self._plan) and self._plan[number + 1].nested_at >= 0
        if self.driver.rank in ranks:
            self._contexts = number
            self._end(self._plan[number].ending, number, *self._work(number, ranks, is_outer))
        elif is_outer:
            self._run_on_group(number + 1)

    def _work(
        self, number: int, ranks: tuple[int, ...], is_outer: bool
    ) -> tuple[list[Any], int, Steps]:
        """Return the joinables of a context, the number of inputs of this rank, and its steps."""
        context = self._plan[number]
        chosen = [self._counters[context.on_part][index] for index in context.joinables]
        steps: list[Callable[[], object]] = [counter.step for counter in chosen]
        if is_outer:
            steps.append(self._nested_step(number + 1))
        return list(chosen), context.inputs[ranks.index(self.driver.rank)], steps

    def _nested_step(self, number: int) -> Callable[[], None]:
        """Return the work in which a context is entered within another one, in one of its steps."""
        places = itertools.count()
        ranks = group_of_loop(self.driver.scenario, self.driver.world, number)

        def step() -> None:
            if next(places) != self._plan[number].nested_at or self.driver.rank not in ranks:
                return
            self.driver.begin_step(number, "context")
            joinables, inputs, steps = self._work(number, ranks, is_outer=False)
            self._train(joinables, inputs, steps, {})
            self.driver.recorder.step = number - 1

        return step

    def note(self, name: str, /, **fields: Any) -> None:
        super().note(name, **fields)
        self._has_begun = self._has_begun or name == "begun"

    def _context(self, joinables: list[Any], options: dict[str, Any]) -> Any:
        if not self._keeps_context:
            return super()._context(joinables, options)
        if self._kept is None:
            self._kept = super()._context(joinables, options)
        return self._kept

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

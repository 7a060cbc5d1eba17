"""The driver of joins: ranks run out of inputs in a join context, and record each call.

The subject is a join context, or a joinable that is run in torch's context.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin

from conformance.errors import TargetError
from conformance.ranks.drivers._contexts import Contexts, Steps
from conformance.ranks.drivers._counters import Counters
from conformance.ranks.drivers._join_numbers import Numbers, NumbersOfOne
from conformance.ranks.drivers._join_parts import parts_of
from conformance.ranks.drivers._joinables import Counter
from conformance.ranks.drivers._joins_in_loops import ContextInLoops
from conformance.ranks.drivers._joins_in_parts import InParts
from conformance.ranks.drivers._mode_reader import ModeReader, ReadingCounter
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.global_seeds import kept_generators
from conformance.ranks.instruments.process_state import CPU_GENERATORS
from conformance.ranks.resolve import Factory
from conformance.scenarios.join_draws import (
    DIVISOR,
    HUGE_TRIAL,
    NONE_RAISED,
    ROWS_OF_ONE,
    TRIALS,
    breaks_off,
    divides_by_all,
    divisor_in_many,
    several_joinables,
)
from conformance.scenarios.join_loop_draws import ENDS, group_of_loop, loop_contexts
from conformance.scenarios.joinable import KEYWORDS
from conformance.scenarios.joins_in_training import NUMBERS

_CHOSEN_BY_KIT = {"enable", "throw_on_early_termination"}


class JoinableDriver(RankDriver):
    """One rank that trains on uneven inputs."""

    def run(self) -> None:
        """Run the scenario's contexts."""
        subject = self.make()
        function: Any = subject.func if isinstance(subject, functools.partial) else subject
        arguments = getattr(subject, "keywords", {})
        if _is_context(function):
            if given := _CHOSEN_BY_KIT & arguments.keys():
                names = ", ".join(sorted(given))
                raise TargetError(f"{names}: the scenarios choose it; leave it out of the target")
            self._run_context(ContextInLoops(self, subject, function.notify_join_context))
            return
        make = functools.partial(self._make_from, function, arguments)
        made = make()
        if _is_context(made):
            self._run_context(ContextInLoops(self, made, made.notify_join_context))
        else:
            self._run_joinable(made, make)

    def _make_from(self, function: Any, arguments: dict[str, Any], group: Any = None) -> Any:
        """Return the object that the target makes, or the target if it is an object itself.

        Args:
            group: another group than the driver's.
        """
        is_joinable = hasattr(function, "join_hook") and not isinstance(function, type)
        if not callable(function) or is_joinable:
            return function
        with self.doing("make"):
            context = self.context
            if group is not None:
                context = {
                    **context,
                    "process_group": lambda: group,
                    "rank": lambda: dist.get_rank(group),
                    "world_size": lambda: dist.get_world_size(group),
                }
            return Factory(function, arguments).make(context)

    def _run_context(self, context: ContextInLoops) -> None:
        self.recorder.event("subject", is_context=True)
        if self.scenario.variant not in _OF_JOINABLES:
            getattr(context, self.scenario.variant)()

    def _run_joinable(self, made: Any, make: Callable[..., Any]) -> None:
        if not hasattr(made, "join_hook"):
            name = getattr(made, "__name__", type(made).__name__)
            raise TargetError(
                "a join context has notify_join_context, a joinable has join_hook; "
                f"{name} has neither"
            )
        if not callable(made) and not callable(getattr(made, "step", None)):
            raise TargetError(
                "a joinable has a method step(), or can be called; "
                f"{type(made).__name__} has neither"
            )
        self.recorder.event("subject", is_context=False)
        # Some experiments need control over each step of the context: they leave joinables out.
        judged = _Joinable(self, made, make)
        variant = getattr(judged, self.scenario.variant, None)
        try:
            if variant and self.scenario.order == "free":
                variant()
        finally:
            # Before the process is looked at: the joinable has replaced nothing.
            judged.put_torchs_function_back()


# The numbers that a joinable computes are no concern of a context's.
_OF_JOINABLES = ("numbers", "counts", "in_parts", "long_epoch")


def _is_context(value: Any) -> bool:
    return hasattr(value, "notify_join_context") and not hasattr(value, "join_hook")


class _Joinable(Contexts):
    """A joinable that is judged, in torch's context; it may draw random numbers.

    Args:
        driver: of this rank.
        made: a joinable.
        make: makes more of them.
    """

    def __init__(self, driver: RankDriver, made: Any, make: Callable[..., Any]) -> None:
        torchs = TorchsJoin.notify_join_context
        self._torchs = vars(TorchsJoin)["notify_join_context"]

        def notify(joinable: Any) -> Any:
            self.note("says", own=joinable is self.subject)
            return torchs(joinable)

        TorchsJoin.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]
        super().__init__(driver, TorchsJoin, notify)
        self.subject = made
        self._make = make

    def put_torchs_function_back(self) -> None:
        """Undo the replacement of torch's ``notify_join_context``, which takes notes."""
        TorchsJoin.notify_join_context = self._torchs  # type: ignore[method-assign]

    @contextmanager
    def _inside(self, joinables: list[Any]) -> Iterator[None]:
        # torch's own context changes the filters of warnings, which is not the joinable's fault.
        # Generators are put back inside the call, so that numbers drawn there do not count as a
        # change.
        with super()._inside(joinables), warnings.catch_warnings(), kept_generators():
            yield

    def even(self) -> None:
        """Run the joinable by itself; a new one in each context."""
        for number, inputs in enumerate(self.lengths):
            self.subject = self._make() if number else self.subject
            self.run([self.subject], self.own(inputs), [self._step])

    uneven = even

    def keywords(self) -> None:
        for inputs in self.lengths:
            self._run_beside(Counter(self.driver, 0, self.notify), inputs, **KEYWORDS)

    def again(self) -> None:
        """Run it beside another joinable, first and last in turn."""
        counter = Counter(self.driver, 0, self.notify)
        for number, inputs in enumerate(self.lengths):
            self._run_beside(counter, inputs, is_first=number % 2 == 0)

    def long_epoch(self) -> None:
        """Run it beside another joinable, whose sums show which ranks take part."""
        counter = Counter(self.driver, 0, self.notify)
        self._run_beside(counter, self.lengths[0])

    def throws(self) -> None:
        for number, inputs in enumerate(self.lengths):
            self.subject = self._make() if number else self.subject
            self.run_to_its_error(
                [self.subject], self.own(inputs), [self._step], throw_on_early_termination=True
            )

    def modes(self) -> None:
        """Run it beside a joinable that reads the modes; the modes of its modules are drawn."""
        self.reader = ModeReader(self.driver)
        counter = ReadingCounter(self.reader, 0, self.notify)
        attributes = getattr(self.subject, "__dict__", {})
        for name, part in {"subject": self.subject, **attributes}.items():
            self.reader.watch(name, part)
        for name, part in parts_of(self.subject).items():
            if name.removesuffix(".") not in attributes:
                self.reader.watch(name.removesuffix("."), part)
        for number, context in enumerate(loop_contexts(self.driver.scenario, self.driver.world)):
            if context.ending == ENDS:
                self._contexts = number
                self.reader.draw(number)
                self._run_beside(counter, context.inputs, is_first=number % 2 == 0)

    def numbers(self) -> None:
        """Train the joinable, a new one in each context but the last; record what it computes.

        The kit's trainer steps the parameters that the joinable's own step leaves as they are.
        """
        if self.driver.scenario.name == NUMBERS.name:
            self._step_before()
        last = ROWS_OF_ONE - 1
        for number, inputs in enumerate(self.lengths[:ROWS_OF_ONE]):
            if 0 < number < last:
                self.subject = self._make()
            numbers = Numbers(self.driver, self.subject, self._step)
            options: dict[str, Any] = {}
            if number:
                options[DIVISOR] = divides_by_all(self.driver.scenario, number)
            with numbers.watched(number):
                self.run(
                    [self.subject], self.own(inputs), [numbers.step], numbers.leaving, **options
                )
                numbers.left()
        for rows in several_joinables(self.driver.scenario):
            self._train_several(rows)

    def _train_several(self, rows: tuple[int, ...]) -> None:
        """Train several joinables in one context, each with inputs of its own; record what they
        compute.

        Args:
            rows: the number of the record of each joinable.
        """
        made = {row: self._make() for row in sorted(rows)}
        if len({id(one) for one in made.values()}) < len(rows):
            return  # the target is one object
        first, *others = rows
        for row in others:
            self.driver.begin_step(row, "context")
        self._contexts = first
        every = [
            NumbersOfOne(self.driver, made[row], functools.partial(self._take_step, made[row]))
            for row in rows
        ]
        with ExitStack() as stack:
            for row, numbers in zip(rows, every, strict=True):
                stack.enter_context(numbers.watched(row))

            def leaving() -> None:
                for numbers in every:
                    numbers.leaving()

            steps = [numbers.step for numbers in every]
            joinables = [made[row] for row in rows]
            self.run(joinables, self.own(self.lengths[first]), steps, leaving)
            for numbers in every:
                numbers.left()

    def counts(self) -> None:
        """Find integers that count up in even inputs; then raise them in a new joinable.

        Even inputs show whether it can do with large ones: an integer may be a place in a table.
        All of this is done once more with integers that int32 has not, and with whole numbers in
        float64.
        """
        counters = Counters(self.driver)
        if self._count_in(counters, 0):
            return
        refuses_large = False
        for trial in TRIALS:
            if trial == HUGE_TRIAL and refuses_large:
                continue
            for number in (trial, trial + 1, trial + 2):
                # Both uneven contexts are those of one joinable.
                if number < trial + 2:
                    self.subject = self._make()
                    if not counters.raise_in(self.subject, trial):
                        break
                if self._count_in(counters, number):
                    if number != trial:
                        return
                    refuses_large = True
                    break
        if counters.in_float64:
            self.subject = self._make()
            self._count_in(counters, NONE_RAISED)

    def _count_in(self, counters: Counters, number: int) -> bool:
        """Train in a context; return whether an exception has left it."""
        self._contexts = number
        numbers = Numbers(
            self.driver, self.subject, functools.partial(self._counted, counters, number)
        )
        inputs = self.own(self.lengths[number])
        with numbers.watched(number):
            has_failed = self.run_to_its_error(
                [self.subject], inputs, [numbers.step], numbers.leaving
            )
            numbers.left()
            counters.left(self.subject)
        return has_failed

    def _counted(self, counters: Counters, number: int) -> None:
        self._step()
        if number == 0:
            counters.stepped(self.subject)

    def _step_before(self) -> None:
        """Take steps of a joinable of its own before there has been a context, as many as the first
        one has; record the gradients, the state and an error.
        """
        given = self.subject
        self.subject = self._make()
        numbers = Numbers(self.driver, self.subject, self._step, drawn_as=0)
        with (
            numbers.watched(len(self.lengths)),
            self.driver.inside("a step outside of a context", drawn=CPU_GENERATORS),
            warnings.catch_warnings(),
            kept_generators(),
        ):
            try:
                for _ in range(self.own(self.lengths[0])):
                    numbers.step()
                numbers.stepped_outside()
            except Exception as error:
                self.note("refused_outside", error=f"{type(error).__name__}: {error}"[:300])
        self.subject = given

    def in_parts(self) -> None:
        """Train the same steps in one context and in two; let values be out of date."""
        InParts(self, self._make, self._take_step).run()

    def two_groups(self) -> None:
        """Train two joinables on two groups in turn; record what they compute.

        A rank that is in one group alone has one joinable.
        """
        driver = self.driver
        contexts = loop_contexts(driver.scenario, driver.world)
        subjects = {False: self.subject}
        if driver.rank in driver.scenario.twin_groups[0]:
            subjects[True] = self._make(group=driver.twin_group)
            if subjects[True] is subjects[False]:
                self.note("one_object")
                return
        for number, context in enumerate(contexts):
            # Contexts that end in another way say nothing about what a joinable computes.
            if context.on_part not in subjects or context.ending != ENDS:
                continue
            self.subject = subjects[context.on_part]
            self._contexts = number
            ranks = group_of_loop(driver.scenario, driver.world, number)
            numbers = Numbers(driver, self.subject, self._step)
            with numbers.watched(number):
                inputs = context.inputs[ranks.index(driver.rank)]
                self.run([self.subject], inputs, [numbers.step], numbers.leaving)
                numbers.left()

    def failing(self) -> None:
        """Run the joinable by itself; a collective of one of the contexts fails on a rank."""
        for inputs in self.lengths:
            self.run([self.subject], self.own(inputs), [self._step])

    def fails_last(self) -> None:
        """Run the joinable; a collective of its post hook fails on a rank."""
        self.fail_at_end([self.subject], [self._step])

    fails_early = fails_last

    def many(self) -> None:
        """Train one joinable in all contexts; record what it computes."""
        for number, inputs in enumerate(self.lengths):
            # In every context, so that the same objects of the kit are in use when it begins.
            numbers = Numbers(self.driver, self.subject, self._step)
            with numbers.watched(number):
                if breaks_off(self.driver.scenario, number):
                    # Ranks do not join, so that their states may differ afterwards.
                    self.break_off([self.subject], self.own(inputs), [numbers.step], number)
                    continue
                divisor = divisor_in_many(self.driver.scenario, number)
                options = {} if divisor is None else {DIVISOR: divisor}
                self.run(
                    [self.subject], self.own(inputs), [numbers.step], numbers.leaving, **options
                )
                numbers.left()

    def _run_beside(
        self, counter: Counter, inputs: tuple[int, ...], is_first: bool = True, **options: Any
    ) -> None:
        joinables: list[Any] = [self.subject, counter]
        steps: Steps = [self._step, counter.step]
        direction = 1 if is_first else -1
        self.run(joinables[::direction], self.own(inputs), steps[::direction], **options)

    def _step(self) -> None:
        self._take_step(self.subject)

    def _take_step(self, subject: Any) -> None:
        self.note("takes")
        # A module can be called, too: a subclass of DDP that is its own trainer has a step().
        step = getattr(subject, "step", None)
        if callable(step):
            step()
        else:
            subject()

"""The contexts of a run, one after another, and the variants for a context that is judged."""

import builtins
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.ranks.drivers._joinables import Counter, Marker, Model, Setter
from conformance.ranks.drivers._mode_reader import ModeReader
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.process_state import CPU_GENERATORS
from conformance.scenarios.joinable import (
    KEYWORDS,
    LEARNING_RATE,
    joinables_of,
    lengths,
    order,
)

Steps = Sequence[Callable[[], object]]
"""The work of a context's joinables in each step."""


class Contexts:
    """Contexts, one after another.

    Args:
        driver: of this rank.
        join: makes a context.
        notify: declares in a context that this rank still trains.
    """

    def __init__(
        self, driver: RankDriver, join: Callable[..., Any], notify: Callable[[Any], Any]
    ) -> None:
        self.driver = driver
        self.join = join
        self.notify = notify
        self._contexts = 0
        self.reader: ModeReader | None = None
        group = driver.scenario.group_of(driver.rank, driver.world)
        self.lengths = lengths(driver.scenario, group)

    def counters(self) -> list[Counter]:
        count = joinables_of(self.driver.scenario)
        return [Counter(self.driver, index, self.notify) for index in range(count)]

    def in_order(self, counters: list[Counter], context: int) -> list[Counter]:
        """Return the joinables of a context, in its order."""
        chosen = order(self.driver.scenario, self.driver.world, context)
        return [counters[index] for index in chosen]

    def go_on_with(self, number: int) -> None:
        """Give the next context a number."""
        self._contexts = number

    def own(self, inputs: tuple[int, ...]) -> int:
        """Return the number of this rank's inputs."""
        return inputs[self.driver.group_rank]

    def run(
        self,
        joinables: list[Any],
        inputs: int,
        steps: Steps,
        then: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        """Train in a context, for as many steps as there are inputs.

        Args:
            then: called in the context when the steps are over.
        """
        with self._inside(joinables):
            self._train(joinables, inputs, steps, options, then)

    def run_to_its_error(
        self,
        joinables: list[Any],
        inputs: int,
        steps: Steps,
        then: Callable[[], object] = lambda: None,
        raised: Any = None,
        **options: Any,
    ) -> bool:
        """Train in a context; record, and return, whether an exception leaves it.

        Args:
            then: called in the context when the steps are over.
            raised: the exception that ``then`` or a hook raises, which may be an interrupt.
        """
        with self._inside(joinables):
            return self._train_to_its_error(joinables, inputs, steps, options, then, raised)

    def break_off(
        self,
        joinables: list[Any],
        inputs: int,
        steps: Steps,
        number: int,
        name: str = "ArithmeticError",
    ) -> None:
        """Train in a context, and raise in it.

        Rank 0's exception leaves the context before its peers raise theirs.

        Args:
            number: of the context.
            name: of the exception's type, which Python has.
        """
        meeting = f"rank 0 is out of context {number}"
        with self._inside(joinables):
            # Made in the context: objects are counted as it begins.
            error = getattr(builtins, name)(f"rank {self.driver.rank} raises this")

            def raising() -> None:
                if self.driver.group_rank:
                    self.driver.barrier(meeting)
                raise error

            self._train_to_its_error(joinables, inputs, steps, {}, raising, error)
        if not self.driver.group_rank:
            self.driver.barrier(meeting)

    @contextmanager
    def _inside(self, joinables: list[Any]) -> Iterator[None]:
        self.driver.begin_step(self._contexts, "context")
        self._contexts += 1
        names = ", ".join(type(joinable).__name__ for joinable in joinables)
        # Another rule compares the draws of a body that draws numbers.
        drawn = CPU_GENERATORS if self.reader and self.reader.draws else ()
        with self.driver.inside(f"the context of {names}", drawn=drawn), ExitStack() as stack:
            if self.reader:
                stack.enter_context(self.reader.watched())
            yield

    def _train(
        self,
        joinables: list[Any],
        inputs: int,
        steps: Steps,
        options: dict[str, Any],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        with self._context(joinables, options):
            self._take_steps(inputs, steps, then)
        self.note("left")

    def _context(self, joinables: list[Any], options: dict[str, Any]) -> Any:
        """Return the context to enter."""
        return self.join(joinables, **options)

    def _take_steps(self, inputs: int, steps: Steps, then: Callable[[], object]) -> None:
        """Run the body of a context."""
        self.note("begun")
        for at in range(inputs):
            for step in steps:
                step()
            self.note("took", at=at)
        then()
        self.note("leaving")

    def _train_to_its_error(
        self,
        joinables: list[Any],
        inputs: int,
        steps: Steps,
        options: dict[str, Any],
        then: Callable[[], object],
        raised: Any,
    ) -> bool:
        try:
            self._train(joinables, inputs, steps, options, then)
        except BaseException as error:
            if not isinstance(error, Exception) and error is not raised:
                raise
            text = f"{type(error).__name__}: {error}"[:300]
            self.note("came_out", error=text, same=error is raised)
            return True
        self.note("came_out", error="", same=False)
        return False

    def count(self, counters: list[Counter], inputs: int, **options: Any) -> None:
        """Run a context of the kit's own joinables."""
        self.run(counters, inputs, [counter.step for counter in counters], **options)

    def fail_at_end(self, joinables: list[Any], steps: Steps) -> None:
        """Run contexts in which a collective of a post hook fails on a rank.

        The joinables are between two others, whose post hooks show the driver that theirs begin,
        and that they are over.
        """
        failing = self.driver.failing
        begin = Marker(self.driver, self.notify, failing.begin_post_hooks)
        end = Marker(self.driver, self.notify, failing.end_post_hooks)
        for inputs in self.lengths:
            self.run([begin, *joinables, end], self.own(inputs), [begin.step, *steps, end.step])

    def note(self, name: str, /, **fields: Any) -> None:
        self.driver.recorder.event(name, **fields)
        if self.reader:
            self.reader.at(name)


class JudgedContext(Contexts):
    """A context that is judged; each public method is a variant of the scenarios."""

    def even(self) -> None:
        """Make new joinables for each context."""
        for inputs in self.lengths:
            self.count(self.counters(), self.own(inputs))

    uneven = even

    def keywords(self) -> None:
        for inputs in self.lengths:
            self.count(self.counters(), self.own(inputs), **KEYWORDS)

    crowd = keywords

    def again(self) -> None:
        """Use the same joinables again, in another order and number."""
        counters = self.counters()
        for number, inputs in enumerate(self.lengths):
            self.count(self.in_order(counters, number), self.own(inputs))

    def disabled(self) -> None:
        counters = self.counters()
        for inputs in self.lengths:
            self.count(counters, self.own(inputs), enable=False)

    def throws(self) -> None:
        counters = self.counters()
        steps: Steps = [counter.step for counter in counters]
        for inputs in self.lengths:
            self.run_to_its_error(
                counters, self.own(inputs), steps, throw_on_early_termination=True
            )

    def throws_ddp(self) -> None:
        for inputs in self.lengths:
            ddp = self._ddp(Model(self.driver, has_collective=True))
            trains: Steps = [self._trains(ddp, steps_too=False)]
            self.run_to_its_error([ddp], self.own(inputs), trains, throw_on_early_termination=True)

    def raises(self) -> None:
        """Raise in a context; then run one in which no rank raises.

        Rank 0's exception leaves the context before its peers raise theirs.
        """
        counters = self.counters()
        steps: Steps = [counter.step for counter in counters]
        self.break_off(counters, self.own(self.lengths[0]), steps, 0)
        self.count(counters, self.own(self.lengths[1]))

    def ddp(self) -> None:
        """Run contexts in which all ranks divide, then contexts in which only trainers divide."""
        half = len(self.lengths) // 2
        for number, inputs in enumerate(self.lengths):
            model = Model(self.driver)
            ddp = self._ddp(model)
            options: dict[str, Any] = (
                {} if number < half else {"divide_by_initial_world_size": False}
            )
            self.run([ddp], self.own(inputs), [self._trains(ddp, steps_too=True)], **options)
            self._keep(model)

    def zero(self) -> None:
        """Join DDP, a setter of gradients on joined ranks, and a sharded optimizer."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        for inputs in self.lengths:
            model = Model(self.driver)
            ddp = self._ddp(model)
            params = list(model.parameters())
            zero = ZeroRedundancyOptimizer(
                params, torch.optim.SGD, process_group=self.driver.group, lr=LEARNING_RATE
            )
            joinables = [ddp, Setter(self.driver, params, inputs), zero]
            steps: Steps = [self._trains(ddp, steps_too=False), zero.step]
            self.run(joinables, self.own(inputs), steps)
            self._keep(model)

    def wrong(self) -> None:
        """Make contexts of arguments that a context has to refuse."""
        other = dist.new_group(list(range(self.driver.world)))
        counter = Counter(self.driver, 0, self.notify)
        on_other_group = Counter(self.driver, 1, self.notify, other)
        given: dict[str, list[Any]] = {
            "no joinables": [],
            "joinables on two groups": [counter, on_other_group],
            "something that is no joinable": [object()],
        }
        for what, joinables in given.items():
            self.run_to_its_error(joinables, 0, [])
            self.note("given", what=what)

    def outside(self) -> None:
        """Step outside of a context: before it, and after each way to leave it."""
        counters = self.counters()[:2]
        error = ArithmeticError("raised in the context")
        ddp = self._ddp(Model(self.driver))
        trains = self._trains(ddp, steps_too=False)
        for _ in range(2):
            trains()  # DDP regroups its buckets in the second

        def raising() -> None:
            raise error

        for name, joinables, steps in (
            ("two counters", counters, [counter.step for counter in counters]),
            ("DistributedDataParallel", [ddp], [trains]),
        ):
            self._step_outside(name, "before", steps)
            self.run(joinables, self.own(self.lengths[0]), steps)
            self._step_outside(name, "after a context", steps)
            self.run_to_its_error(joinables, 1, steps, raising, error)
            self._step_outside(name, "after an exception in one", steps)
            self.run(joinables, 1, steps, enable=False)
            self._step_outside(name, "after one with enable=False", steps)

    def _step_outside(self, name: str, when: str, steps: Steps) -> None:
        self.note("outside", name=name, when=when, at="begin")
        for step in steps:
            step()
        self.note("outside", name=name, when=when, at="end")

    def _ddp(self, model: Model) -> DistributedDataParallel:
        cap = self.driver.scenario.ddp.bucket_cap_mb
        return self.driver.data_parallel(model, bucket_cap_mb=cap)

    def _trains(self, ddp: DistributedDataParallel, steps_too: bool) -> Callable[[], None]:
        """Return DDP's work in a step: a backward that leaves crafted gradients.

        The gradients are recorded.

        Args:
            steps_too: step the parameters with the gradients.
        """
        params = list(ddp.module.probe.tensors)
        numbers = itertools.count()

        def train() -> None:
            step = next(numbers)
            for parameter in params:
                parameter.grad = None
            indices = range(len(params))
            ddp([self.driver.values("crafted", step, index) for index in indices]).backward()
            for index, parameter in enumerate(params):
                assert parameter.grad is not None
                self.driver.keep(f"{step}/grad/p{index}", parameter.grad)
                if steps_too:
                    parameter.data.sub_(LEARNING_RATE * parameter.grad)

        return train

    def _keep(self, model: Model) -> None:
        for index, parameter in enumerate(model.probe.tensors):
            self.driver.keep(f"parameter/p{index}", parameter)
        self.driver.keep("buffer", model.steps)
        self.driver.keep("buffer/seen", model.seen)
        self.driver.keep("buffer/mask", model.mask)

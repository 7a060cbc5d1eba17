"""The driver of joins: ranks run out of inputs in a join context, and record each call.

The subject is a join context, or a joinable that is run in torch's context.
"""

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.nn.parallel import DistributedDataParallel

from conformance.errors import TargetError
from conformance.ranks.drivers._joinables import Counter, Model, Setter
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.resolve import Factory
from conformance.scenarios.joinable import JOINABLES, KEYWORDS, LEARNING_RATE, lengths, order

Steps = Sequence[Callable[[], object]]
"""The work of a context's joinables in each step."""

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
            self._run_context(_Context(self, subject, function.notify_join_context))
            return
        make = functools.partial(self._make_from, function, arguments)
        made = make()
        if _is_context(made):
            self._run_context(_Context(self, made, made.notify_join_context))
        else:
            self._run_joinable(made, make)

    def _make_from(self, function: Any, arguments: dict[str, Any]) -> Any:
        """Return the object that the target makes, or the target if it is an object itself."""
        is_joinable = hasattr(function, "join_hook") and not isinstance(function, type)
        if not callable(function) or is_joinable:
            return function
        with self.doing("make"):
            return Factory(function, arguments).make(self.context)

    def _run_context(self, context: "_Context") -> None:
        self.recorder.event("subject", is_context=True)
        getattr(context, self.scenario.variant)()

    def _run_joinable(self, made: Any, make: Callable[[], Any]) -> None:
        if not hasattr(made, "join_hook"):
            name = getattr(made, "__name__", type(made).__name__)
            raise TargetError(
                "a join context has notify_join_context, a joinable has join_hook; "
                f"{name} has neither"
            )
        if not callable(made) and not callable(getattr(made, "step", None)):
            raise TargetError(
                "a joinable can be called, or has a method step(); "
                f"{type(made).__name__} has neither"
            )
        self.recorder.event("subject", is_context=False)
        # Some experiments need control over each step of the context: they leave joinables out.
        variant = getattr(_Joinable(self, made, make), self.scenario.variant, None)
        if variant and self.scenario.order == "free":
            variant()


def _is_context(value: Any) -> bool:
    return hasattr(value, "notify_join_context") and not hasattr(value, "join_hook")


class _Contexts:
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
        group = driver.scenario.group_of(driver.rank, driver.world)
        self.lengths = lengths(driver.scenario, group)

    def counters(self) -> list[Counter]:
        return [Counter(self.driver, index, self.notify) for index in range(JOINABLES)]

    def own(self, inputs: tuple[int, ...]) -> int:
        """Return the number of this rank's inputs."""
        return inputs[self.driver.group_rank]

    def run(self, joinables: list[Any], inputs: int, steps: Steps, **options: Any) -> None:
        """Train in a context, for as many steps as there are inputs."""
        with self._inside(joinables):
            self._train(joinables, inputs, steps, options)

    def run_to_its_error(
        self,
        joinables: list[Any],
        inputs: int,
        steps: Steps,
        then: Callable[[], object] = lambda: None,
        raised: Any = None,
        **options: Any,
    ) -> None:
        """Train in a context, and record whether an exception leaves it.

        Args:
            then: called in the context when the steps are over.
            raised: the exception that ``then`` raises.
        """
        with self._inside(joinables):
            try:
                self._train(joinables, inputs, steps, options, then)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:300]
                self.note("came_out", error=text, same=error is raised)
            else:
                self.note("came_out", error="", same=False)

    @contextmanager
    def _inside(self, joinables: list[Any]) -> Iterator[None]:
        self.driver.begin_step(self._contexts, "context")
        self._contexts += 1
        names = ", ".join(type(joinable).__name__ for joinable in joinables)
        with self.driver.inside(f"the context of {names}"):
            yield

    def _train(
        self,
        joinables: list[Any],
        inputs: int,
        steps: Steps,
        options: dict[str, Any],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        with self.join(joinables, **options):
            self.note("begun")
            for at in range(inputs):
                for step in steps:
                    step()
                self.note("took", at=at)
            then()
            self.note("leaving")
        self.note("left")

    def count(self, counters: list[Counter], inputs: int, **options: Any) -> None:
        """Run a context of the kit's own joinables."""
        self.run(counters, inputs, [counter.step for counter in counters], **options)

    def note(self, name: str, /, **fields: Any) -> None:
        self.driver.recorder.event(name, **fields)


class _Context(_Contexts):
    """A context that is judged; each public method is a variant of the scenarios."""

    def even(self) -> None:
        """Make new joinables for each context."""
        for inputs in self.lengths:
            self.count(self.counters(), self.own(inputs))

    uneven = even

    def keywords(self) -> None:
        for inputs in self.lengths:
            self.count(self.counters(), self.own(inputs), **KEYWORDS)

    def again(self) -> None:
        """Use the same joinables again, in another order and number."""
        counters = self.counters()
        for number, inputs in enumerate(self.lengths):
            chosen = [counters[index] for index in order(self.driver.scenario, number)]
            self.count(chosen, self.own(inputs))

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
        error = ArithmeticError(f"rank {self.driver.rank} raises this")

        def raising() -> None:
            if self.driver.group_rank:
                self.driver.barrier("rank 0 is out")
            raise error

        steps: Steps = [counter.step for counter in counters]
        self.run_to_its_error(counters, self.own(self.lengths[0]), steps, raising, error)
        if not self.driver.group_rank:
            self.driver.barrier("rank 0 is out")
        self.count(counters, self.own(self.lengths[1]))

    def ddp(self) -> None:
        """Run contexts in which all ranks divide, then contexts in which only trainers divide."""
        half = len(self.lengths) // 2
        for number, inputs in enumerate(self.lengths):
            model = Model(self.driver)
            ddp = self._ddp(model)
            options = {} if number < half else {"divide_by_initial_world_size": False}
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


class _Joinable(_Contexts):
    """A joinable that is judged, in torch's context; it may draw random numbers.

    Args:
        driver: of this rank.
        made: a joinable.
        make: makes more of them.
    """

    def __init__(self, driver: RankDriver, made: Any, make: Callable[[], Any]) -> None:
        torchs = TorchsJoin.notify_join_context

        def notify(joinable: Any) -> Any:
            self.note("says", own=joinable is self.subject)
            return torchs(joinable)

        TorchsJoin.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]
        super().__init__(driver, TorchsJoin, notify)
        self.subject = made
        self._make = make

    @contextmanager
    def _inside(self, joinables: list[Any]) -> Iterator[None]:
        torch_state = torch.get_rng_state()
        python_state = random.getstate()
        cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        # torch's own context changes the filters of warnings, which is not the joinable's fault.
        with super()._inside(joinables), warnings.catch_warnings():
            yield
            # Put back inside the call, so that numbers drawn there do not count as a change.
            torch.set_rng_state(torch_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state)
            random.setstate(python_state)

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

    def throws(self) -> None:
        for number, inputs in enumerate(self.lengths):
            self.subject = self._make() if number else self.subject
            self.run_to_its_error(
                [self.subject], self.own(inputs), [self._step], throw_on_early_termination=True
            )

    def _run_beside(
        self, counter: Counter, inputs: tuple[int, ...], is_first: bool = True, **options: Any
    ) -> None:
        joinables: list[Any] = [self.subject, counter]
        steps: Steps = [self._step, counter.step]
        direction = 1 if is_first else -1
        self.run(joinables[::direction], self.own(inputs), steps[::direction], **options)

    def _step(self) -> None:
        self.note("takes")
        if callable(self.subject):
            self.subject()
        else:
            self.subject.step()

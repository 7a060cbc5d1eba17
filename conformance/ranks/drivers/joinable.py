"""What ranks do with a join context, or with a joinable in torch's: they run out of inputs, and write down who did what."""

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

Steps = Sequence[Callable[[], object]]  # what the joinables of a context do in each step


def play(stage: RankDriver) -> None:
    """Run the scenario's contexts."""
    subject = stage.make()
    function: Any = subject.func if isinstance(subject, functools.partial) else subject
    if _is_context(function):
        if given := {"enable", "throw_on_early_termination"} & getattr(subject, "keywords", {}).keys():
            raise TargetError(f"{', '.join(sorted(given))}: the scenarios say so; leave it out of the target")
        context = _Context(stage, subject, function.notify_join_context)
    else:
        make = functools.partial(_made, stage, function, getattr(subject, "keywords", {}))
        made = make()
        if not _is_context(made):
            _of_a_joinable(stage, made, make)
            return
        context = _Context(stage, made, made.notify_join_context)
    stage.recorder.event("subject", is_context=True)
    getattr(context, stage.scenario.variant)()


def _is_context(value: Any) -> bool:
    return hasattr(value, "notify_join_context") and not hasattr(value, "join_hook")


def _made(stage: RankDriver, function: Any, arguments: dict[str, Any]) -> Any:
    """Return what the target makes, or what it is."""
    if not callable(function) or (hasattr(function, "join_hook") and not isinstance(function, type)):
        return function
    stage.where = "make"
    made = Factory(function, arguments).make(stage.context)
    stage.where = "kit"
    return made


def _of_a_joinable(stage: RankDriver, made: Any, make: Callable[[], Any]) -> None:
    if not hasattr(made, "join_hook"):
        name = getattr(made, "__name__", type(made).__name__)
        raise TargetError(f"a join context has notify_join_context, a joinable has join_hook; {name} has neither")
    if not callable(made) and not callable(getattr(made, "step", None)):
        raise TargetError(f"a joinable can be called, or has step(), which is one step of it; {type(made).__name__} has neither")
    stage.recorder.event("subject", is_context=False)
    case = getattr(_Joinable(stage, made, make), stage.scenario.variant, None)
    if case and stage.scenario.order == "free":
        case()


class _Contexts:
    """Contexts, one after another.

    Args:
        stage: of this rank.
        join: makes one.
        notify: says in one that this rank still trains.
    """

    def __init__(self, stage: RankDriver, join: Callable[..., Any], notify: Callable[[Any], Any]) -> None:
        self.stage, self.join, self.notify, self._contexts = stage, join, notify, 0
        self.lengths = lengths(stage.scenario, stage.scenario.group_of(stage.rank, stage.world))

    def counters(self) -> list[Counter]:
        return [Counter(self.stage, index, self.notify) for index in range(JOINABLES)]

    def run(self, joinables: list[Any], inputs: int, steps: Steps, **options: Any) -> None:
        """Train in a context, for as many steps as there are inputs."""
        with self._inside(joinables):
            self._train(joinables, inputs, steps, options)

    def run_to_its_error(
        self, joinables: list[Any], inputs: int, steps: Steps, then: Callable[[], object] = lambda: None, raised: Any = None, **options: Any
    ) -> None:
        """The same, and write down whether an exception comes out of it.

        Args:
            then: called in the context when the steps are over.
            raised: the exception that it raises.
        """
        with self._inside(joinables):
            try:
                self._train(joinables, inputs, steps, options, then)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:300]
                self.note("came_out", error=said, same=error is raised)
            else:
                self.note("came_out", error="", same=False)

    @contextmanager
    def _inside(self, joinables: list[Any]) -> Iterator[None]:
        self.stage.begin_step(self._contexts, "context")
        self._contexts += 1
        with self.stage.inside(f"the context of {', '.join(type(joinable).__name__ for joinable in joinables)}"):
            yield

    def _train(
        self, joinables: list[Any], inputs: int, steps: Steps, options: dict[str, Any], then: Callable[[], object] = lambda: None
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
        self.stage.recorder.event(name, **fields)


class _Context(_Contexts):
    """A context that is judged; each method is a case of the scenarios."""

    def even(self) -> None:
        """With new joinables in each context; so in the others too."""
        for inputs in self.lengths:
            self.count(self.counters(), inputs[self.stage.group_rank])

    uneven = even

    def keywords(self) -> None:
        for inputs in self.lengths:
            self.count(self.counters(), inputs[self.stage.group_rank], **KEYWORDS)

    def again(self) -> None:
        counters = self.counters()
        for number, inputs in enumerate(self.lengths):
            self.count([counters[index] for index in order(self.stage.scenario, number)], inputs[self.stage.group_rank])

    def disabled(self) -> None:
        counters = self.counters()
        for inputs in self.lengths:
            self.count(counters, inputs[self.stage.group_rank], enable=False)

    def throws(self) -> None:
        counters = self.counters()
        steps: Steps = [counter.step for counter in counters]
        for inputs in self.lengths:
            self.run_to_its_error(counters, inputs[self.stage.group_rank], steps, throw_on_early_termination=True)

    def throws_ddp(self) -> None:
        for inputs in self.lengths:
            ddp = self._ddp(Model(self.stage, has_collective=True))
            trains: Steps = [self._trains(ddp, step_too=False)]
            self.run_to_its_error([ddp], inputs[self.stage.group_rank], trains, throw_on_early_termination=True)

    def raises(self) -> None:
        """Rank 0's exception is out before its peers raise theirs; then a context that nobody raises in."""
        counters = self.counters()
        error = ArithmeticError(f"rank {self.stage.rank} raises this")

        def raising() -> None:
            if self.stage.group_rank:
                self.stage.barrier("rank 0 is out")
            raise error

        steps: Steps = [counter.step for counter in counters]
        self.run_to_its_error(counters, self.lengths[0][self.stage.group_rank], steps, raising, error)
        if not self.stage.group_rank:
            self.stage.barrier("rank 0 is out")
        self.count(counters, self.lengths[1][self.stage.group_rank])

    def ddp(self) -> None:
        """Two contexts in which all ranks divide, and two in which those do that have inputs."""
        half = len(self.lengths) // 2
        for number, inputs in enumerate(self.lengths):
            model = Model(self.stage)
            ddp = self._ddp(model)
            options = {} if number < half else {"divide_by_initial_world_size": False}
            self.run([ddp], inputs[self.stage.group_rank], [self._trains(ddp, step_too=True)], **options)
            self._keep(model)

    def zero(self) -> None:
        """DDP, what sets the gradients of ranks that have joined, and a sharded optimizer."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        for inputs in self.lengths:
            model = Model(self.stage)
            ddp, params = self._ddp(model), list(model.parameters())
            zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, process_group=self.stage.group, lr=LEARNING_RATE)
            joinables = [ddp, Setter(self.stage, params, inputs), zero]
            self.run(joinables, inputs[self.stage.group_rank], [self._trains(ddp, step_too=False), zero.step])
            self._keep(model)

    def wrong(self) -> None:
        other = dist.new_group(list(range(self.stage.world)))
        counter, elsewhere = Counter(self.stage, 0, self.notify), Counter(self.stage, 1, self.notify, other)
        given: dict[str, list[Any]] = {
            "no joinables": [],
            "joinables on two groups": [counter, elsewhere],
            "something that is no joinable": [object()],
        }
        for what, joinables in given.items():
            self.run_to_its_error(joinables, 0, [])
            self.note("given", what=what)

    def outside(self) -> None:
        """Steps outside of the context: before it, and after each way to leave it."""
        counters, error = self.counters()[:2], ArithmeticError("raised in the context")
        ddp = self._ddp(Model(self.stage))
        trains = self._trains(ddp, step_too=False)
        for _ in range(2):
            trains()  # DDP regroups its buckets in the second

        def raising() -> None:
            raise error

        for name, joinables, steps in (
            ("two counters", counters, [counter.step for counter in counters]),
            ("DistributedDataParallel", [ddp], [trains]),
        ):
            self._outside(name, "before", steps)
            self.run(joinables, self.lengths[0][self.stage.group_rank], steps)
            self._outside(name, "after a context", steps)
            self.run_to_its_error(joinables, 1, steps, raising, error)
            self._outside(name, "after an exception in one", steps)
            self.run(joinables, 1, steps, enable=False)
            self._outside(name, "after one with enable=False", steps)

    def _outside(self, name: str, when: str, steps: Steps) -> None:
        self.note("outside", name=name, when=when, at="begin")
        for step in steps:
            step()
        self.note("outside", name=name, when=when, at="end")

    def _ddp(self, model: Model) -> DistributedDataParallel:
        return self.stage.data_parallel(model, bucket_cap_mb=self.stage.scenario.ddp.bucket_cap_mb)

    def _trains(self, ddp: DistributedDataParallel, step_too: bool) -> Callable[[], None]:
        """Return what DDP does in a step: its backward leaves crafted gradients; they are on record, and stepped by."""
        params, numbers = list(ddp.module.probe.tensors), itertools.count()

        def train() -> None:
            step = next(numbers)
            for parameter in params:
                parameter.grad = None
            ddp([self.stage.values("crafted", step, index) for index in range(len(params))]).backward()
            for index, parameter in enumerate(params):
                assert parameter.grad is not None
                self.stage.keep(f"{step}/grad/p{index}", parameter.grad)
                if step_too:
                    parameter.data.sub_(LEARNING_RATE * parameter.grad)

        return train

    def _keep(self, model: Model) -> None:
        for index, parameter in enumerate(model.probe.tensors):
            self.stage.keep(f"parameter/p{index}", parameter)
        self.stage.keep("buffer", model.steps)


class _Joinable(_Contexts):
    """A joinable that is judged, in torch's context; it draws what random numbers it likes.

    Args:
        stage: of this rank.
        made: one.
        make: makes more.
    """

    def __init__(self, stage: RankDriver, made: Any, make: Callable[[], Any]) -> None:
        says = TorchsJoin.notify_join_context

        def notify(joinable: Any) -> Any:
            self.note("says", own=joinable is self.subject)
            return says(joinable)

        TorchsJoin.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]
        super().__init__(stage, TorchsJoin, notify)
        self.subject, self._make = made, make

    @contextmanager
    def _inside(self, joinables: list[Any]) -> Iterator[None]:
        state, pythons = torch.get_rng_state(), random.getstate()
        of_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        with super()._inside(joinables), warnings.catch_warnings():  # torch's context changes the filters
            yield
            torch.set_rng_state(state)
            if of_cuda is not None:
                torch.cuda.set_rng_state(of_cuda)
            random.setstate(pythons)

    def even(self) -> None:
        """By itself; a new one in each context."""
        for number, inputs in enumerate(self.lengths):
            self.subject = self._make() if number else self.subject
            self.run([self.subject], inputs[self.stage.group_rank], [self._step])

    uneven = even

    def keywords(self) -> None:
        for inputs in self.lengths:
            self._beside(Counter(self.stage, 0, self.notify), inputs, **KEYWORDS)

    def again(self) -> None:
        """Beside another joinable, first and last in turn."""
        counter = Counter(self.stage, 0, self.notify)
        for number, inputs in enumerate(self.lengths):
            self._beside(counter, inputs, is_first=number % 2 == 0)

    def throws(self) -> None:
        for number, inputs in enumerate(self.lengths):
            self.subject = self._make() if number else self.subject
            self.run_to_its_error([self.subject], inputs[self.stage.group_rank], [self._step], throw_on_early_termination=True)

    def _beside(self, counter: Counter, inputs: tuple[int, ...], is_first: bool = True, **options: Any) -> None:
        joinables: list[Any] = [self.subject, counter]
        steps: Steps = [self._step, counter.step]
        turn = 1 if is_first else -1
        self.run(joinables[::turn], inputs[self.stage.group_rank], steps[::turn], **options)

    def _step(self) -> None:
        self.note("takes")
        self.subject() if callable(self.subject) else self.subject.step()

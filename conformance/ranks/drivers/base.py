"""The life of a rank, which is the same for every kind of subject."""

import gc
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.errors import TargetError
from conformance.ranks.instruments import process_state
from conformance.ranks.instruments.collective_recorder import CollectiveRecorder
from conformance.ranks.instruments.default_dtype import default_dtype, set_default_dtype
from conformance.ranks.instruments.failing_collective import FailingCollective
from conformance.ranks.instruments.kept import KeptRecorder
from conformance.ranks.instruments.patches import Patches
from conformance.ranks.instruments.process_settings import settings
from conformance.ranks.instruments.schedule import Schedule
from conformance.ranks.instruments.source_files import imported_modules, source_files
from conformance.ranks.instruments.subject_calls import SubjectCalls
from conformance.ranks.placement import dispatch_key, place_on_machine, take_place
from conformance.ranks.process import scatter_heap
from conformance.ranks.process_groups import end_groups, everybody, make_groups
from conformance.ranks.resolve import Context, Factory, call_with_names, resolve
from conformance.records.files import STATE
from conformance.records.recorder import Recorder
from conformance.scenarios.averager_training import option
from conformance.scenarios.gradients import gradient
from conformance.scenarios.model import Scenario
from conformance.subjects.kinds import KINDS
from conformance.subjects.spec import SubjectSpec

# Made when the host imports this module, and the host runs no code of the subject.
_PATCHES = Patches()

KIT = "kit"
"""The activity of the kit itself: an error during this activity is not the subject's."""


# Drivers of ranks on which a collective has failed; their process is about to end.
_LEFT: list["RankDriver"] = []


class RankDriver(ABC):
    """One rank of one scenario; each kind of subject has a subclass.

    Args:
        scenario: the scenario to run.
        spec: the subject; None to do the same without any subject.
        rank, world: the number of this process, and how many processes there are.
        folder: the run's folder.
        timeout: of the process groups, in seconds.
        recorder: receives everything that rules will see.

    Attributes:
        device: the device of this rank's tensors.
        group, group_rank, size: the group that this rank works in, its rank there (not its global
            rank), and the number of ranks in the group.
        twin_group: the group of the twin, if the scenario has one.
        activity: the current activity, see :meth:`doing`. The kit's own is ``kit``.
        without_subject: whether this rank runs without a subject, for rules to compare with.
        saved: the folder in which another process of this rank has saved a state to go on from.
        calls: the calls into the subject.
        collectives: the collectives that this rank has issued.
        failing: may let a collective of this rank fail.
        own_modules: the modules of the subject's objects, as far as the driver knows them.
        own_keepers: objects of the driver that keep tensors from step to step.
    """

    # Calls of other kinds than hooks may run a whole backward, on threads of autograd.
    calls_own_all_threads: ClassVar[bool] = True
    # Other kinds wait for their peers as they like: only hooks are judged by their waits.
    records_waits: ClassVar[bool] = False
    own_keepers: tuple[object, ...] = ()

    def __init__(
        self,
        scenario: Scenario,
        spec: SubjectSpec | None,
        rank: int,
        world: int,
        folder: Path,
        timeout: float,
        recorder: Recorder,
    ) -> None:
        self.scenario = scenario
        self.spec = spec or SubjectSpec(kind=scenario.kind)
        self.without_subject = spec is None
        self.rank = rank
        self.world = world
        self.folder = folder
        self.timeout = timeout
        self.recorder = recorder
        self.activity = KIT
        self.saved: Path | None = None
        if scenario.resume.saved_in:
            saved_by = 0 if scenario.resume.of_rank_0 else rank
            self.saved = Path(scenario.resume.saved_in) / str(saved_by)
        self.calls = SubjectCalls(any_thread=self.calls_own_all_threads)
        self.collectives = self.make_collective_recorder()
        self.failing = FailingCollective(scenario, rank, recorder)
        self._meetings = 0
        self._heap_is_scattered = False
        self._patches: Patches | None = None
        self._is_imported = False
        self._kept: KeptRecorder | None = None
        self._modules_before = imported_modules()
        self.own_modules: set[str] = set()
        self._lasting: frozenset[str] = frozenset()

    # The life of a rank, in order.

    def execute(self) -> None:
        """Work with the subject, and record the work and its side effects."""
        own = self.folder / str(self.rank)
        place = place_on_machine(self.folder, self.rank)
        self.device = take_place(
            self.scenario.profile, place, str(own), separates_streams=self.scenario.delayed
        )
        self.set_up()
        self.meet()
        # The kit's own collectives are over: all that follow are the subject's or its trainer's.
        self.install_instruments()
        # After the instruments, whose threads and functions are not the subject's.
        self.record_start()
        if self.scenario.observe.growth:
            self._kept = KeptRecorder(len(self.scenario.steps), self.recorder, self._store)
        self.scatter_heap()
        self._lasting = frozenset(vars(self))
        self.failing.run(self.run)
        if self.failing.is_planned:
            # Nothing is put away: to end a group waits for collectives that peers never join.
            _LEFT.append(self)
            return
        if self.scenario.default_dtypes:
            set_default_dtype("float32")
        self.record_counts()
        self.close()
        self.record_end()
        # Last, since a peer that is still at work may need this process.
        self.end()

    def set_up(self) -> None:
        """Make the process groups."""
        self.signals, self.group, self.twin_group, self._store = make_groups(
            self.scenario, self.rank, self.world, self.folder, self.timeout, self.device
        )
        self.group_rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def meet(self) -> None:
        """Wait until no peer needs a connection to this rank for work of the kit.

        The subject may be refused next, so that this rank leaves.
        """
        # Each barrier needs keys of its own in the store.
        self.barrier(f"met/{self._meetings}")
        self._meetings += 1

    def install_instruments(self) -> None:
        """Install the instruments that all drivers share."""
        self.schedule = Schedule(
            self.scenario,
            self.rank,
            self.world,
            self.signals,
            self.recorder,
            self.calls,
            records_waits=self.records_waits,
        )
        if self.failing.is_planned:
            self.collectives.failing = self.failing
            self.failing.watch_peer(self.signals, self.timeout)
        if self.scenario.intercepts:
            self.collectives.install(self.schedule)
        self.schedule.install()

    def record_start(self) -> None:
        """Record the state of the process before the subject is imported."""
        self._modules_before = imported_modules()
        self._threads = process_state.threads()
        # Without a subject there is nobody to blame, and the functions need not be touched.
        if not self.without_subject:
            self._patches = _PATCHES
            # From here on: the kit and the backend's package have installed theirs.
            self._patches.renew()
            self.record_settings("start", threads=self._threads)

    def record_settings(self, at: str, **more: Any) -> None:
        """Record the settings of the process and the states of its generators.

        Args:
            at: the moment: ``start``, ``imported``, ``registered`` or ``end``.
            more: what else is known of the process at that moment.
        """
        state = {"process": settings(), "rng": process_state.rng()}
        self.recorder.event("state", at=at, **state, **more)

    def record_counts(self) -> None:
        """Record the resources in use at the end of the current step; before the first, as -1."""
        if not self.without_subject:
            self.recorder.event("counts", **process_state.counts())

    def scatter_heap(self) -> None:
        """Scatter this rank's heap, once, just before the first parameters are made.

        The kit's own objects would fill the scattered blocks if they were made in between. A
        driver that makes parameters in :meth:`set_up` therefore calls this method there.
        """
        if not self._heap_is_scattered:
            scatter_heap(self.rank)
            self._heap_is_scattered = True

    @abstractmethod
    def run(self) -> None:
        """Import the subject and run the scenario's steps."""

    def close(self) -> None:
        """End the work with the subject; later events belong to no step."""
        self.recorder.step = -1
        # The driver forgets everything that it made in ``run``. A subject may end its threads and
        # remove its files when it is collected, and its side effects are recorded after that.
        for name in set(vars(self)) - self._lasting:
            delattr(self, name)

    def record_end(self) -> None:
        """Record the state of the process after the subject's work."""
        # Objects in cycles end their threads and remove their files only when they are collected.
        gc.collect()
        process_state.let_threads_end(self._threads)
        if not self.without_subject:
            self.recorder.event(
                "sources", files=source_files(self._modules_before, self.own_modules)
            )
        if self._patches:
            found = self._patches.found()
            self.record_settings("end", **process_state.left_behind(), patches=found)

    def end(self) -> None:
        """Wait for all ranks and end the groups, unless a failure of the kit's keeps ranks away."""
        if self.scenario.fault.kind == "none":
            self.barrier("end")
            end_groups()

    def failed(self, error: BaseException) -> None:
        """Record an exception that ended the run."""
        self.recorder.event(
            "error",
            where=self.activity,
            torch=torch.__version__,
            type="target" if isinstance(error, TargetError) else type(error).__name__,
            message=str(error)[:4000],
            traceback=traceback.format_exc()[-6000:],
        )

    # Steps of that life that some drivers do in another way.

    def make_collective_recorder(self) -> CollectiveRecorder:
        """Return the recorder of this rank's collectives."""
        key = dispatch_key(self.scenario.profile)
        records = self.scenario.observe.collectives
        return CollectiveRecorder(self.recorder, self.calls, key, records=records)

    # For the drivers' own code.

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Attribute errors to an activity, such as ``state_dict``.

        An exception that leaves the block keeps the activity, so that :meth:`failed` records it.
        A driver that catches the exception sets :attr:`activity` itself.
        """
        before = self.activity
        self.activity = activity
        yield
        self.activity = before

    def target(self) -> Factory:
        """Import the subject's target, and return it with its arguments."""
        with self.doing("load"):
            target = resolve(self.spec).target
        assert target is not None
        if not self._is_imported:
            # An import may set what the work of a subject must not: rules compare from here on.
            self._is_imported = True
            self.record_settings("imported")
        return target

    def make(
        self,
        prepare: Callable[[Factory], Factory] = lambda target: target,
        /,
        **context: Callable[[], Any],
    ) -> Any:
        """Return the subject: the object that its target makes.

        If the kind is bound, it is the target itself, with its arguments.

        Args:
            prepare: returns the target in the form in which its kind takes it.
            context: values for the target's signature beside those of :attr:`context`.
        """
        target = prepare(self.target())
        # What is made once for every object grows with the objects that the kit has made.
        self.recorder.event("made", objects=1)
        with self.doing("make"), default_dtype(self.scenario.default_dtype(0)):
            return self._made(target, {**self.context, **context})

    @property
    def context(self) -> Context:
        """The values that the signature of any subject may name."""
        return {
            "process_group": lambda: self.group,
            "rank": lambda: self.group_rank,
            "world_size": lambda: self.size,
            "device": lambda: self.device,
        }

    def _made(self, target: Factory, context: Context) -> Any:
        function = target.function
        if KINDS[self.spec.kind].bound:
            return partial(function, **target.kwargs) if target.kwargs else function
        if target.kwargs or isinstance(function, (type, partial)) or hasattr(function, "__code__"):
            return target.make(context)
        return function  # an existing object

    def data_parallel(
        self,
        model: torch.nn.Module,
        made: DistributedDataParallel | None = None,
        **options: Any,
    ) -> DistributedDataParallel:
        """Return the model under DDP, after all ranks have made theirs.

        Args:
            model: the model.
            made: an object to make DDP of; by default it is a new one.
            options: of DDP; the group is this rank's, unless they name one.
        """
        ddp = made
        if ddp is None:
            ddp = DistributedDataParallel.__new__(DistributedDataParallel)
        DistributedDataParallel.__init__(ddp, model, **{"process_group": self.group, **options})
        self.meet()
        return ddp

    def begin_step(self, step: int, kind: str) -> None:
        """Record that a step begins; the events from here on belong to that step."""
        self.failing.begin_step(step)
        # A long run takes its counts at checkpoints (``LongRunTrainer``).
        if not self.scenario.long_run:
            self.record_counts()
        if self._kept:
            self._kept.before(step, self.own_keepers)
        self.recorder.step = step
        self.recorder.event("step", kind=kind)
        if self.scenario.default_dtypes:
            set_default_dtype(self.scenario.default_dtype(step))

    @contextmanager
    def inside(self, call: str, *, drawn: Container[str] = ()) -> Iterator[None]:
        """Run a block in which the subject is at work, in this rank's turn.

        The subject is blamed for its errors. After an error the call stays open, so that the
        collectives that follow count as its collectives.

        Args:
            call: the name of the call, for people: ``average_parameters``.
            drawn: the generators from which a model or a loop of the kit's draws in the call.
        """
        number = self.calls.begin()
        # The wait for this rank's turn is not the subject's: its call has not begun.
        self.schedule.enter(number)
        before = process_state.rng()
        with self.doing(call):
            self.calls.enter()
            self.recorder.event("enters", what=call)
            yield
        self.calls.leave()
        after = process_state.rng()
        # A generator that the call has brought along had no state before.
        changed = [
            name
            for name, state in after.items()
            if before.get(name, state) != state and name not in drawn
        ]
        self.recorder.event("leaves", what=call, rng_changed=changed)
        self.schedule.left(number, is_last=True)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return autocast to bfloat16, or to the scenario's dtypes, one a step, if the scenario has
        it. Otherwise return an empty context.
        """
        if self.scenario.variant != "autocast":
            return nullcontext()
        dtypes = (option(self.scenario, "autocast") or "bfloat16").split("/")
        dtype = dtypes[max(self.recorder.step, 0) % len(dtypes)]
        return torch.autocast(self.device.type, dtype=getattr(torch, dtype))

    def call(self, function: Callable[..., Any], context: Context, **kwargs: Any) -> Any:
        """Call a function of the subject with ``kwargs`` and the context its signature names."""
        return call_with_names(function, kwargs, context)

    def let_peers_in(self) -> None:
        """Let peers enter, since this rank is about to wait for them in a hidden way."""
        self.schedule.let_go()

    def values(self, kind: str, step: int, index: int, rank: int | None = None) -> torch.Tensor:
        """Return this rank's input for a parameter at a step, as ``Run.fed`` returns it to rules.

        Args:
            rank: another rank, whose input is wanted.
        """
        spec = self.scenario.params[index]
        values = gradient(
            kind,
            spec.shape,
            getattr(torch, spec.dtype),
            world=self.size,
            rank=self.rank if rank is None else rank,
            step=step,
            param=index,
            exponent=spec.exponent,
        )
        return values.to(self.device)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Record a copy of a tensor, as ``step/name``."""
        self.recorder.tensor(f"{self.recorder.step}/{name}", tensor)

    def save(self, state: Any) -> None:
        """Keep a state for the process that goes on with it."""
        torch.save(state, self.folder / str(self.rank) / STATE)

    def load(self, rank: int | None = None) -> Any:
        """Return the state that :meth:`save` has kept, on this rank or another."""
        assert self.saved is not None
        saver = self.rank if rank is None else rank
        # The state may hold objects of the subject's own classes.
        return torch.load(self.saved.parent / str(saver) / STATE, weights_only=False)

    def barrier(self, name: str) -> None:
        """Wait for all ranks, through the store."""
        everybody(self.signals, name, self.rank, self.world, self.timeout)

"""Where a rank works with a subject that is no hook: its group, its inputs, its record, and the way to the subject."""

import gc
import importlib
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.errors import TargetError
from conformance.ranks.instruments import process_state
from conformance.ranks.instruments.collective_recorder import CollectiveRecorder
from conformance.ranks.instruments.schedule import Schedule
from conformance.ranks.placement import dispatch_key, place_on_machine, take_place
from conformance.ranks.process import scatter_heap
from conformance.ranks.process_groups import end_groups, everybody, make_groups
from conformance.ranks.resolve import Factory, call_with_names, resolve_other
from conformance.records.files import STATE
from conformance.records.recorder import Recorder
from conformance.scenarios.gradients import gradient
from conformance.scenarios.model import Scenario
from conformance.subjects.kinds import KINDS
from conformance.subjects.spec import SubjectSpec


class RankDriver:
    """One rank of one scenario of such a kind.

    Attributes:
        scenario, rank, world: what is run, and which of how many processes this is.
        device: where its tensors are.
        group, group_rank, size: the group that this rank works in, its place in there (not its global rank), and how many it has.
        recorder: what rules will see.
        without_subject: whether ranks do the same without any subject, for rules to compare with.
        saved: the folder that another process of this rank has saved into, where it is to go on from there; or None.
    """

    def __init__(
        self, scenario: Scenario, spec: SubjectSpec | None, rank: int, world: int, folder: Path, timeout: float, recorder: Recorder
    ) -> None:
        self.scenario, self.rank, self.world, self.recorder = scenario, rank, world, recorder
        self._folder, self._timeout = folder, timeout
        self.without_subject, self._spec = spec is None, spec or SubjectSpec(kind=scenario.kind)
        self.saved = Path(scenario.resume.saved_in) / str(rank) if scenario.resume.saved_in else None
        self.where = "kit"
        self._inside, self._calls, self._met = 0, 0, 0
        self.collectives = CollectiveRecorder(self._issued if scenario.observe.collectives else None, key=dispatch_key(scenario.profile))

    def execute(self) -> None:
        """Work with the subject, and write down what it leaves behind."""
        self.device = take_place(self.scenario.profile, place_on_machine(self._folder, self.rank), str(self._folder / str(self.rank)))
        self.signals, self.group = make_groups(self.scenario, self.rank, self.world, self._folder, self._timeout, self.device)
        self.group_rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._meet()
        self._schedule = Schedule(self.scenario, self.rank, self.world, self.signals, self._is_inside, lambda: None, self._stuck)
        if self.scenario.intercepts:
            self.collectives.install()
        self._schedule.install()
        threads, patches = process_state.threads(), process_state.Patches() if self.scenario.watches_process else None
        if patches:
            self.recorder.event("state", at="start", process=process_state.snapshot(), threads=threads)
        scatter_heap(self.rank)
        importlib.import_module(f"conformance.ranks.drivers.{self.scenario.kind}").play(self)
        self.recorder.step = -1
        gc.collect()
        process_state.let_threads_end(threads)
        if patches:
            self.recorder.event("state", at="end", **process_state.left_behind(), patches=patches.found())
        everybody(self.signals, "end", self.rank, self.world, self._timeout)
        end_groups()

    def failed(self, error: BaseException) -> None:
        """Write down an exception that ended the run."""
        kind = "target" if isinstance(error, TargetError) else type(error).__name__
        self.recorder.event("error", where=self.where, type=kind, message=str(error)[:4000], traceback=traceback.format_exc()[-6000:])

    def target(self) -> Factory:
        """Import what names the subject, and return it with its arguments."""
        self.where = "load"
        target = resolve_other(self._spec)
        self.where = "kit"
        return target

    def make(self, understood: Callable[[Factory], Factory] = lambda target: target, /, **context: Callable[[], Any]) -> Any:
        """Return the subject: made by its target, or, of a kind that is bound, the target with its arguments.

        Args:
            understood: returns a target as its kind understands it.
            context: what its signature may name beside ``process_group``, ``rank``, ``world_size`` and ``device``.
        """
        target = understood(self.target())
        self.where = "make"
        made = self._made(target, {**self.context, **context})
        self.where = "kit"
        return made

    @property
    def context(self) -> dict[str, Callable[[], Any]]:
        """What the signature of any subject may name."""
        return {
            "process_group": lambda: self.group,
            "rank": lambda: self.group_rank,
            "world_size": lambda: self.size,
            "device": lambda: self.device,
        }

    def _made(self, target: Factory, values: dict[str, Callable[[], Any]]) -> Any:
        if KINDS[self._spec.kind].bound:
            return partial(target.function, **target.kwargs) if target.kwargs else target.function
        if target.kwargs or isinstance(target.function, (type, partial)) or hasattr(target.function, "__code__"):
            return target.make(values)
        return target.function  # an object that is there already

    def data_parallel(self, model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """Return the model under DDP; all ranks have made theirs.

        Args:
            options: of DDP; the group is this rank's, unless they name one.
        """
        ddp = DistributedDataParallel(model, **{"process_group": self.group, **options})
        self._meet()
        return ddp

    def begin_step(self, step: int, kind: str) -> None:
        """Note that a step begins: what is recorded from here on belongs to it."""
        self.recorder.step = step
        self.recorder.event("step", kind=kind)

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """The subject is at work: what it raises is its own, and ranks take turns as the scenario says.

        Args:
            what: the call that is made, for people: ``average_parameters``.
        """
        call, self._calls = self._calls, self._calls + 1
        self._schedule.enter(call)
        watches = self.scenario.watches_process
        before = process_state.rng() if watches else {}
        self.where, self._inside = what, threading.get_ident()
        self.recorder.event("enters", what=what)
        yield
        self.where, self._inside = "kit", 0
        changed = {"rng_changed": [name for name, value in process_state.rng().items() if before[name] != value]} if watches else {}
        self.recorder.event("leaves", what=what, **changed)
        self._schedule.left(call, is_last=True)

    def call(self, function: Callable[..., Any], context: dict[str, Callable[[], Any]], **kwargs: Any) -> Any:
        """Call a function of the subject with what its signature names of ``context``, and with ``kwargs``."""
        return call_with_names(function, kwargs, context)

    def let_peers_in(self) -> None:
        """Have peers enter, where they take turns: this rank is about to wait for them in a way that cannot be seen."""
        self._schedule.let_go()

    def values(self, kind: str, step: int, index: int, rank: int | None = None) -> torch.Tensor:
        """Return what this rank feeds for one of the scenario's parameters at a step; rules get the same from ``Run.fed``."""
        spec = self.scenario.params[index]
        of = self.rank if rank is None else rank
        return gradient(kind, spec.shape, getattr(torch, spec.dtype), world=self.size, rank=of, step=step, param=index).to(self.device)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Put a copy of a tensor on record, as ``step/name``."""
        self.recorder.tensor(f"{self.recorder.step}/{name}", tensor)

    def save(self, state: Any) -> None:
        """Keep a state for the process that goes on with it."""
        torch.save(state, self._folder / str(self.rank) / STATE)

    def load(self, rank: int | None = None) -> Any:
        """Return what :meth:`save` has kept, on this rank or another."""
        assert self.saved is not None
        return torch.load(self.saved.parent / str(self.rank if rank is None else rank) / STATE, weights_only=False)

    def barrier(self, name: str) -> None:
        """Wait for all ranks, through the store."""
        everybody(self.signals, name, self.rank, self.world, self._timeout)

    def _meet(self) -> None:
        """Wait until no peer needs a connection any more for what the kit has done: this rank may be refused next, and leave."""
        self.barrier(f"met/{self._met}")
        self._met += 1

    def _is_inside(self) -> bool:
        return self._inside == threading.get_ident()

    def _stuck(self, call: int) -> None:
        self.recorder.event("gate", call=call, opened="a rank neither returned nor waited: the schedule was given up")

    def _issued(self, fingerprint: dict[str, Any]) -> None:
        self.recorder.event("collective", call=self._calls - 1, inside=bool(self._inside), callback=False, **fingerprint)

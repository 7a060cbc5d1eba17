"""TODO: conformance/ranks/drivers/hook.py."""

import contextlib
import datetime
import gc
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.errors import TargetError
from conformance.ranks.drivers.cuda_graph import on, side_stream, train_captured
from conformance.ranks.drivers.simulated_ranks import CannotSimulate, simulate
from conformance.ranks.drivers.uneven_inputs import train_unevenly
from conformance.ranks.instruments import process_state
from conformance.ranks.instruments.collective_recorder import CollectiveRecorder
from conformance.ranks.instruments.hook_observer import Observer, digest, line_of_subject
from conformance.ranks.instruments.peer_death import PeerDeath
from conformance.ranks.instruments.schedule import Schedule
from conformance.ranks.instruments.stream_delays import Streams
from conformance.ranks.models.ddp_model import Trainee
from conformance.ranks.models.probe import scripted_gradients, training_loss
from conformance.ranks.placement import dispatch_key, place_on_machine, take_place
from conformance.ranks.process import scatter_heap
from conformance.ranks.process_groups import end_groups, everybody, make_groups
from conformance.ranks.resolve import is_one_object, resolve
from conformance.records.files import PEER_DIED
from conformance.records.recorder import Recorder
from conformance.scenarios.gradients import at_scale, lay_out
from conformance.scenarios.model import Scenario
from conformance.subjects.spec import SubjectSpec

_UNPATCHED = process_state.Patches()  # made in the host, which runs nothing of the subject


class Injected(RuntimeError):
    """An error that the kit put into a collective."""


class HookDriver:
    """The state of one rank while it runs; ``where`` names what it is doing, for its record of an error."""

    def __init__(
        self, scenario: Scenario, spec: SubjectSpec | None, rank: int, world: int, folder: Path, timeout: float, recorder: Recorder
    ) -> None:
        self.scenario, self.spec, self.rank, self.world = scenario, spec, rank, world
        self.recorder, self.folder, self.timeout = recorder, folder, timeout
        self.group_ranks = scenario.group_of(rank, world)
        self.collectives = CollectiveRecorder(
            self._issued if scenario.observe.collectives or scenario.fault.kind == "peer_dies_later" else None,
            self._wait_for if scenario.serialised else None,
            dispatch_key(scenario.profile),
            scenario.observe.collectives and (scenario.serialised or scenario.profile.ordered),
        )
        self.registrations: list[Any] = []
        self.departure: PeerDeath | None = None
        self.where = "kit"

    def failed(self, error: BaseException) -> None:
        """Write down an exception that ended the run."""
        kind = "target" if isinstance(error, TargetError) else type(error).__name__
        self.recorder.event("error", where=self.where, type=kind, message=str(error)[:4000], traceback=traceback.format_exc()[-6000:])

    def execute(self) -> None:
        self.device = take_place(self.scenario.profile, place_on_machine(self.folder, self.rank), str(self.folder / str(self.rank)))
        self.side = side_stream(self.scenario.captured)
        with on(self.side):
            self.signals, self.group = make_groups(self.scenario, self.rank, self.world, self.folder, self.timeout, self.device)
            scatter_heap(self.rank)
            self.trainee = Trainee(self.scenario, self.group, self.device)
        self.twin = Trainee(self.scenario, self.group, self.device) if self.scenario.twin else None
        self._everybody("begin")  # whoever is refused by the subject and leaves now breaks no connection that a peer still needs
        self.ddp, self.parameters = self.trainee.ddp, self.trainee.parameters
        self.schedule = Schedule(self.scenario, self.rank, self.world, self.signals, self._is_inside, self._waits, self._stuck)
        self.observer = Observer(self.recorder, self.parameters, self._before_hook, self._after_hook, self.scenario.observe.other_gradients)
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        self.streams = Streams(self.rank, self.device, sizes, self._waited_for_device) if self.scenario.delayed else None
        if self.scenario.fault.kind == "peer_dies_later":
            self.departure = PeerDeath(self.rank, self.world, self.signals, self.collectives.settle, self.timeout)
        if self.scenario.intercepts:
            self.collectives.install()
        self.schedule.install()
        if self.streams:
            self.streams.install()
        self.threads = process_state.threads()
        if self.scenario.watches_process:
            self.recorder.event("state", at="start", process=process_state.snapshot(), rng=process_state.rng(), threads=self.threads)
        if not self.scenario.simulated:
            self._register()
        if self.scenario.watches_process:
            self.recorder.event("state", at="registered", process=process_state.snapshot(), rng=process_state.rng())
        steps = list(enumerate(self.scenario.steps[: self.scenario.inputs_of(self.rank, self.world)]))
        if self.scenario.resume.saved_in:
            steps = steps[self.scenario.resume.saves_at :]
        if self.scenario.simulated:
            self._simulate()
        elif self.scenario.captured:
            self._train_captured(steps)
        elif self.scenario.uneven:
            joined = self._joined_call if self.scenario.poststep else None
            train_unevenly(self.ddp, self.group, steps, self._step, self._shadow_step, joined)
        else:
            all(self._step(step, kind) for step, kind in steps)
        self._finish()

    def _simulate(self) -> None:
        """Write down what rank 0 of many gets, and whether it is what the others get; or why there is no telling."""
        self.where = "simulation"
        try:
            if self.spec is None or self.spec.setup:
                raise CannotSimulate("a set-up has to do with one model, which each simulated rank would need for itself")
            if self.scenario.poststep:
                raise CannotSimulate("its results come with a call after backward, and not with its futures")
            resolved = resolve(self.spec)
            for size in self.scenario.simulated:
                results = simulate(size, partial(self.trainee.make, resolved), self._bucket, at_scale(size).float())
                self.recorder.event("simulated", size=size, alike=bool((results == results[0]).all()))
                self.recorder.tensor(f"at scale/{size}", results[0])
        except Exception as error:
            said = str(error) if isinstance(error, CannotSimulate) else f"{type(error).__name__}: {error}"
            self.recorder.event("not simulated", why=said[:500])
        self.where = "kit"

    def _bucket(self) -> dist.GradBucket:
        return self.ddp.reducer._get_zeros_like_grad_buckets()[0]

    def _register(self) -> None:
        """Load the subject and register it, with an observer in between unless it is to run as it is."""
        if self.spec is None:
            return
        self._watch_registrations()
        self.where = "load"
        resolved, option = resolve(self.spec), f"--hook {self.spec.hook}"
        saved = Path(self.scenario.resume.saved_in) / str(self.rank) if self.scenario.resume.saved_in else None
        self.trainee.register(resolved, option, self._at, saved)
        if saved:
            self.recorder.event("loaded", weights_only=not self.trainee.loaded, why=self.trainee.loaded)
        if self.trainee.nameless:
            self.recorder.event("nameless", type=self.trainee.nameless)
        if self.twin:
            self.recorder.event("twin", one_object=is_one_object(resolved))
            self.twin.register(resolved, option, self._at)
        name = self.ddp._get_ddp_logging_data().get("comm_hook", "")
        self.recorder.event("registered", count=len(self.registrations), logged=str(name))
        self.where = "kit"

    def _at(self, where: str) -> None:
        self.where = where

    def _watch_registrations(self) -> None:
        """Put the observer between DDP and every hook that is registered in this process."""
        register = DistributedDataParallel.register_comm_hook
        seen, observed = self.registrations, self.scenario.observe.hook

        def register_comm_hook(ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
            # DDP checks the hook that it is given: the raw one first, so that its refusal is on record.
            ddp._check_comm_hook(hook)
            is_main = ddp is self.ddp
            register(ddp, state, self.observer.wrap(hook) if observed and is_main else hook)
            if is_main:
                seen.append(hook)

        DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]

    def _step(self, step: int, kind: str) -> bool:
        """Run one step; return false when an injected fault has ended the run as it should."""
        self.recorder.step = step
        self.recorder.event("step", kind=kind)
        if self.twin:
            self.where = "twin"
            self._step_twin(self.twin, step, kind)
        rng, parameters = self._generators(), self._digests()
        if self.trainee.case.on_step:
            self.where = "on_step"
            self.trainee.case.on_step(step)
        self.where = "forward"
        for share in self.scenario.microbatch_weights[:-1]:
            with self.ddp.no_sync():
                self._loss(step, kind, share).backward()
        loss = self._loss(step, kind, self.scenario.microbatch_weights[-1] * self.trainee.scale)
        faulty = self.scenario.fault.kind != "none" and step == self.scenario.fault.step
        if self.departure:
            self.departure.start_step(dies=faulty)
        if faulty and self.scenario.fault.kind == "collective_raises" and self.rank == 1:
            self.collectives.raise_next = lambda: Injected("injected by the conformance kit: this collective failed")
        if self.streams:
            self.streams.before_backward(step)
        self.where = "backward"
        if faulty:
            return self._faulty_backward(loss)
        try:
            loss.backward()
        finally:
            if self.streams:
                self.streams.after_backward()
            where, self.where = self.where, "kit"
            self.observer.after_backward()
            self.where = where
        self._after_backward()
        self.where = "kit"
        self._record_step(step, rng, parameters)
        if self.scenario.training_loop or not self.scenario.params:
            self.where = "optimizer"
            self.trainee.step()
            self.where = "kit"
            self._record_model(step)
        self.trainee.zero_grad(step)
        if self.scenario.order != "free":
            self.collectives.drain()
            self.recorder.event("sent", collectives=self.collectives.take_sent())
            self._everybody(f"drained/{step}")
        self.observer.at_rest()
        if step == self.scenario.resume.saves_at - 1:
            self.where = "save_state"
            self.trainee.save(self.folder / str(self.rank))
            self.where = "kit"
        if self.scenario.observe.memory:
            del loss
            memory = process_state.live_memory()
            on_host = {name: memory.pop(name) - self.recorder.held for name in ("tensors", "allocated")}
            self.recorder.event("memory", **on_host, **memory)
        return True

    def _train_captured(self, steps: list[tuple[int, str]]) -> None:
        """Capture a step in a CUDA graph and replay it; an error on the way to it is the hook's, as in any backward."""

        def begin(step: int, kind: str) -> None:
            self.observer.let_go()
            self.where, self.recorder.step = "kit", step
            self.recorder.event("step", kind=kind)
            if self.trainee.case.on_step:
                self.trainee.case.on_step(step)

        def keep(step: int) -> None:
            self._record_step(step, self._generators(), self._digests())

        self.where = "backward"
        forget = partial(self.trainee.optimizer.zero_grad, set_to_none=True)
        train_captured(self.side, self.ddp, forget, self._scripted, steps, begin, keep)

    def _after_backward(self) -> None:
        """Make the trainer's call, and write down which gradients it has changed."""
        call = self.trainee.case.after_backward
        if call is None:
            return
        self.where = "kit"
        early = self._gradients()
        self.where = "after_backward"
        call()
        self.where = "kit"
        late = self._gradients()
        self.recorder.event("called", changed=[name for name, bits in late.items() if bits != early[name]])

    def _gradients(self) -> dict[str, str]:
        return {name: "" if p.grad is None else digest(p.grad) for name, p in self.parameters.items() if p.numel() < 4096}

    def _step_twin(self, twin: Trainee, step: int, kind: str) -> None:
        """Train another model in between, on other inputs."""
        if twin.case.on_step:
            twin.case.on_step(step)
        grads = scripted_gradients(self.scenario.params, kind, len(self.group_ranks), self.rank, step + 7, self.device)
        twin.ddp([grad * -2 for grad in grads if grad is not None]).backward()
        if twin.case.after_backward:
            twin.case.after_backward()
        twin.zero_grad(step)

    def _shadow_step(self, step: int) -> None:
        """A step that others train in; this rank has run out of inputs, and DDP calls the hook with zeros."""
        self.observer.at_rest()
        self.where, self.recorder.step = "join", step
        self.recorder.event("step", kind="shadow")

    def _joined_call(self) -> None:
        """The end of such a step, where the trainer has a call to make."""
        self._after_backward()
        self.where = "join"
        self.trainee.zero_grad(self.recorder.step)

    def _loss(self, step: int, kind: str, share: int = 1) -> torch.Tensor:
        step += self.scenario.first_step
        if not self.scenario.params:
            return training_loss(self.ddp, self.rank, step, self.device)
        grads = self._scripted(step, kind)
        return self.ddp(grads if share == 1 else [grad if grad is None else grad * share for grad in grads])

    def _scripted(self, step: int, kind: str) -> list[torch.Tensor | None]:
        size, leaves_out = len(self.group_ranks), self.scenario.ddp.find_unused_parameters
        return scripted_gradients(self.scenario.params, kind, size, self.rank, step, self.device, leaves_out=leaves_out)

    def _faulty_backward(self, loss: torch.Tensor) -> bool:
        """Run the backward that cannot succeed, and write down how the failure showed."""
        outcome: dict[str, Any] = {"raised": False}
        self.collectives.take_sent()
        try:
            loss.backward()
            if self.scenario.poststep:
                self._after_backward()
        except BaseException as error:
            outcome = {"raised": True, "type": type(error).__name__, "message": str(error)[:2000]}
        unused, started = self.collectives.raise_next is not None, len(self.collectives.take_sent())
        if self.departure:
            unused = not self.departure.reached
            self.departure.end()
        self.recorder.event("fault", fault=self.scenario.fault.kind, unused=unused, started=started, **outcome)
        # Where collectives lie on a stream, to read a gradient is to wait for a peer that may never come.
        for name, parameter in () if self.scenario.profile.ordered else self.parameters.items():
            if parameter.grad is not None:
                self.recorder.tensor(f"{self.recorder.step}/grad/{name}", parameter.grad)
        self.signals.set(f"fault over/{self.rank}", "1")
        return False

    def _generators(self) -> dict[str, str]:
        return process_state.rng() if self.scenario.watches_process else {}

    def _record_step(self, step: int, rng: dict[str, str], parameters: dict[str, str]) -> None:
        after = self._digests()
        self.recorder.event(
            "stepped",
            parameters_changed=[name for name, value in after.items() if parameters[name] != value],
            **({"rng_changed": [name for name, value in self._generators().items() if rng.get(name, value) != value]} if rng else {}),
        )
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.recorder.tensor(f"{step}/grad/{name}", lay_out(parameter.grad, "contiguous"))
            elif self.scenario.fused and (result := self.observer.result_of(name)) is not None:
                self.recorder.tensor(f"{step}/result/{name}", lay_out(result, "contiguous"))
        if self.scenario.fused:
            self._record_model(step)

    def _record_model(self, step: int) -> None:
        self.recorder.event("model", scale=self.trainee.scale)
        for name, parameter in self.parameters.items():
            self.recorder.tensor(f"{step}/parameter/{name}", lay_out(parameter, "contiguous"))

    def _digests(self) -> dict[str, str]:
        return {name: digest(parameter) for name, parameter in self.parameters.items() if parameter.numel() < 4096}

    def _finish(self) -> None:
        """Close the subject, then look at what it leaves behind."""
        self._close()
        for name, buffer in self._synchronised_buffers().items():
            self.recorder.tensor(f"buffer/{name}", buffer)
        gc.collect()
        process_state.let_threads_end(self.threads)
        if self.scenario.watches_process:
            patches = _UNPATCHED.found() if self.spec else []
            self.recorder.event("state", at="end", **process_state.left_behind(), patches=patches)
        if self.scenario.observe.memory:
            self._let_go()
        if self.scenario.fault.kind == "none":
            self._everybody("end")
            end_groups()

    def _close(self) -> None:
        self.where = "close"
        for trainee in filter(None, (self.trainee, self.twin)):
            if trainee.case.close:
                trainee.case.close()
        self.where = "kit"

    def _let_go(self) -> None:
        """Drop the model, as a script does that goes on with another one, and write down whether the subject keeps it."""
        model = weakref.ref(self.trainee.model)
        del self.trainee, self.ddp, self.parameters, self.observer, self.schedule, self.streams
        self.registrations.clear()
        gc.collect()
        self.recorder.event("dropped", kept=model() is not None)

    def _synchronised_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers as DDP hands them to the next forward: synchronised from rank 0."""
        if self.scenario.params:
            return {}
        with torch.no_grad():
            self.ddp._sync_buffers()
        return dict(self.trainee.model.named_buffers())

    def _issued(self, fingerprint: dict[str, Any]) -> None:
        """Write down a collective before it begins: it may never end."""
        if self.departure:
            self.departure.issued(fingerprint)
            return
        inside, callback = self._is_inside(), self.collectives.in_callback
        self.recorder.event("collective", call=self.observer.calls - 1, inside=inside, callback=callback, **fingerprint)

    def _wait_for(self, work: Any) -> None:
        """Wait until a collective is over, for a hook that is judged with one at a time."""
        self.schedule.let_go()
        with contextlib.suppress(RuntimeError):  # whoever waits for it will see the error
            work.wait()

    def _before_hook(self, call: int) -> None:
        faulty = self.recorder.step == self.scenario.fault.step
        if faulty and self.rank == 1 and self.scenario.fault.kind == "peer_dies":
            os._exit(PEER_DIED)
        if faulty and self.rank == 1 and self.scenario.fault.kind == "peer_silent":
            self.signals.wait(["fault over/0"], datetime.timedelta(seconds=self.timeout))
            raise Injected("injected by the conformance kit: this rank stayed out of the hook")
        self.schedule.enter(call)
        if self.streams:
            self.streams.before_hook()

    def _after_hook(self, call: int, is_last: bool) -> None:
        if self.streams:
            self.streams.after_hook()
        self.schedule.left(call, is_last)

    def _waited_for_device(self, where: str) -> None:
        self.recorder.event("waited_for_device", call=self.observer.calls - 1, where=where)

    def _is_inside(self) -> bool:
        return self.observer.inside == threading.get_ident()

    def _waits(self) -> None:
        if self.observer.on_another_stream():
            return
        self.recorder.event("waited", call=self.observer.calls - 1, where=line_of_subject())

    def _stuck(self, call: int) -> None:
        self.recorder.event("gate", call=call, opened="a rank neither returned nor waited: the schedule was given up")

    def _everybody(self, name: str) -> None:
        everybody(self.signals, name, self.rank, self.world, self.timeout)

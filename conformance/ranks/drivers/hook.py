"""The driver of hooks: trains a model under DDP with the hook registered on it."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.ranks.drivers.base import KIT, RankDriver
from conformance.ranks.drivers.cuda_graph import on, side_stream, train_captured
from conformance.ranks.drivers.simulated_ranks import CannotSimulate, simulate
from conformance.ranks.drivers.uneven_inputs import train_unevenly
from conformance.ranks.instruments import process_state
from conformance.ranks.instruments.collective_recorder import CollectiveRecorder
from conformance.ranks.instruments.faults import Faults
from conformance.ranks.instruments.hook_observer import Observer
from conformance.ranks.instruments.process_state import Patches
from conformance.ranks.instruments.step_recorder import StepRecorder
from conformance.ranks.instruments.stream_delays import Streams, record_device_wait
from conformance.ranks.models.ddp_model import DDPModel
from conformance.ranks.models.probe import scripted_gradients, training_loss
from conformance.ranks.placement import dispatch_key
from conformance.ranks.resolve import is_one_object, resolve
from conformance.scenarios.gradients import at_scale

# Made when the host imports this module, and the host runs no code of the subject: ranks share it,
# and need not touch some thousand functions at their start.
_UNPATCHED = Patches()
# The twin trains on the inputs of other steps, so that a hook that mixes the two models shows.
_TWIN_OFFSET = 7
_TWIN_FACTOR = -2


class HookDriver(RankDriver):
    """One rank that trains with a hook.

    Attributes:
        model: the model under DDP on which the subject is registered.
        twin: another model with the same subject, if the scenario has one.
    """

    # DDP's threads share the process with the hook: a collective of theirs is not the hook's.
    calls_own_all_threads: ClassVar[bool] = False
    records_waits: ClassVar[bool] = True

    def make_collective_recorder(self) -> CollectiveRecorder:
        observed = self.scenario.observe.collectives
        in_order = self.scenario.serialised or self.scenario.profile.ordered
        return CollectiveRecorder(
            self.recorder,
            self.calls,
            dispatch_key(self.scenario.profile),
            records=observed,
            serialises=self.scenario.serialised,
            notes_callbacks=observed and in_order,
        )

    def set_up(self) -> None:
        """Make the process groups and the models."""
        self._registered: list[Any] = []
        # Under CUDA graphs, DDP has to be made on the stream that is captured, and the stream
        # before there is a group.
        self._side_stream = side_stream(self.scenario.captured)
        with on(self._side_stream):
            super().set_up()
            # The order of the model's parameters in memory must differ between ranks.
            self.scatter_heap()
            self.model = DDPModel(self.scenario, self.group, self.device)
        self.twin: DDPModel | None = None
        if self.scenario.twin:
            self.twin = DDPModel(self.scenario, self.group, self.device)

    def install_instruments(self) -> None:
        """Install the instruments of a hook around those of all drivers."""
        parameters = self.model.parameters
        self._streams: Streams | None = None
        if self.scenario.delayed:
            sizes = [parameter.numel() for parameter in parameters.values()]
            waited = partial(record_device_wait, self.recorder, self.calls)
            self._streams = Streams(self.rank, self.device, sizes, waited)
        # Before collectives are intercepted, since a failure may have to see each of them.
        self._faults = Faults(
            self.scenario,
            self.rank,
            self.world,
            self.signals,
            self.recorder,
            self.collectives,
            self.timeout,
        )
        super().install_instruments()
        self._observer = Observer(
            self.recorder,
            self.calls,
            parameters,
            self._faults,
            self.schedule,
            self._streams,
            self.scenario.observe.other_gradients,
        )
        self._steps = StepRecorder(self.scenario, self.recorder, self.model, self._observer)
        if self._streams:
            self._streams.install()

    def start_state(self) -> dict[str, Any]:
        return {**super().start_state(), "rng": process_state.rng()}

    def unpatched(self) -> Patches:
        return _UNPATCHED

    def patches_since(self, before: Patches) -> list[str]:
        # Without a subject there is nobody to blame, and the functions need not be touched.
        return [] if self.without_subject else super().patches_since(before)

    def run(self) -> None:
        """Register the subject and train for the scenario's steps."""
        # Simulated ranks call the hook themselves: it is registered on no model.
        if not self.scenario.simulated and not self.without_subject:
            self._register()
        if self.scenario.watches_process:
            process = process_state.snapshot()
            self.recorder.event("state", at="registered", process=process, rng=process_state.rng())
        inputs = self.scenario.inputs_of(self.rank, self.world)
        steps = list(enumerate(self.scenario.steps[:inputs]))
        if self.saved:
            # The steps before were made in another process, which has saved its state.
            steps = steps[self.scenario.resume.saves_at :]
        if self.scenario.simulated:
            self._simulate()
        elif self.scenario.captured:
            self._train_captured(steps)
        elif self.scenario.uneven:
            self._train_unevenly(steps)
        else:
            for step, kind in steps:
                if not self._step(step, kind):
                    break

    def close(self) -> None:
        """Close the subject, and record the model's buffers."""
        with self.doing("close"):
            for model in filter(None, (self.model, self.twin)):
                if model.case.close:
                    model.case.close()
        for name, buffer in self._synchronised_buffers().items():
            self.recorder.tensor(f"buffer/{name}", buffer)
        # Unlike those of other kinds, the events that follow stay in the last step.

    def end(self) -> None:
        """Drop the model if memory is observed; meet the other ranks if all of them get here."""
        if self.scenario.observe.memory:
            self._drop_model()
        if self.scenario.fault.kind == "none":
            super().end()

    # Registration

    def _register(self) -> None:
        """Load the subject and register it, with an observer unless it is to run as it is."""
        self._watch_registrations()
        with self.doing("load"):
            resolved = resolve(self.spec)
        option = f"--hook {self.spec.hook}"
        self.model.register(resolved, option, self.doing, self.saved)
        if self.saved:
            reason = self.model.not_weights_only
            self.recorder.event("loaded", weights_only=not reason, why=reason)
        if self.model.nameless:
            self.recorder.event("nameless", type=self.model.nameless)
        if self.twin:
            self.recorder.event("twin", one_object=is_one_object(resolved))
            self.twin.register(resolved, option, self.doing)
        name = self.model.ddp._get_ddp_logging_data().get("comm_hook", "")
        self.recorder.event("registered", count=len(self._registered), logged=str(name))

    def _watch_registrations(self) -> None:
        """Put the observer between DDP and every hook that is registered in this process."""
        ddp_class: Any = DistributedDataParallel
        register = ddp_class.register_comm_hook
        registered = self._registered
        is_observed = self.scenario.observe.hook

        def register_comm_hook(
            ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]
        ) -> None:
            # DDP checks the hook that it is given. The subject's own comes first, so that a refusal
            # is on record.
            ddp._check_comm_hook(hook)
            is_main = ddp is self.model.ddp
            wrapped = self._observer.wrap(hook) if is_observed and is_main else hook
            register(ddp, state, wrapped)
            # Hooks of the twin, and of models of the subject's own, are not observed.
            if is_main:
                registered.append(hook)

        ddp_class.register_comm_hook = register_comm_hook

    # Training

    def _step(self, step: int, kind: str) -> bool:
        """Run one step; return False if an injected fault has ended the run as it should."""
        self.begin_step(step, kind)
        if self.twin:
            with self.doing("twin"):
                self._step_twin(self.twin, step, kind)
        self._steps.before_step()
        if self.model.case.on_step:
            with self.doing("on_step"):
                self.model.case.on_step(step)
        with self.doing("forward"):
            *local, last = self.scenario.microbatch_weights
            for weight in local:
                with self.model.ddp.no_sync():
                    self._loss(step, kind, weight).backward()
            loss = self._loss(step, kind, last * self.model.scale)
            is_faulty = self._faults.before_backward(step)
            if self._streams:
                self._streams.before_backward(step)
        if is_faulty:
            with self.doing("backward"):
                backward = partial(self._backward_and_call, loss)
                self._faults.run_backward(backward, self.model.parameters)
            return False
        self._backward(loss)
        self._call_after_backward()
        self._steps.after_backward(step)
        if self.scenario.training_loop or not self.scenario.params:
            with self.doing("optimizer"):
                self.model.step()
            self._steps.record_model(step)
        # A probe is not stepped: its parameters stay as they are, unless the hook steps them.
        self.model.zero_grad(step)
        if self.scenario.order != "free":
            # The step's collectives end here, on all ranks: none is counted in the next step.
            self.collectives.drain()
            self.recorder.event("sent", collectives=self.collectives.take_sent())
            self.barrier(f"drained/{step}")
        self._observer.at_rest()
        if step == self.scenario.resume.saves_at - 1:
            with self.doing("save_state"):
                self.model.save(self.folder / str(self.rank))
        if self.scenario.observe.memory:
            del loss  # its graph holds the step's tensors
            self._steps.record_memory()
        return True

    def _backward(self, loss: torch.Tensor) -> None:
        with self.doing("backward"):
            try:
                loss.backward()
            finally:
                if self._streams:
                    self._streams.after_backward()
                # The results are recorded even if backward raised.
                with self.doing(KIT):
                    self._observer.after_backward()

    def _call_after_backward(self) -> None:
        """Make the trainer's call after backward, and record the gradients that it changes."""
        call = self.model.case.after_backward
        if call is None:
            return
        with self.doing(KIT):
            early = self._steps.gradient_digests()
        with self.doing("after_backward"):
            call()
        with self.doing(KIT):
            late = self._steps.gradient_digests()
            changed = [name for name, bits in late.items() if bits != early[name]]
            self.recorder.event("called", changed=changed)

    def _backward_and_call(self, loss: torch.Tensor) -> None:
        """Run a backward that cannot succeed, and the trainer's call if gradients come from it."""
        loss.backward()
        if self.scenario.poststep:
            self._call_after_backward()

    def _step_twin(self, twin: DDPModel, step: int, kind: str) -> None:
        """Train the other model in between, on other inputs."""
        if twin.case.on_step:
            twin.case.on_step(step)
        grads = scripted_gradients(
            self.scenario.params, kind, self.size, self.rank, step + _TWIN_OFFSET, self.device
        )
        twin.ddp([grad * _TWIN_FACTOR for grad in grads if grad is not None]).backward()
        if twin.case.after_backward:
            twin.case.after_backward()
        twin.zero_grad(step)

    def _loss(self, step: int, kind: str, weight: int) -> torch.Tensor:
        step += self.scenario.first_step
        if not self.scenario.params:
            return training_loss(self.model.ddp, self.rank, step, self.device)
        grads = self._scripted(step, kind)
        if weight != 1:
            grads = [None if grad is None else grad * weight for grad in grads]
        loss: torch.Tensor = self.model.ddp(grads)
        return loss

    def _scripted(self, step: int, kind: str) -> list[torch.Tensor | None]:
        return scripted_gradients(
            self.scenario.params,
            kind,
            self.size,
            self.rank,
            step,
            self.device,
            leaves_out=self.scenario.ddp.find_unused_parameters,
        )

    # Other ways to train

    def _train_captured(self, steps: list[tuple[int, str]]) -> None:
        """Capture a step in a CUDA graph and replay it.

        The capture runs the hook, so that an error there is the hook's, as in any backward.
        """

        def begin(step: int, kind: str) -> None:
            self._observer.forget_futures()
            # A replay runs no Python code of the hook.
            self.activity = KIT
            self.begin_step(step, kind)
            if self.model.case.on_step:
                self.model.case.on_step(step)

        def keep(step: int) -> None:
            # A replay runs on the device: no change can be seen as its own, so none is recorded.
            self._steps.before_step()
            self._steps.after_backward(step)

        forget = partial(self.model.optimizer.zero_grad, set_to_none=True)
        with self.doing("backward"):
            train_captured(
                self._side_stream, self.model.ddp, forget, self._scripted, steps, begin, keep
            )

    def _train_unevenly(self, steps: list[tuple[int, str]]) -> None:
        """Train under ``Join``, in which ranks run out of inputs."""
        call = self._call_when_joined if self.scenario.poststep else None
        with self.doing(KIT):
            train_unevenly(
                self.model.ddp, self.group, steps, self._step, self._begin_shadow_step, call
            )

    def _begin_shadow_step(self, step: int) -> None:
        """Begin a step of other ranks: this one has no inputs left, and DDP feeds zeros."""
        self._observer.at_rest()
        # From here on DDP calls the hook inside the context, until the context ends.
        self.activity = "join"
        self.begin_step(step, "shadow")

    def _call_when_joined(self) -> None:
        """Make the trainer's call at the end of such a step."""
        self._call_after_backward()
        self.model.zero_grad(self.recorder.step)

    def _simulate(self) -> None:
        """Record the result of rank 0 of many, and whether all ranks get it.

        If the hook cannot be simulated, the reason is recorded instead.
        """
        try:
            with self.doing("simulation"):
                self._simulate_sizes()
        except Exception as error:
            self.activity = KIT
            reason = str(error)
            if not isinstance(error, CannotSimulate):
                reason = f"{type(error).__name__}: {error}"
            self.recorder.event("not simulated", why=reason[:500])

    def _simulate_sizes(self) -> None:
        if self.without_subject or self.spec.setup:
            raise CannotSimulate(
                "a set-up has to do with one model, which each simulated rank would need for itself"
            )
        if self.scenario.poststep:
            raise CannotSimulate(
                "its results come with a call after backward, and not with its futures"
            )
        make = partial(self.model.make, resolve(self.spec))
        for size in self.scenario.simulated:
            results = simulate(size, make, self._bucket, at_scale(size).float())
            alike = bool((results == results[0]).all())
            self.recorder.event("simulated", size=size, alike=alike)
            self.recorder.tensor(f"at scale/{size}", results[0])

    def _bucket(self) -> dist.GradBucket:
        return self.model.ddp.reducer._get_zeros_like_grad_buckets()[0]

    # The end

    def _drop_model(self) -> None:
        """Drop the model, as a script that goes on with another one; record if it stays alive."""
        model = weakref.ref(self.model.model)
        # No object of the kit may hold the model any longer: then only the subject can.
        del self.model
        del self._observer
        del self._steps
        self._registered.clear()
        gc.collect()
        self.recorder.event("dropped", kept=model() is not None)

    def _synchronised_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers as DDP hands them to the next forward: synchronised from rank 0."""
        if self.scenario.params:
            return {}
        # DDP does so only in its next forward, which does not come.
        with torch.no_grad():
            self.model.ddp._sync_buffers()
        return dict(self.model.model.named_buffers())

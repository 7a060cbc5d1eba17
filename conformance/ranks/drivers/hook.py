"""The driver of hooks: trains a model under DDP with the hook registered on it."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.ranks.drivers._hook_states import HookStates
from conformance.ranks.drivers.base import KIT, RankDriver
from conformance.ranks.drivers.cuda_graph import on, side_stream, train_captured
from conformance.ranks.drivers.failing_models import FailingModels
from conformance.ranks.drivers.long_run import LongRunTrainer
from conformance.ranks.drivers.simulated_ranks import CannotSimulate, record_simulations
from conformance.ranks.drivers.twin import Twin
from conformance.ranks.drivers.uneven_inputs import train_unevenly
from conformance.ranks.drivers.warm_up import WarmUp
from conformance.ranks.instruments.clocks import Clocks
from conformance.ranks.instruments.collective_recorder import CollectiveRecorder
from conformance.ranks.instruments.default_dtype import default_dtype
from conformance.ranks.instruments.faults import Faults
from conformance.ranks.instruments.global_seeds import seed_generators
from conformance.ranks.instruments.hook_observer import Observer
from conformance.ranks.instruments.matmul_precision import matmul_precision, settle_precision
from conformance.ranks.instruments.registrations import Registrations
from conformance.ranks.instruments.source_files import module_of, qualified_name
from conformance.ranks.instruments.step_recorder import StepRecorder
from conformance.ranks.instruments.stream_delays import Streams, record_device_wait
from conformance.ranks.models.ddp_model import DDPModel
from conformance.ranks.models.probe import scripted_gradients, training_loss
from conformance.ranks.placement import dispatch_key
from conformance.ranks.resolve import is_one_object, resolve
from conformance.records.files import MODEL_MADE
from conformance.scenarios.model import DRAINING, EACH_MODEL_FAILS
from conformance.scenarios.steps_taken_back import is_taken_back
from conformance.scenarios.used_in_micro_batches import micro_batches_with
from conformance.torch_versions.private import (
    empty_bucket,
    logged_hook,
    synchronise_buffers,
)


class HookDriver(RankDriver):
    """One rank that trains with a hook.

    Attributes:
        model: the model under DDP on which the subject is registered.
        twin: trains another model with the same subject, if the scenario has one.
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
        self._registrations = Registrations()
        if self.scenario.matmul_precisions:
            settle_precision()
        # As scripts do: alike on all ranks, or with the rank added. All runs have the same seed, so
        # that a hook draws the same numbers in each of them.
        seed = self.scenario.session_seed + self.rank * self.scenario.seeds_differ
        seed_generators(seed, self.device)
        # Under CUDA graphs, DDP has to be made on the stream that is captured, and the stream
        # before there is a group.
        self._side_stream = side_stream(self.scenario.captured)
        with on(self._side_stream):
            super().set_up()
            # The order of the model's parameters in memory must differ between ranks.
            self.scatter_heap()
            # A script that has models on several groups names all of them.
            named = bool(self.scenario.groups or self.scenario.twin_groups)
            # The subject has not been loaded: an error is torch's or the kit's.
            with self.doing(MODEL_MADE):
                self.model = DDPModel(self.scenario, self.group, self.device, names_group=named)
        self.twin: Twin | None = None
        if self.scenario.twin:
            with self.doing(MODEL_MADE):
                model = DDPModel(
                    self.scenario,
                    self.twin_group,
                    self.device,
                    names_group=named,
                    is_twin=True,
                )
            self.twin = Twin(
                self.scenario,
                model,
                self.twin_group,
                self.rank,
                self.device,
                self.recorder,
                self.doing,
            )

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
            # On another device, to read a gradient is a wait that only one scenario is made for.
            other_gradients=self.scenario.observe.other_gradients or self.device.type == "cpu",
            are_views=self.scenario.ddp.gradient_as_bucket_view,
            is_quiet=bool(self.scenario.long_run),
        )
        if self.scenario.order == "slow":
            self._observer.before_last = self.collectives.drain
        self._steps = StepRecorder(self.scenario, self.recorder, self.model, self._observer)
        self._states = HookStates(
            self.scenario, self.model, self.folder / str(self.rank), self.recorder, self.doing
        )
        if self._streams:
            self._streams.install()
        self._clocks: Clocks | None = None
        if self.scenario.clocks_jump:
            steps = len(self.scenario.steps)
            self._clocks = Clocks(self.scenario.session_seed, self.rank, steps)
            self._clocks.install()
        self._registrations.watch(lambda ddp: ddp is self.model.ddp, self._observed)

    def run(self) -> None:
        """Register the subject and train for the scenario's steps."""
        if self.scenario.fault.kind == EACH_MODEL_FAILS:
            self._fail_in_turn()
            return
        # Simulated ranks call the hook themselves: it is registered on no model.
        if not self.scenario.simulated and not self.without_subject:
            with default_dtype(self.scenario.default_dtype(0)):
                self._register()
        if not self.without_subject:
            self.record_settings("registered")
        inputs = self.scenario.inputs_of(self.rank, self.world)
        steps = list(enumerate(self.scenario.steps[:inputs]))
        if self.saved:
            # The steps before were made in another process, which has saved its state.
            steps = steps[self.scenario.resume.saves_at :]
        if self.scenario.idle:
            # All ranks have registered the subject. From here on, the others are busy elsewhere.
            group = self.scenario.group_of(self.rank, self.world)
            self.collectives.taking_part = frozenset(group)
        warms_up = not self.saved and not self.scenario.long_run
        if warms_up and self.rank not in self.scenario.idle:
            self._warm_up(self.scenario.unrecorded_steps)
        if self.scenario.simulated:
            self._simulate()
        elif self.scenario.captured:
            self._train_captured(steps)
        elif self.scenario.uneven:
            self._train_unevenly(steps)
            for step, kind in enumerate(self.scenario.steps):
                if kind in DRAINING:
                    self._step(step, kind)
        elif self.scenario.long_run:
            self._train_long()
        else:
            for step, kind in steps:
                if self._clocks:
                    self._clocks.go_forward()
                with (
                    default_dtype(self.scenario.default_dtype(step)),
                    matmul_precision(self.scenario.matmul_precision(step)),
                ):
                    if not self._step(step, kind):
                        break

    def close(self) -> None:
        """Close the subject, and record the model's buffers."""
        if self.scenario.idle:
            self.barrier("trained")
            self.collectives.taking_part = None
        with self.doing("close"):
            for model in self._models():
                if model.case.close:
                    model.case.close()
        for name, buffer in self._synchronised_buffers().items():
            self.recorder.tensor(f"buffer/{name}", buffer)
        # Unlike those of other kinds, the events that follow stay in the last step.

    def end(self) -> None:
        """Drop the model if memory is observed; meet the other ranks if all of them come."""
        if self.scenario.observe.memory:
            self._drop_model()
        super().end()

    # Registration

    def _register(self) -> None:
        """Load the subject and register it, with an observer unless it is to run as it is."""
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
            self.twin.register(resolved, option)
            if self.twin.model.rescale == self.model.rescale:
                self.twin.model.rescale = None  # a function of the module is for all models
        name = logged_hook(self.model.ddp)
        hooks = self._registrations.hooks
        state = self.model.case.state
        # The state may be a process group, whose class in torch is no code of the subject.
        own_state = () if isinstance(state, dist.ProcessGroup) else (state,)
        made = (resolved.function, *own_state, *hooks)
        self.own_modules.update(filter(None, map(module_of, made)))
        self.recorder.event(
            "registered",
            count=len(hooks),
            logged=name,
            hooks=sorted({qualified_name(hook) for hook in hooks}),
            modules=sorted(self.own_modules),
        )

    def _observed(
        self, ddp: DistributedDataParallel, hook: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return what is registered in place of a hook: the same with an observer around it."""
        if ddp is self.model.ddp:
            return self._observer.wrap(hook) if self.scenario.observe.hook else hook
        if self.twin and ddp is self.twin.model.ddp and self.scenario.joint:
            return self._observer.wrap_of_twin(hook)
        # A model of the subject's own, or a twin that trains in between.
        return hook

    # Training

    def _models(self) -> list[DDPModel]:
        return [self.model, self.twin.model] if self.twin else [self.model]

    def _warm_up(self, steps: int) -> None:
        """Train for the first steps of a long warm-up, without a record of their results."""
        if not steps:
            return
        self._observer.is_quiet = True
        self.collectives.pause()
        warm_up = WarmUp(
            self.scenario, self.rank, self.device, self.recorder, self.doing, self._scripted
        )
        for step in range(steps):
            warm_up.train(self._models(), step)
            self._observer.forget_futures()
            if self.scenario.order != "free":
                warm_up.count_sent(self.collectives)
        if warm_up.sent:
            self.recorder.event("sent_unrecorded", totals=warm_up.sent)
        self._observer.is_quiet = False
        self.collectives.resume()

    def _step(self, step: int, kind: str) -> bool:
        """Run one step; return False if an injected fault has ended the run as it should."""
        self.begin_step(step, kind)
        if step in self.scenario.rewraps:
            if self.model.belongs_to_ddp:
                self.recorder.event("keeps_ddp")
                return False
            self.model.wrap_anew(step, self.doing)
            options = self.scenario.ddp_options(self.scenario.ddp_number(step))
            self._observer.look_anew(are_views=options.gradient_as_bucket_view)
        if not self._states.before_step(step):
            return False
        # The twin's steps belong to the subject as well.
        self._steps.before_step()
        # A hook may keep what it sees in its first call: on two groups, that of the larger one.
        if self.twin and not self.scenario.joint and not self.scenario.twin_groups:
            self.twin.train(step, kind)
        self._call_before_forward(step)
        first_frozen = self.scenario.freezes_unused_from
        if first_frozen and step >= first_frozen:
            self.model.freeze_unused(self.size, step, kind)
        with self.doing("forward"):
            loss = self._forward(step, kind)
            is_faulty = self._faults.before_backward(step)
            if self._streams:
                self._streams.before_backward(step)
        if is_faulty:
            if self._fail_in_backward(loss):
                return False
        else:
            self._backward(loss)
            self._call_after_backward()
            self._faults.after_backward()
        self._steps.after_backward(step)
        if self.scenario.training_loop or not self.scenario.params:
            with self.doing("optimizer"):
                self.model.step()
            self._steps.record_model(step)
        if not self.scenario.params:
            self.recorder.event("trained", loss=loss.item())
        self._end_step(step, kind)
        if self.scenario.observe.memory:
            del loss  # its graph holds the step's tensors
            self._steps.record_memory()
        return True

    def _call_before_forward(self, step: int) -> None:
        """Make the calls that the case has the trainer make before a step's forward."""
        if (rate := self._states.learning_rate(step)) is not None:
            self.model.set_learning_rate(rate)
        if self.model.case.on_step:
            with self.doing("on_step"):
                self.model.case.on_step(self._states.step_of_trainer(step))
        if self.model.rescale:
            for factor in self.scenario.rescales(step):
                with self.doing("rescale"):
                    self.model.rescale(factor)

    def _forward(self, step: int, kind: str) -> torch.Tensor:
        """Train all micro-batches but the last, and return the loss of that one."""
        *local, last = self.scenario.microbatch_weights
        for batch, weight in enumerate(local):
            with self.model.ddp.no_sync():
                self._loss(step, kind, weight, batch).backward()
        loss = self._loss(step, kind, last * self.model.scale, len(local))
        if self.twin and self.scenario.joint:
            loss = loss + self.twin.loss(step, kind)
        return loss

    def _end_step(self, step: int, kind: str) -> None:
        """Do what comes after the results of a step were recorded."""
        # The parameters of a probe stay as they are, unless the hook steps them.
        faintly = not is_taken_back(self.scenario, step)
        if moved := self.model.end_step(step, self.doing, faintly=faintly):
            self.recorder.event(
                "moved_otherwise", parameters=list(moved), divided=all(moved.values())
            )
        if self.scenario.renews_storage:
            self.model.renew_storage()
        if self.twin and self.scenario.joint:
            self.twin.end_step(step)
        elif self.twin and self.scenario.twin_groups:
            self.twin.train(step, kind)
        if self.scenario.order != "free":
            # The step's collectives end here, on all ranks: none is counted in the next step.
            self.collectives.drain()
            self.recorder.event("sent", collectives=self.collectives.take_sent())
            self.barrier(f"drained/{step}")
        self._observer.at_rest()
        self._states.after_step(step)

    def _backward(self, loss: torch.Tensor) -> None:
        self._steps.before_backward()
        with self.doing("backward"), self.autocast():
            try:
                loss.backward()
            finally:
                if self._streams:
                    self._streams.after_backward()
                # The results are recorded even if backward raised.
                with self.doing(KIT):
                    self._observer.after_backward()

    def _fail_in_backward(self, loss: torch.Tensor) -> bool:
        """Run a backward in which a fault is injected; return whether it has ended the run."""
        with self.doing("backward"):
            backward = partial(self._backward_and_call, loss)
            if self._faults.run_backward(backward, self.model.parameters):
                return True
            with self.doing(KIT):
                self._observer.after_backward()
        return False

    def _call_after_backward(self) -> None:
        """Make the trainer's call after backward, and record the gradients that it changes."""
        call = self.model.case.after_backward
        if call is None:
            return
        with self.doing(KIT):
            early = self._steps.gradient_checksums()
        with self.doing("after_backward"):
            call()
        with self.doing(KIT):
            late = self._steps.gradient_checksums()
            changed = [name for name, bits in late.items() if bits != early[name]]
            self.recorder.event("called", changed=changed)

    def _backward_and_call(self, loss: torch.Tensor) -> None:
        """Run a backward that may fail, and the trainer's call if gradients come from it."""
        loss.backward()
        if self.scenario.poststep:
            self._call_after_backward()

    def _loss(self, step: int, kind: str, weight: int, batch: int) -> torch.Tensor:
        step = self.scenario.inputs_at(step)
        if not self.scenario.params:
            return training_loss(self.model.ddp, self.rank, step, self.device)
        grads = [
            grad
            if micro_batches_with(self.scenario, self.group_rank, step, index, kind)[batch]
            else None
            for index, grad in enumerate(self._scripted(step, kind))
        ]
        if weight != 1:
            grads = [None if grad is None else grad * weight for grad in grads]
        loss: torch.Tensor = self.model.ddp(grads)
        return loss

    def _scripted(self, step: int, kind: str) -> list[torch.Tensor | None]:
        leaves_out = self.scenario.ddp.find_unused_parameters
        grads = scripted_gradients(
            self.scenario.params,
            kind,
            self.size,
            self.rank,
            step,
            self.device,
            leaves_out_as=self.group_rank if leaves_out else None,
            period=self.scenario.period,
        )
        scale = self.scenario.loss_scale(step)
        return [grad if grad is None or scale == 1 else grad * scale for grad in grads]

    # Other ways to train

    def _fail_in_turn(self) -> None:
        """Train one model after another, a collective of which fails."""
        with self.doing("load"):
            resolved = resolve(self.spec)
        FailingModels(self, resolved, f"--hook {self.spec.hook}").train()

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

    def _train_long(self) -> None:
        """Train for more than a thousand steps."""
        trainer = LongRunTrainer(
            self.scenario,
            self.rank,
            self.size,
            self.device,
            self.model,
            self.recorder,
            self._observer,
            self.doing,
            self.begin_step,
            self._end_long_step,
        )
        trainer.train()

    def _end_long_step(self) -> None:
        if self.scenario.intercepts:
            # The sizes of all collectives would add up.
            self.collectives.take_sent()

    def _train_unevenly(self, steps: list[tuple[int, str]]) -> None:
        """Train an epoch under ``Join``, in which ranks run out of inputs."""
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
        self.model.end_step(self.recorder.step, self.doing)

    def _simulate(self) -> None:
        """Record the results of rank 0 of many, and whether all ranks get them.

        If the hook cannot be simulated, the reason is recorded instead.
        """
        try:
            with self.doing("simulation"):
                self._simulate_sizes()
        except Exception as error:
            self.activity = KIT
            reason = str(error)
            if not isinstance(error, CannotSimulate):
                reason = (
                    f"it raised {type(error).__name__} ({error}) on a simulated rank, whose group "
                    "has no store and no backend"
                )
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
        record_simulations(
            self.scenario.simulated,
            partial(self.model.make, resolve(self.spec)),
            partial(empty_bucket, self.model.ddp),
            self.recorder,
        )

    # The end

    def _drop_model(self) -> None:
        """Drop the model, as a script that goes on with another one; record if it stays alive."""
        model = weakref.ref(self.model.model)
        # No object of the kit may hold the model any longer: then only the subject can.
        del self.model
        del self._observer
        del self._steps
        del self._states
        self._registrations.hooks.clear()
        gc.collect()
        self.recorder.event("dropped", kept=model() is not None)

    def _synchronised_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers as DDP hands them to the next forward: synchronised from rank 0."""
        if self.scenario.params:
            return {}
        # DDP does so only in its next forward, which does not come.
        with torch.no_grad():
            synchronise_buffers(self.model.ddp)
        return dict(self.model.model.named_buffers())

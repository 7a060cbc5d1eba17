"""The driver of optimizer wrappers: gives parameters gradients, has them stepped, records them."""

import contextlib
import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.ranks.drivers._kit_averager import Averager
from conformance.ranks.drivers._means_in_flight import hold_means_back
from conformance.ranks.drivers._optimizer_backwards import (
    order_gradients,
    run_backwards,
    without_average,
)
from conformance.ranks.drivers._optimizer_calls import WaysToCall
from conformance.ranks.drivers._optimizer_clearing import (
    clear_after,
    clear_before,
    zero_gradients,
)
from conformance.ranks.drivers._optimizer_clips import clip_by_norm
from conformance.ranks.drivers._optimizer_closures import skip_batch, step_with_closure
from conformance.ranks.drivers._optimizer_construction import Construction, names_in_signature
from conformance.ranks.drivers._optimizer_inputs import mean_of_inputs
from conformance.ranks.drivers._optimizer_loads import load_saved
from conformance.ranks.drivers._optimizer_models import make_model
from conformance.ranks.drivers._optimizer_pairs import leave_gradients
from conformance.ranks.drivers._optimizer_scaling import Scaler
from conformance.ranks.drivers._optimizer_use import (
    errors_as_optimizer,
    has_added_groups,
    read_consolidated,
    takes_closure,
)
from conformance.ranks.drivers._optimizer_writes import (
    freeze_late,
    renew,
    write,
    write_step_options,
)
from conformance.ranks.drivers.base import KIT, RankDriver
from conformance.ranks.drivers.uneven_inputs import train_unevenly
from conformance.ranks.models.probe import Probe
from conformance.scenarios.averager_training import special_source, turn
from conformance.scenarios.averager_values import Source, values_of
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.optimizer import PLAIN, START, Setting, Write, recipient
from conformance.scenarios.optimizer_backwards import ASSIGNED
from conformance.scenarios.optimizer_gradients import first_kind, has_gradient, is_frozen
from conformance.scenarios.optimizer_loops import WRITTEN_VALUES
from conformance.scenarios.optimizer_repeats import source_step
from conformance.scenarios.optimizer_rests import zeros_at
from conformance.scenarios.optimizer_training import (
    averages_gradients,
    is_closed,
    raised_before,
    wrapped_class,
)
from conformance.scenarios.optimizer_twins import plan_of_model

# The attributes that two trainings of one rank have separately.
_OF_TRAININGS = (
    *("setting", "model", "params", "averager", "optimizer"),
    *("group", "group_rank", "size", "_ranks"),
)


class OptimizerDriver(RankDriver):
    """One rank that trains with the subject's optimizer, or with two optimizers in turns.

    Attributes:
        setting: the options, groups and events of the model whose turn it is.
        model, params: the model whose turn it is, and its parameters.
        ddp: the model under DDP, if the scenario has DDP.
        averager: the kit's own averager, if the target takes one.
        optimizer: the subject's.
        ways: calls its methods by position or by keyword.
        consolidates: whether its state has to be collected on one rank before it is saved.
    """

    setting: Setting
    model: Probe
    params: list[torch.nn.Parameter]
    ddp: DistributedDataParallel | None
    averager: Averager | None
    optimizer: Any
    ways: WaysToCall
    _adds_no_groups = False

    def run(self) -> None:
        """Make the optimizers and run the scenario's steps."""
        scenario = self.scenario
        self._trainings = []
        self.ways = WaysToCall(scenario, self.rank, self.recorder)
        for number in range(2 if scenario.variant == "two" else 1):
            self._set_up_training(number)
            self._trainings.append(self._training())
        if self._trainings[0]["optimizer"] is not self.optimizer:
            self.recorder.event("two")
        steps = list(enumerate(scenario.steps))
        if scenario.resume.resumes:
            steps = steps[scenario.resume.saves_at :]
        if scenario.uneven:
            self._train_unevenly(steps[: scenario.inputs_of(self.rank, self.world)])
            return
        for number, kind in steps:
            self._step(number, kind)
        if scenario.name == PLAIN.name:
            self.begin_step(len(scenario.steps), "none")
            errors = errors_as_optimizer(self.optimizer, self.averager)
            self.recorder.event("as_optimizer", **errors)

    @property
    def ranks_of_group(self) -> list[int]:
        """The global ranks of the group that trains the model whose turn it is."""
        return self._ranks

    def _training(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_TRAININGS}

    def _set_up_training(self, number: int) -> None:
        """Make a model and its optimizer, and load their state if there is one.

        Args:
            number: of the model.
        """
        self.setting = plan_of_model(self.scenario, number)
        if self._adds_no_groups:
            self.setting = replace(self.setting, given_first=bool(self.setting.added))
        if number:
            self.group = self.twin_group
            self.group_rank = dist.get_rank(self.group)
            self.size = dist.get_world_size(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self.model = make_model(self)
        self.params = self.model.tensors
        restored = self.load() if self.saved else None
        self._fill(restored["parameters"] if restored else self._first_values(number))
        self._set_frozen(self.scenario.resume.saves_at if restored else 0)
        self.ddp = None
        if self.scenario.uneven or self.scenario.variant == "ddp":
            self.ddp = self.data_parallel(
                self.model,
                process_group=self.group if self.scenario.groups else None,
                gradient_as_bucket_view=self.scenario.ddp.gradient_as_bucket_view,
            )
            if self.scenario.ddp.gradient_as_bucket_view:
                hold_means_back(self.ddp, self.group)
        names = names_in_signature(self)
        self.averager = None
        if "averager" in names:
            warmup = self.setting.warmup
            self.averager = Averager(self, self.params, warmup, self.setting.period)
        try:
            self.optimizer = self._construction.make(names)
        except ValueError as error:
            # torch's Adam refuses a rate in a tensor with foreach=True.
            if not self.setting.has_tensor_rates or wrapped_class(self.scenario) == "SGD":
                raise
            self.activity = KIT
            self.recorder.event("refuses_tensor_rates", error=str(error)[:200])
            self.setting = replace(self.setting, has_tensor_rates=False)
            self.optimizer = self._construction.make(names)
        if self.setting.added and not (self._adds_no_groups or has_added_groups(self.optimizer)):
            # Its model is made anew, too: hooks of the first optimizer may be on the parameters.
            self._adds_no_groups = True
            self.recorder.event("adds_no_groups", model=number)
            self._set_up_training(number)
            return
        self.consolidates = hasattr(self.optimizer, "consolidate_state_dict")
        self._scaler = self._make_scaler()
        self._snapshot: tuple[list[torch.Tensor], Any] | None = None
        for group in self._construction.appended():
            with self.doing("add_param_group"):
                self.optimizer.add_param_group(group)
        if restored:
            load_saved(self)
        if self.setting.back[0] > self.setting.back[1] == -1:
            self._take_snapshot()
        self._first_state = self._state_of_all() if self.setting.again else None
        if self.consolidates:
            self.recorder.event("consolidates")

    @property
    def _construction(self) -> Construction:
        return Construction(self, self.setting, self.params, self.averager)

    def _step(self, number: int, kind: str) -> None:
        """Train one step."""
        self.take_turn(number)
        self.begin_step(number, kind)
        self._set_frozen(number)
        if number in (self.setting.back[0], *self.setting.again):
            self._go_back(number)
        if number in self.setting.added and not self.setting.given_first:
            # Its parameters can be read once, as those of model.head.parameters().
            group = self._construction.group(self.setting.groups_at(number) - 1)
            group["params"] = iter(group["params"])
            with self.doing("add_param_group"):
                self.optimizer.add_param_group(group)
        write_step_options(self, number)
        if number in self.setting.writes:
            self._write_parameters(self.setting.writes[number], number)
        if self.averager:
            self.averager.before_step()
        with self.autocast():
            self._train(number)
        self._keep_parameters()
        if self.scenario.variant == "zeroed":
            zero_gradients(self, number)
        clear_after(self, number)
        if number == self.setting.back[1]:
            self._take_snapshot()
        resume = self.scenario.resume
        if number == resume.also_taken_at - 1:
            self._state(recipient(self.scenario, self.size))
        if number == resume.saves_at - 1 and not resume.resumes:
            self._save()

    def take_turn(self, step: int) -> None:
        """Go on with the model whose turn a step is."""
        for name, value in self._trainings[turn(self.scenario, step)[0]].items():
            setattr(self, name, value)

    def _train(self, number: int) -> None:
        """Compute the gradients of a step, and step the optimizer."""
        is_closed_step = is_closed(self.scenario, number)
        if is_closed_step and not takes_closure(self.optimizer):
            self.recorder.event("takes_no_closure")
            is_closed_step = False
        if is_closed_step:
            if raised := raised_before(self.scenario, number):
                skip_batch(self, raised)
            step_with_closure(self, number)
        elif self._scaler and not self._scaler.is_refused:
            self._step_with_scaler(self._scaler, number)
        else:
            leave_gradients(self, number)
            freeze_late(self.scenario, self.params, number)
            clip_by_norm(self, number)
            with self.inside("step"), without_average(self, number):
                self.optimizer.step()

    def _keep_parameters(self) -> None:
        for index, parameter in enumerate(self.params):
            self.keep(f"parameter/p{index}", parameter)
        self.recorder.event("stepped")

    def _train_unevenly(self, steps: list[tuple[int, str]]) -> None:
        """Train under ``Join``.

        The optimizer's documentation requires that ranks that have joined have the same gradients
        as the others.
        """
        if not hasattr(self.optimizer, "join_hook"):
            self.recorder.event("not_joinable")
            return
        assert self.ddp is not None

        def begin_shadow_step(number: int) -> None:
            # From here on this rank runs the join hooks, until the context ends.
            self.activity = "join"
            for index, parameter in enumerate(self.params):
                parameter.grad = self._laid_out(index, mean_of_inputs(self, number, index))

        with self.doing(KIT):
            train_unevenly(
                self.ddp, self.group, steps, self._step, begin_shadow_step, more=[self.optimizer]
            )
        self.begin_step(len(self.scenario.steps), "none")
        self._keep_parameters()

    # Parts of a step

    def _write_parameters(self, plan: Write, number: int) -> None:
        """Give parameters other values, the same on all ranks.

        Parameters are replaced in the groups only if the optimizer averages: others may have taken
        them apart into shares.
        """
        values = [
            self.values("normal", WRITTEN_VALUES + number, index, self._ranks[0])
            for index in range(len(self.params))
        ]
        if not plan.way.renews:
            write(self.model, plan, values)
            return
        if self.averager is None and not averages_gradients(self.scenario):
            return
        with self.doing("param_groups"):
            groups = list(self.optimizer.param_groups)
        if not renew(self.model, groups, plan, values):
            self.recorder.event("not_renewed")

    def _set_frozen(self, number: int) -> None:
        for index, parameter in enumerate(self.params):
            parameter.requires_grad_(not is_frozen(self.scenario, number, index))

    def backward(self, number: int) -> None:
        """Leave a step's gradients on the parameters of the model whose turn it is."""
        # A trainer may write to the gradients of the step before.
        if self.scenario.variant not in ("zeroed", ASSIGNED.variant):
            clear_before(self, number)
        grads = self.gradients(number)
        if self.ddp is not None:
            is_local = self.averager is not None and number >= self.setting.warmup
            with self.ddp.no_sync() if is_local else contextlib.nullcontext():
                self.ddp(grads).backward()
            return
        if averages_gradients(self.scenario):
            # The subject may average in hooks of the backward.
            order_gradients(self.scenario, self.model, number, self.rank)
            run_backwards(self, number, grads)
            return
        for parameter, grad in zip(self.params, grads, strict=True):
            if parameter.grad is None:
                parameter.grad = grad
            elif grad is not None:
                parameter.grad.add_(grad)

    def gradients(self, number: int) -> list[torch.Tensor | None]:
        """Return this rank's gradients of a step."""
        kind = self.scenario.steps[number]
        absent = self.setting.in_no_group(number) if self.setting.given_first else ()
        return [
            None if index in absent else self._gradient(number, kind, index)
            for index in range(len(self.params))
        ]

    @property
    def _is_own(self) -> bool:
        """Whether ranks have gradients of their own: somebody averages these, or parameters."""
        scenario = self.scenario
        is_averaged = self.averager is not None or self.ddp is not None
        return is_averaged or averages_gradients(scenario) or scenario.variant == "own"

    def _gradient(self, number: int, kind: str, index: int) -> torch.Tensor | None:
        """Return this rank's gradient; the same on all ranks unless ranks have their own."""
        place = self.group_rank if self._is_own else None
        if not has_gradient(self.scenario, self.size, place, number, index):
            return None
        source_place = special_source(self.scenario, number, place or 0, self.size)
        rank = self._ranks[source_place if self._is_own else 0]
        spec = self.scenario.params[index]
        if kind == "limit" and spec.dtype != "float16":
            kind = "crafted"
        source = Source(kind, rank, source_step(self.scenario, number))
        values = values_of(source, spec, self.size, index).to(self.device)
        if zeros := zeros_at(self.scenario, number, index):
            values.view(-1)[zeros.start : zeros.stop] = 0
        return self._laid_out(index, values)

    def _make_scaler(self) -> Scaler | None:
        """Return the GradScaler that the scenario has around the optimizer, if it has one.

        A GradScaler does not call an optimizer on a rank whose gradients overflow. If that rank is
        alone, the optimizer's collectives wait there, unless the optimizer takes the scale itself:
        it is called in every step then.
        """
        plan = self.setting.scaling
        if plan is None:
            return None
        takes_scale = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        alone = takes_scale and self.averager is not None
        self.recorder.event("scaler", takes_scale=takes_scale, alone=alone)
        return Scaler(plan, self.device, self.optimizer, takes_scale, alone)

    def _step_with_scaler(self, scaler: Scaler, number: int) -> None:
        clear_before(self, number)
        overflows = scaler.overflows(number, self.group_rank, self.size)
        grads = scaler.scaled(self.gradients(number), number, overflows)
        scaler.backward(self.model(grads))
        if number == 0:
            with self.doing("param_groups"):
                scaler.is_refused = not scaler.can_step()
        if scaler.is_refused:
            self.recorder.event("not_scaled")
            with self.inside("step"):
                self.optimizer.step()
            return
        # Gradients that are averaged later, or have been averaged, would be clipped otherwise.
        clipped = None if averages_gradients(self.scenario) else self.params
        with self.doing("unscale_"):
            scaler.unscale(number, clipped)
        with self.inside("step"):
            scaler.step()
        scaler.update(number)

    def _laid_out(self, index: int, values: torch.Tensor) -> torch.Tensor:
        return lay_out(values, self.scenario.params[index].layout)

    @torch.no_grad()
    def _fill(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.params, values, strict=True):
            parameter.copy_(value)

    def _first_values(self, number: int) -> list[torch.Tensor]:
        """Return the first values of a model's parameters, on all ranks."""
        return [
            self.values(first_kind(self.scenario), START + number, index, self._ranks[0])
            for index in range(len(self.scenario.params))
        ]

    # States

    def _save(self) -> None:
        to = recipient(self.scenario, self.size)
        state = self._state(to)
        if self.consolidates and self.group_rank == to:
            self._keep_consolidated(state)
        parameters = [parameter.detach() for parameter in self.params]
        self.save({"parameters": parameters, "state": state})

    def _state(self, to: int) -> Any:
        """Return a copy of the state; if it is consolidated, only on rank ``to`` of the group."""
        with self.doing("state_dict"):
            if self.consolidates:
                self.ways.consolidate(self.optimizer, to)
            if self.consolidates and self.group_rank != to:
                return None
            return copy.deepcopy(self.optimizer.state_dict())

    def _state_of_all(self) -> Any:
        """Return a copy of the state, on every rank."""
        states = [self._state(to) for to in range(self.size if self.consolidates else 1)]
        return next(state for state in states if state is not None)

    def _take_snapshot(self) -> None:
        """Keep the parameters and the state, to restore them later."""
        values = [parameter.detach().clone() for parameter in self.params]
        self._snapshot = (values, self._state_of_all())

    def _go_back(self, number: int) -> None:
        """Restore an earlier step's parameters and state, and keep copies to restore again."""
        assert self._snapshot is not None
        values, state = self._snapshot
        if number == self.setting.remade:
            self._make_anew()
        self._fill(values)
        if number == self.setting.emptied:
            self.load_state(copy.deepcopy(self._first_state))
        self.load_state(copy.deepcopy(state))

    def _make_anew(self) -> None:
        """Make the model and its optimizer anew, as in new processes."""
        old = self._training()
        self.model = make_model(self)
        self.params = self.model.tensors
        if self.averager:
            setting = self.setting
            self.averager = Averager(self, self.params, setting.warmup, setting.period)
        self.optimizer = self._construction.make(names_in_signature(self))
        if self.optimizer is old["optimizer"]:
            # The target is one existing object, with the parameters that it was made with.
            for name, value in old.items():
                setattr(self, name, value)
            self.recorder.event("not_remade")
        self._trainings[-1] = self._training()

    def load_state(self, state: Any) -> None:
        """Load a state, in some scenarios more than once."""
        with self.doing("load_state_dict"):
            self.ways.load(self.optimizer, state)
        if self.scenario.variant == "saved_groups":
            # One state may be loaded again, and saved before a step, as in a job that is stopped.
            with self.doing("load_state_dict"):
                self.ways.load(self.optimizer, state)
            again = self._state_of_all()
            with self.doing("load_state_dict"):
                self.ways.load(self.optimizer, again)

    def _keep_consolidated(self, state: Any) -> None:
        """Record a consolidated state: its tensors by parameter, and its parameter groups."""
        tensors, described = read_consolidated(state)
        for name, tensor in tensors.items():
            self.keep(name, tensor)
        self.recorder.event("consolidated", **described)

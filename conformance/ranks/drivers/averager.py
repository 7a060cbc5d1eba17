"""The driver of averagers: sets parameters, has them averaged, and records them."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist

from conformance.errors import TargetError
from conformance.ranks.drivers._equal_states import changed_values, copies
from conformance.ranks.drivers._evaluated_averages import EvaluatedAverages
from conformance.ranks.drivers._evaluation_ends import ENDS, FROZEN, NESTS
from conformance.ranks.drivers._given_parameters import (
    Given,
    Parameters,
    frozen,
    give_gradients,
    give_subclasses,
    gradient_of,
    make_of_either,
)
from conformance.ranks.drivers._models_in_turn import count_models
from conformance.ranks.drivers._parameters_left import parameters_left
from conformance.ranks.drivers._trainee import Trainee
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.digest import digest
from conformance.ranks.models.flat_buffers import FlatBuffers
from conformance.ranks.models.probe import Probe
from conformance.scenarios.averager import FORMS, PLAIN
from conformance.scenarios.averager_loops import is_grad_mode_off, overflow
from conformance.scenarios.averager_training import (
    ADDED,
    GOES_ON,
    LOADS_FIRST,
    MODELS_COME,
    ONE_MODEL,
    ROLLED,
    START,
    is_frozen,
    is_given,
    is_idle,
    is_written_to_data,
    option,
    rolled_back,
    turn,
)
from conformance.scenarios.averager_values import (
    Source,
    first_source,
    has_gradient,
    of_values,
    source,
    values_of,
)
from conformance.scenarios.averaging_schedule import HELD, QUIET
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.moved_parameters import REPLACED, specs_at, way


def _counts(averager: Any) -> bool:
    """Return whether an averager has a count of steps, the only state of torch's averagers.

    A method ``step()`` is no count.
    """
    return hasattr(averager, "step") and not callable(averager.step)


@dataclass(frozen=True)
class _Call:
    """The side effects of a call.

    Attributes:
        grad_mode_changed: whether ``torch.is_grad_enabled()`` is another one after it.
        form_changes: the changed parts of the list, or of the groups, that it was given.
    """

    grad_mode_changed: bool
    form_changes: list[str]


class AveragerDriver(RankDriver):
    """One rank that averages its parameters."""

    def run(self) -> None:
        """Make the averagers and run the scenario's steps."""
        scenario = self.scenario
        groups = [self.group]
        if scenario.variant == "two":
            groups.append(self.twin_group)
        self.specs = specs_at(scenario, 0)
        self.trainees: list[Trainee] = []
        for group in groups:
            self.trainees.append(self._make_trainee(group))
        first = self.trainees[0]
        self.recorder.event("averagers_made", takes_params=first.takes_params)
        if len(groups) == 2 and first.averager is self.trainees[1].averager:
            self.recorder.event("one_object")
            return
        resume = scenario.resume
        # Parameters are set in every step: only the averager has a state to go on from.
        self.trainee = first
        if self.saved:
            self._load_averager()
        for step, kind in enumerate(scenario.steps):
            if step < resume.saves_at and resume.resumes:
                continue
            self.trainee = self.trainees[turn(scenario, step)[0]]
            lost = rolled_back(scenario, step)
            if lost is not None:
                self._roll_back(step, lost)
            if kind == QUIET:
                self._quiet_step(step)
            else:
                self._step(step, kind)
            if step == resume.saves_at - 1 and not resume.resumes:
                self._save_averager()
        if option(scenario, MODELS_COME):
            self.begin_step(len(scenario.steps), QUIET)
            self.recorder.event("models", **count_models(self._train_another))
        if option(scenario, GOES_ON):
            self._go_on()
            self._average_outside()

    def _train_another(self) -> Parameters:
        """Make another model and its averager, let it average once, and drop both."""
        trainee = self._make_trainee(self.group)
        give_gradients(trainee.params)
        for _ in range(int(option(self.scenario, MODELS_COME))):
            with self.inside("average_parameters"):
                trainee.averager.average_parameters(list(trainee.params))
        self.trainee = self.trainees[0]
        return trainee.params

    def _go_on(self) -> None:
        """Make as many calls again on the ranks of the first group, and none on the others."""
        steps = len(self.scenario.steps)
        if self.scenario.groups and self.rank in self.scenario.groups[0]:
            for step in range(steps, 2 * steps):
                self._quiet_step(step)

    def _average_outside(self) -> None:
        """Make calls with the value that new_group returns on a rank outside of the group.

        All ranks make them, so that a subject which takes the value for WORLD waits for nobody.
        """
        outside = dist.GroupMember.NON_GROUP_MEMBER
        if not self.target().names("process_group"):
            return
        steps = len(self.scenario.steps)
        self.begin_step(2 * steps, QUIET)
        params = Probe(self.scenario.params, 0.0, self.rank).to(self.device).tensors
        with torch.no_grad():
            for index, parameter in enumerate(params):
                parameter.copy_(self._values(Source("crafted", self.rank, START), index))
        before = copies(params)
        raised = ""
        activity = self.activity
        try:
            with self.inside("average_parameters"):
                averager = self.make(
                    params=lambda: list(params),
                    averager=lambda: None,
                    process_group=lambda: outside,
                    rank=lambda: -1,
                    world_size=lambda: -1,
                )
                for _ in range(steps):
                    averager.average_parameters(params)
        except Exception as error:
            self.activity = activity
            raised = f"{type(error).__name__}: {error}"[:300]
        changed = changed_values(params, before)
        self.recorder.event("outside", raised=raised, changed=changed)

    def _make_trainee(self, group: Any) -> Trainee:
        """Return a model and its averager; the model's first values are the same on all ranks."""
        is_second_of_model = bool(option(self.scenario, ONE_MODEL) and self.trainees)
        if is_second_of_model:
            params = self.trainees[0].params
        else:
            params = Probe(self.scenario.params, 0.0, self.rank).to(self.device).tensors
        ranks = tuple(dist.get_process_group_ranks(group))
        trainee = self.trainee = Trainee(params, group, ranks, ranks.index(self.rank))
        give_subclasses(self.scenario, trainee.params)
        if self.scenario.variant in ("flat", "columns"):
            as_columns = self.scenario.variant == "columns"
            seed = f"{self.scenario.session_seed}/{self.scenario.name}/flat"
            last = len(trainee.params) - 1
            tied = of_values(self.scenario, last)
            trainee.buffers = FlatBuffers(
                trainee.params, seed, self.rank, as_columns, tied if tied != last else None
            )
            for parameter, view in zip(trainee.params, trainee.buffers.views, strict=True):
                parameter.data = view
        with torch.no_grad():
            for index, parameter in enumerate(trainee.params):
                parameter.copy_(self._values(self._first_source(ranks, index), index))
                parameter.requires_grad_(not is_frozen(self.scenario, 0, index))
        make = partial(
            self.make,
            averager=lambda: None,
            process_group=lambda: group if self._names_group else None,
            rank=lambda: trainee.place,
            world_size=lambda: len(ranks),
        )
        takes_any = self.target().names("params") and not self.target().requires_a_list("params")
        if self.scenario.name == FORMS.name and takes_any:
            trainee.averager = make_of_either(
                self, make, lambda: iter(trainee.take_params()), trainee.take_params
            )
        else:
            trainee.averager = make(params=trainee.take_params)
        if not callable(getattr(trainee.averager, "average_parameters", None)):
            raise TargetError(
                "an averager has a method average_parameters(params); "
                f"{type(trainee.averager).__name__} has none"
            )
        trainee.kept = copies(trainee.params)
        return trainee

    def _first_source(self, ranks: tuple[int, ...], index: int) -> Source:
        """Return the source of a parameter's first values: a frozen one keeps them."""
        kinds = enumerate(self.scenario.steps)
        first = next((step for step, kind in kinds if kind not in (QUIET, HELD)), 0)
        if is_frozen(self.scenario, first, index):
            return source(self.scenario, ranks, ranks.index(self.rank), first, index)
        return first_source(ranks)

    @property
    def _names_group(self) -> bool:
        """Whether the group is an argument. Left out, it is to be WORLD.

        Where None is the default, the usual call has no group.
        """
        return self.scenario.name != PLAIN.name or not self.target().has_none_for("process_group")

    @property
    def params(self) -> Parameters:
        """The parameters of the model whose turn it is."""
        return self.trainee.params

    def _step(self, step: int, kind: str) -> None:
        self.begin_step(step, kind)
        if self.trainee.was_loaded:
            # A checkpoint may be evaluated before it trains on.
            self._keep_evaluated(None, "restored", nests=False)
            self.trainee.was_loaded = False
        self._prepare(step, sets_values=kind != HELD)
        grads = self._gradient_digests()
        memories = self._memories_of_gradients()
        strides = [p.stride() for p in self.params]
        storages = [p.data_ptr() for p in self.params]
        with self.inside("average_parameters"):
            call = self._average(step)
        for index, parameter in enumerate(self.params):
            self.keep(f"parameter/p{index}", lay_out(parameter, "contiguous"))
        self.recorder.event(
            "averaged",
            grads_changed=[
                i for i, bits in enumerate(self._gradient_digests()) if bits != grads[i]
            ],
            grads_moved=[
                i for i, now in enumerate(self._memories_of_gradients()) if now != memories[i]
            ],
            strides_changed=[i for i, p in enumerate(self.params) if p.stride() != strides[i]],
            moved=[i for i, p in enumerate(self.params) if p.data_ptr() != storages[i]],
            asks_for_gradients=[
                i
                for i, p in enumerate(self.params)
                if p.requires_grad == is_frozen(self.scenario, step, i)
            ],
            grad_mode_changed=call.grad_mode_changed,
            form_changes=call.form_changes,
        )
        if self.trainee.buffers and self.trainee.buffers.gaps_changed():
            self.recorder.event("gap_change")
        self.trainee.kept = copies(self.params)
        if self.scenario.variant == "changing":
            # A parameter that was added has no average yet.
            if not is_given(self.scenario, step, ADDED):
                self._keep_evaluated(None, "applied", nests=False)
        elif not is_idle(self.scenario, step):
            # An averager may have no average of a parameter that is frozen.
            place = step % len(ENDS)
            given = None
            if self.scenario.variant == "forms":
                given = Given(self.scenario, step, self._first_given()).form
            with frozen(self.params) if place in FROZEN else nullcontext():
                self._keep_evaluated(ENDS[place], "applied", nests=place in NESTS, given=given)

    def _quiet_step(self, step: int) -> None:
        """Call the averager with the parameters as they are; record it if they change."""
        self.begin_step(step, QUIET)
        if option(self.scenario, ONE_MODEL):
            self._set_back()
        with self.inside("average_parameters"):
            self._average(step)
        changed = changed_values(self.params, self.trainee.kept)
        if changed:
            self.recorder.event("quiet_change", parameters=changed)
            self.trainee.kept = copies(self.params)

    @torch.no_grad()
    def _set_back(self) -> None:
        """Set parameters to their values after the last call of this averager: another one of the
        same model may have had its turn.
        """
        for parameter, kept in zip(self.params, self.trainee.kept, strict=True):
            parameter.copy_(kept)

    def _average(self, step: int) -> _Call:
        """Call the averager, in some steps as from inside ``torch.no_grad()``."""
        given = Given(
            self.scenario, step, [p for i, p in enumerate(self.params) if self._is_given(step, i)]
        )
        is_on = not is_grad_mode_off(self.scenario, step)
        with self.autocast(), nullcontext() if is_on else torch.no_grad():
            self.trainee.averager.average_parameters(given.form)
            grad_mode_changed = torch.is_grad_enabled() != is_on
        return _Call(grad_mode_changed, given.changes())

    def _is_given(self, step: int, index: int) -> bool:
        """Whether the averager is given a parameter; one that was made with all of them is."""
        return self.trainee.takes_params or is_given(self.scenario, step, index)

    def _first_given(self) -> Parameters:
        """Return the parameters that the averager is given from the start."""
        return [p for i, p in enumerate(self.params) if self._is_given(0, i)]

    @torch.no_grad()
    def _prepare(self, step: int, *, sets_values: bool) -> None:
        """Give the parameters this step's values, and those that have some, gradients."""
        ranks = self.trainee.ranks
        place = self.trainee.place
        self._move(step)
        for index, parameter in enumerate(self.params):
            parameter.requires_grad_(not is_frozen(self.scenario, step, index))
            if sets_values:
                of = source(self.scenario, ranks, place, step, index)
                by_data = is_written_to_data(self.scenario, index)
                (parameter.data if by_data else parameter).copy_(self._values(of, index))
            has_one = has_gradient(self.scenario, len(ranks), place, step, index)
            # A mean of gradients shows, since they differ between ranks. In some steps they are
            # zeros on all ranks, as of experts that rest.
            level = 0.0 if (step + index) % 3 == 0 else 1.0 + place
            overflows = overflow(self.scenario, len(ranks), place, step, index)
            parameter.grad = gradient_of(parameter, level, overflows) if has_one else None

    def _move(self, step: int) -> None:
        """Give parameters new memory, if this step does."""
        self.specs = specs_at(self.scenario, step)
        for index, parameter in enumerate(self.params):
            if how := way(self.scenario, step, index):
                spec = self.specs[index]
                made = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device)
                parameter.grad = None
                if how == REPLACED and not self.trainee.takes_params:
                    self.params[index] = torch.nn.Parameter(made)
                else:
                    parameter.data = made

    def _values(self, of: Source, index: int) -> torch.Tensor:
        size = len(self.trainee.ranks)
        values = values_of(of, self.specs[index], size, of_values(self.scenario, index))
        return values.to(self.device)

    def _gradient_digests(self) -> list[str | None]:
        return [None if p.grad is None else digest(p.grad) for p in self.params]

    def _memories_of_gradients(self) -> list[int | None]:
        return [None if p.grad is None else p.grad.data_ptr() for p in self.params]

    def _keep_evaluated(
        self,
        end: type[BaseException] | None,
        name: str,
        *,
        nests: bool,
        given: Iterable[Any] | None = None,
    ) -> None:
        averages = EvaluatedAverages(self, self.trainee.averager, self.params, self._first_given())
        averages.keep(end, name, nests=nests, form=given)

    def _save_averager(self) -> None:
        averager = self.trainee.averager
        with self._saving_or_loading("state_dict"):
            if hasattr(averager, "state_dict"):
                self.save(averager.state_dict())
            elif _counts(averager):
                self.save({"step": averager.step})
            else:
                self.save(None)
        self.recorder.event("saved", nothing=not self._has_state())

    @contextmanager
    def _saving_or_loading(self, call: str) -> Iterator[None]:
        with self.doing(call), parameters_left(self.recorder, f"{call}()", self.params):
            yield

    def _has_state(self) -> bool:
        averager = self.trainee.averager
        return hasattr(averager, "state_dict") or _counts(averager)

    def _load_averager(self) -> None:
        averager = self.trainees[0].averager
        loads_first = option(self.scenario, LOADS_FIRST) and not self._refuses_first(averager)
        with self._saving_or_loading("load_state_dict"):
            saved = self.load(0 if loads_first else None)
            self.recorder.event("loaded", nothing=saved is None)
            if hasattr(averager, "load_state_dict"):
                # One state may be loaded again, such as into the model of an evaluation.
                loads_again = self.scenario.variant == "loaded_twice"
                for _ in range(2 if loads_again else 1):
                    averager.load_state_dict(saved)
                if loads_again and hasattr(averager, "state_dict"):
                    # It may be saved before it averages, as in a job that is stopped early.
                    averager.load_state_dict(copy.deepcopy(averager.state_dict()))
            elif saved is not None:
                averager.step = saved["step"]
        self.trainees[0].was_loaded = True

    def _refuses_first(self, averager: Any) -> bool:
        """Return whether an error refuses the state of rank 0 on this rank, as if each rank had a
        state of its own.
        """
        if not self.rank or not hasattr(averager, "load_state_dict"):
            return False
        activity = self.activity
        try:
            with self._saving_or_loading("load_state_dict"):
                averager.load_state_dict(self.load(0))
        except Exception as error:
            self.activity = activity
            text = f"{type(error).__name__}: {str(error)[:200]}"
            self.recorder.event("refuses_first", error=text)
            return True
        return False

    def _roll_back(self, step: int, number: int) -> None:
        """Save the averager's state, go on for some steps or none, and load the state again.

        Args:
            step: the step that comes next, before these steps and after them.
            number: of steps that leave no record.
        """
        averager = self.trainee.averager
        names = ("state_dict", "load_state_dict")
        if not all(callable(getattr(averager, name, None)) for name in names):
            self.recorder.event("not_rolled_back", nothing=not self._has_state())
            return
        saved = BytesIO()
        activity = self.activity
        try:
            with self._saving_or_loading("state_dict"):
                # A state may share memory with the averager, as an optimizer's does.
                torch.save(averager.state_dict(), saved)
        except Exception:
            if step:
                raise
            # It may make what it saves in its first call.
            self.activity = activity
            self.recorder.event("not_rolled_back", nothing=False)
            return
        give_gradients(self.params)
        for later in range(step, step + number):
            with torch.no_grad():
                for index, parameter in enumerate(self.params):
                    of = Source("crafted", self.rank, ROLLED + later)
                    parameter.copy_(self._values(of, index))
            with self.inside("average_parameters"):
                self._average(step)
        saved.seek(0)
        with self._saving_or_loading("load_state_dict"):
            averager.load_state_dict(torch.load(saved, weights_only=False))
        self.trainee.was_loaded = True

"""A model under DDP, its optimizer, and the subject registered on it. Runs in ranks only."""

import copy
import functools
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.errors import TargetError
from conformance.ranks.models.optimizer_steps import step_and_put_back, step_faintly
from conformance.ranks.models.probe import Probe, training_network
from conformance.ranks.models.training_loop import TrainingLoop
from conformance.ranks.resolve import Context, Resolved, call_with_names, make_hook, make_state
from conformance.records.files import MODEL, MODEL_MADE, STATE
from conformance.scenarios.gradients import uses
from conformance.scenarios.kept_gradients import zeroes_in_place
from conformance.scenarios.learning_rates import learning_rates, rate_of_fused, rate_of_short_runs
from conformance.scenarios.model import Scenario
from conformance.subjects.spec import Case


class DDPModel:
    """One model of a scenario.

    Args:
        scenario: the scenario.
        group: the group that the model trains in.
        device: the device of the model.
        names_group: pass the group to DDP, and to hooks as their state. As scripts do, the default
            group is not named.
        is_twin: the model is the twin of another one.

    Attributes:
        scenario: the scenario.
        model, ddp, optimizer: the module, the same under DDP, and its optimizer.
        parameters: the module's parameters by name.
        training_loop: steps the model instead of ``optimizer``, if the scenario has one.
        case: the result of the subject's set-up, or the hook and state that were named.
        rescale: the trainer's call after a change of the loss scale, if the subject claims one.
        nameless: the type of a hook that has no name of its own; '' if it has a name.
        not_weights_only: why a saved state could not be loaded with ``weights_only=True``; '' if
            it could.
        belongs_to_ddp: the subject has been given the model under DDP, and may keep it.
    """

    def __init__(
        self,
        scenario: Scenario,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        names_group: bool,
        is_twin: bool = False,
    ) -> None:
        self.scenario = scenario
        self._is_twin = is_twin
        self._group = group
        self._names_group = names_group
        self._device = device
        is_probe = bool(scenario.params)
        if is_probe:
            probe = Probe(scenario.params, scenario.initial_value, dist.get_rank())
            self.model: torch.nn.Module = probe.to(device)
        else:
            self.model = training_network(scenario.session_seed).to(device)
        self.ddp = self._wrap(0)
        self.parameters = dict(self.model.named_parameters())
        parameters = list(self.model.parameters())
        self.optimizer = self._make_optimizer()
        self.training_loop: TrainingLoop | None = None
        if scenario.training_loop:
            self.training_loop = TrainingLoop(parameters, device.type)
        self.case = Case()
        self.rescale: Callable[[float], object] | None = None
        self.nameless = ""
        self.not_weights_only = ""
        self.belongs_to_ddp = False

    def _make_optimizer(self) -> torch.optim.SGD:
        # The parameters of a probe are put back after each step, or the hook steps them. Without
        # momentum no step needs the ones before it.
        options = {"lr": 0.1, "momentum": 0.9}
        if self.scenario.params:
            options = {"lr": rate_of_short_runs(self.scenario), "momentum": 0.0}
        if self.scenario.fused:
            options["lr"] = rate_of_fused(self.scenario, of_twin=self._is_twin)
        if self.scenario.long_run:
            options["lr"] = next(iter(learning_rates(self.scenario)), options["lr"])
        # One operation for each parameter, as the kit computes the values that are right.
        return torch.optim.SGD(self.model.parameters(), **options, foreach=False)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate, as a scheduler does between two steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def load_optimizer(self) -> None:
        """Have the trainer's optimizer load its own state, as a resumed training does.

        Its parameter groups are new dictionaries then, with the same values.
        """
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def set_checkpoints(self, number: int) -> None:
        """Give the next forwards of a probe so many reentrant checkpoints."""
        if isinstance(self.model, Probe):
            self.model.checkpoints = number

    def _wrap(self, number: int) -> DistributedDataParallel:
        options = self.scenario.ddp_options(number)
        ddp = DistributedDataParallel(
            self.model,
            process_group=self._group if self._names_group else None,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
        )
        ddp.train(not self.scenario.in_eval_mode)
        return ddp

    def renew_storage(self) -> None:
        """Move all parameters to new memory."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.clone()

    def freeze_unused(self, world: int, step: int, kind: str) -> None:
        """Freeze the parameters that no rank uses in a step, and thaw the others.

        DDP stays as it is, as for networks that are trained in turns.
        """
        for index, parameter in enumerate(self.parameters.values()):
            used = any(uses(world, rank, step, index, kind) for rank in range(world))
            parameter.requires_grad_(used and not self.scenario.is_frozen(index, step))

    def wrap_anew(self, step: int, doing: Callable[[str], AbstractContextManager[None]]) -> None:
        """Make DDP anew with the frozen parameters of a step, or with those of other dtypes and
        shapes, and register the same state on it.
        """
        number = self.scenario.ddp_number(step)
        with doing(MODEL_MADE):
            if isinstance(self.model, Probe) and self.scenario.has_versions:
                changed = self.model.change(number)
                # The same dictionary: instruments have it.
                self.parameters.clear()
                self.parameters.update(changed)
                self.optimizer = self._make_optimizer()
            else:
                for index, parameter in enumerate(self.parameters.values()):
                    parameter.requires_grad_(not self.scenario.is_frozen(index, step))
            self.ddp = self._wrap(number)
        with doing("register"):
            self._register_hook()

    def register(
        self,
        resolved: Resolved,
        option: str,
        doing: Callable[[str], AbstractContextManager[None]],
        saved: Path | None = None,
    ) -> None:
        """Make the subject's hook and state, and register them unless its set-up has done so.

        Args:
            resolved: the subject.
            option: the option that names the subject, for errors.
            doing: attributes errors to ``setup`` or ``state``, ``load_state`` and ``register``.
            saved: a folder that :meth:`save` has written, to go on from there.
        """
        context = self._context(resolved)
        if resolved.setup is not None:
            self.belongs_to_ddp = True
            with doing("setup"):
                self.case = _case_of(call_with_names(resolved.setup, {}, context))
                if self.case.saved is not None and not _has_state_dict(self.case.saved):
                    kind = type(self.case.saved).__name__
                    raise TargetError(
                        "--setup: the Case's `saved` has no state_dict() and "
                        f"load_state_dict(): {kind}"
                    )
        else:
            with doing("state"):
                hook, state = make_hook(resolved, context, option)
                if resolved.state is None and state is None:
                    state = self._default_state()
                self.case = Case(state, hook)
        if saved:
            with doing("load_state"):
                self.load(saved)
                if self.scenario.resume.passes_on:
                    self.load_saved(self.saved_state())
        with doing("register"):
            self._register_hook()
            if self.scenario.poststep:
                self.case.after_backward = self._poststep(resolved, context)
            if self.scenario.rescale_call:
                self.rescale = self._rescale(resolved)

    def _register_hook(self) -> None:
        hook = self.case.hook
        if hook is None:
            return  # the set-up has registered it
        if not (hasattr(hook, "__name__") and hasattr(hook, "__qualname__")):
            self.nameless = type(hook).__name__
            hook = _named(hook)
        self.ddp.register_comm_hook(self.case.state, hook)

    def _poststep(self, resolved: Resolved, context: Context) -> Callable[[], object]:
        """Return the trainer's call after backward.

        It is a function of the state, the hook's object or the module, followed by the call of the
        set-up, if it has one.
        """
        name = self.scenario.call
        own = self.case.after_backward
        if not name:
            if own is None:
                raise TargetError(
                    "--claims poststep: name the call, poststep(call=NAME), "
                    "or give the set-up's Case an after_backward"
                )
            return own
        function = self._function(name, resolved, f"poststep(call={name})")
        names = {**context, "state": lambda: self.case.state}
        return lambda: (call_with_names(function, {}, names), own and own())

    def _rescale(self, resolved: Resolved) -> Callable[[float], object]:
        """Return the trainer's call after a change of the loss scale, which takes the new scale as
        a multiple of the old one.
        """
        name = self.scenario.rescale_call
        return self._function(name, resolved, f"rescaled(call={name})")

    def _function(self, name: str, resolved: Resolved, claim: str) -> Callable[..., object]:
        """Return a function of the state, of what the set-up saves, of the hook or its module."""
        hook = self.case.hook
        module = sys.modules.get(getattr(resolved.setup or hook, "__module__", None) or "")
        owners = (self.case.state, self.case.saved, getattr(hook, "__self__", None), hook, module)
        for owner in owners:
            function: Callable[..., object] | None = getattr(owner, name, None)
            if callable(function):
                return function
        raise TargetError(
            f"--claims {claim}: "
            f"neither the state, the hook's object nor its module has a function {name}"
        )

    def make(self, resolved: Resolved, group: dist.ProcessGroup) -> tuple[Any, Any]:
        """Return the subject's hook and state for a rank of another group, with this model."""
        context = {
            **self._context(resolved),
            "process_group": lambda: group,
            "rank": group.rank,
            "world_size": group.size,
        }
        return make_hook(resolved, context, "")

    @property
    def scale(self) -> int:
        """The factor by which the gradients of the next step are multiplied."""
        return self.training_loop.scale if self.training_loop else 1

    def step(self) -> None:
        """Step the model with its gradients."""
        if self.training_loop:
            self.training_loop.step()
        else:
            self.optimizer.step()

    def end_step(
        self,
        step: int,
        doing: Callable[[str], AbstractContextManager[None]],
        *,
        faintly: bool = True,
    ) -> dict[str, bool]:
        """Have the optimizer of a probe make a step, and forget the gradients, or zero them in
        place, as scripts may.

        The step leaves the parameters as they are: a subject may count steps, or register a hook
        of a step that reads gradients. A training loop zeroes gradients in even steps, and a long
        run in drawn ones.

        Args:
            step: the number of the step.
            doing: attributes errors to ``optimizer``.
            faintly: the optimizer has gradients that change no bit, which takes less time.

        Returns:
            The names of the parameters that the optimizer has not moved as SGD does, and whether it
            has divided their gradients by the number of ranks.
        """
        moved_otherwise: dict[str, bool] = {}
        if self.scenario.params and not self.scenario.fused:
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            with doing("optimizer"):
                if faintly:
                    step_faintly(self.optimizer, list(names))
                else:
                    moved_otherwise = step_and_put_back(self.optimizer, names, self._group.size())
        in_loop = self.training_loop is not None and step % 2 == 0
        keeps = in_loop or zeroes_in_place(self.scenario, step)
        self.optimizer.zero_grad(set_to_none=not keeps)
        return moved_otherwise

    def save(self, folder: Path) -> None:
        """Save the subject's state, the model and its optimizer, as a training script does."""
        torch.save(self._state_to_save(), folder / STATE)
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(states, folder / MODEL)

    @property
    def can_be_loaded(self) -> bool:
        """Whether the subject's state, or what a Case saves, can load a state in this process."""
        return _has_state_dict(self._saved)

    def saved_state(self) -> BytesIO:
        """Return the subject's state as a training script saves it."""
        kept = BytesIO()
        torch.save(self._state_to_save(), kept)
        return kept

    def load_saved(self, kept: BytesIO) -> None:
        """Load a state that :meth:`saved_state` has returned."""
        kept.seek(0)
        self._load_state(torch.load(kept, weights_only=False))

    def load(self, folder: Path, *, twice: bool = False) -> None:
        """Load the subject's state and the model, which a training script has saved.

        So is the optimizer of a fused hook, whose parameter groups are new dictionaries then.

        A state without load_state_dict is replaced by the saved one.

        Args:
            folder: has the two files.
            twice: load the same object twice, as if it were kept in memory.
        """
        states = torch.load(folder / MODEL)
        self.model.load_state_dict(states["model"])
        if self.scenario.fused:
            self.optimizer.load_state_dict(states["optimizer"])
        try:
            saved = torch.load(folder / STATE, weights_only=True)
        except pickle.UnpicklingError as error:
            # The message is meant for a terminal: it has colours, and the reason in its midst.
            text = re.sub(r"\x1b\[\d*m", "", str(error))
            reason = text.rpartition("WeightsUnpickler error: ")[2]
            self.not_weights_only = reason.strip().splitlines()[0][:300]
            saved = torch.load(folder / STATE, weights_only=False)
        self._load_state(saved)
        if twice:
            self._load_state(saved)

    def _state_to_save(self) -> Any:
        state = self._saved
        return state.state_dict() if _has_state_dict(state) else state

    def _load_state(self, saved: Any) -> None:
        if _has_state_dict(self._saved):
            self._saved.load_state_dict(saved)
        elif saved is not None:
            self.case.state = saved

    @property
    def _saved(self) -> Any:
        """The state to save; None for a process group, which has none."""
        state = self.case.state if self.case.saved is None else self.case.saved
        return None if isinstance(state, dist.ProcessGroup) else state

    def _context(self, resolved: Resolved) -> Context:
        """Return the values that factories and set-ups can name, each made when it is needed."""
        # A subject that always uses WORLD counts the ranks of WORLD, whatever group its model has.
        counted = dist.group.WORLD if self.scenario.world_only else self._group
        context: Context = {
            "process_group": lambda: self._group,
            "model": self._named_ddp,
            "rank": lambda: dist.get_rank(counted),
            "world_size": lambda: dist.get_world_size(counted),
            "device": lambda: self._device,
            "optimizer": lambda: self.optimizer,
        }

        def state() -> Any:
            if resolved.state is None:
                return self._default_state()
            return make_state(resolved.state, context)

        return {**context, "state": state}

    def _named_ddp(self) -> DistributedDataParallel:
        self.belongs_to_ddp = True
        return self.ddp

    def _default_state(self) -> Any:
        """Return the state if none is given, as torch's default hooks take it."""
        return self._group if self._names_group else None


def _case_of(made: Any) -> Case:
    """Return the result of a set-up function as a Case."""
    if isinstance(made, Case):
        return made
    if isinstance(made, tuple):
        return Case(*made)
    return Case(hook=made if callable(made) else None)


def _has_state_dict(state: Any) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _named(hook: Any) -> Callable[..., Any]:
    """Give a callable that has no name that of its class, or the place of its function if it is
    partial.

    Its signature, which DDP checks, stays. DDP refuses some names on some backends, which are those
    of torch's own hooks: the name of a partial function is not that of the function.
    """
    origin = hook.func if isinstance(hook, functools.partial) else type(hook)

    def named(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    named.__name__ = type(hook).__name__
    for name in ("__qualname__", "__module__"):
        setattr(named, name, getattr(origin, name, type(hook).__name__))
    named.__signature__ = inspect.signature(hook)  # type: ignore[attr-defined]
    return named

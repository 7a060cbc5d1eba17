"""A model under DDP, its optimizer, and the subject that is registered on it. Runs in ranks only."""

import inspect
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.errors import TargetError
from conformance.ranks.models.probe import Probe, training_network
from conformance.ranks.models.training_loop import Recipe
from conformance.ranks.resolve import Resolved, call_with_names, make_hook, make_state
from conformance.records.files import MODEL, STATE
from conformance.scenarios.model import Scenario
from conformance.subjects.spec import Case


class Trainee:
    """One model of a scenario.

    Attributes:
        model, ddp, parameters, optimizer: what trains; ``parameters`` by name.
        recipe: what steps the model instead of ``optimizer``, or None.
        case: what the subject's set-up made, or the hook and state that were named.
        loaded: where a state was loaded, why not with ``weights_only=True``; '' where it was.
        nameless: the type of a hook that has no name of its own; '' where it has one.
    """

    def __init__(self, scenario: Scenario, group: dist.ProcessGroup, device: torch.device) -> None:
        self._scenario, self._group, self._device = scenario, group, device
        self.model = (Probe(scenario.params, scenario.initial_value, dist.get_rank()) if scenario.params else training_network()).to(device)
        self.ddp = DistributedDataParallel(
            self.model,
            process_group=group if scenario.groups else None,
            bucket_cap_mb=scenario.ddp.bucket_cap_mb,
            gradient_as_bucket_view=scenario.ddp.gradient_as_bucket_view,
            find_unused_parameters=scenario.ddp.find_unused_parameters,
            static_graph=scenario.ddp.static_graph,
        )
        self.parameters = dict(self.model.named_parameters())
        lr, momentum = (0.0, 0.0) if scenario.params else (0.1, 0.9)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.recipe = Recipe(list(self.model.parameters()), device.type) if scenario.training_loop else None
        self.case = Case()
        self.nameless, self.loaded = "", ""

    def register(self, resolved: Resolved, hook_option: str, at: Callable[[str], None], saved: Path | None = None) -> None:
        """Make the subject's hook and state, and register them, unless its set-up has done so.

        Args:
            resolved: the subject.
            hook_option: how it was named, for errors.
            at: called with what is done next: ``setup`` or ``state``, ``load_state``, ``register``.
            saved: a folder that :meth:`save` has written, to go on from there.
        """
        context = self._context(resolved)
        if resolved.setup is not None:
            at("setup")
            made = call_with_names(resolved.setup, {}, context)
            self.case = (
                made if isinstance(made, Case) else Case(*made) if isinstance(made, tuple) else Case(hook=made if callable(made) else None)
            )
            if self.case.saved is not None and not _has_state_dict(self.case.saved):
                kind = type(self.case.saved).__name__
                raise TargetError(f"--setup: the Case's `saved` has no state_dict() and load_state_dict(): {kind}")
        else:
            at("state")
            hook, state = make_hook(resolved, context, hook_option)
            if resolved.state is None and state is None:
                state = self._default_state()
            self.case = Case(state, hook)
        if saved:
            at("load_state")
            self._load(saved)
        at("register")
        hook = self.case.hook
        if hook is not None:
            if not (hasattr(hook, "__name__") and hasattr(hook, "__qualname__")):
                self.nameless = type(hook).__name__
                hook = _named(hook)
            self.ddp.register_comm_hook(self.case.state, hook)
        if self._scenario.poststep:
            self.case.after_backward = self._poststep(resolved, context)

    def _poststep(self, resolved: Resolved, context: dict[str, Callable[[], Any]]) -> Callable[[], object]:
        """Return what the trainer calls when backward is over: of the state, the hook's object, or the module; then the set-up's own."""
        call, own = self._scenario.call, self.case.after_backward
        if not call:
            if own is None:
                raise TargetError("--claims poststep: say which call, poststep(call=NAME), or give the set-up's Case an after_backward")
            return own
        hook = self.case.hook
        module = sys.modules.get(getattr(resolved.setup or hook, "__module__", None) or "")
        for owner in (self.case.state, getattr(hook, "__self__", None), hook, module):
            if callable(flush := getattr(owner, call, None)):
                names = {**context, "state": lambda: self.case.state}
                return lambda: (call_with_names(flush, {}, names), own and own())
        raise TargetError(f"--claims poststep(call={call}): neither the state, the hook's object nor its module has a function {call}")

    def make(self, resolved: Resolved, group: dist.ProcessGroup) -> tuple[Any, Any]:
        """Return the subject's hook and state for a rank of another group, with this model."""
        context = {**self._context(resolved), "process_group": lambda: group, "rank": group.rank, "world_size": group.size}
        return make_hook(resolved, context, "")

    @property
    def scale(self) -> int:
        """What the gradients of the next step are to be multiplied by."""
        return self.recipe.scale if self.recipe else 1

    def step(self) -> None:
        """Step the model with its gradients."""
        if self.recipe:
            self.recipe.step()
        else:
            self.optimizer.step()

    def zero_grad(self, step: int) -> None:
        """Forget the gradients; fill them with zeros instead in every other step of a recipe, as some scripts do."""
        self.optimizer.zero_grad(set_to_none=not self.recipe or bool(step % 2))

    def save(self, folder: Path) -> None:
        """Save the subject's state and the model, as a training script does; of a state that is a group there is nothing to save."""
        state = self._saved
        torch.save(state.state_dict() if _has_state_dict(state) else state, folder / STATE)
        torch.save(self.model.state_dict(), folder / MODEL)

    def _load(self, folder: Path) -> None:
        self.model.load_state_dict(torch.load(folder / MODEL))
        try:
            saved = torch.load(folder / STATE, weights_only=True)
        except pickle.UnpicklingError as error:
            text = re.sub(r"\x1b\[\d*m", "", str(error))
            self.loaded = text.rpartition("WeightsUnpickler error: ")[2].strip().splitlines()[0][:300]
            saved = torch.load(folder / STATE, weights_only=False)
        if _has_state_dict(self._saved):
            self._saved.load_state_dict(saved)
        elif saved is not None:
            self.case.state = saved

    @property
    def _saved(self) -> Any:
        """What is to be saved: a group is not."""
        state = self.case.state if self.case.saved is None else self.case.saved
        return None if isinstance(state, dist.ProcessGroup) else state

    def _context(self, resolved: Resolved) -> dict[str, Callable[[], Any]]:
        """The values that factories and set-ups can name, each made when asked for."""
        context: dict[str, Callable[[], Any]] = {
            "process_group": lambda: self._group,
            "model": lambda: self.ddp,
            "rank": lambda: dist.get_rank(self._group),
            "world_size": lambda: dist.get_world_size(self._group),
            "device": lambda: self._device,
            "optimizer": lambda: self.optimizer,
        }
        return {**context, "state": lambda: self._default_state() if resolved.state is None else make_state(resolved.state, context)}

    def _default_state(self) -> Any:
        """The state where none is given, as torch's default hooks take it."""
        return self._group if self._scenario.groups else None


def _has_state_dict(state: Any) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _named(hook: Any) -> Callable[..., Any]:
    """Give a name to a callable that has none; its signature, which DDP checks, stays."""

    def named(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    named.__name__ = type(hook).__name__
    named.__signature__ = inspect.signature(hook)  # type: ignore[attr-defined]
    return named

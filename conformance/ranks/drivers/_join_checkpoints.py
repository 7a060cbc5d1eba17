"""A joinable's state that is saved after a join, and loaded by a new joinable."""

import io
from collections.abc import Mapping
from typing import Any

import torch

from conformance.ranks.drivers._equal_states import copies, same_values
from conformance.ranks.drivers._join_parts import parts_of
from conformance.ranks.drivers.base import RankDriver

_METHODS = ("state_dict", "load_state_dict")
_NUMBERS = (int, float, complex, str, bytes)


class Checkpoint:
    """The state of a joinable whose class has ``state_dict`` and ``load_state_dict`` of its own.

    A subclass of a module that inherits them saves the model alone. So does one whose state has
    the values of the model, by any names, and numbers that a new joinable has as well: what else
    there is to save is the trainer's to save. If a state has tensors, but no parameters, then the
    trainer saves the model, and the kit copies it.

    Args:
        driver: of this rank.
    """

    def __init__(self, driver: RankDriver) -> None:
        self.driver = driver
        self._saved: bytes | None = None
        self._has_more = False
        self._left: list[list[torch.Tensor]] = []

    def save(self, subject: Any) -> None:
        """Save the state, if it is not empty and can be saved."""
        self._saved = None
        if not _has_own_methods(subject):
            return
        try:
            state = subject.state_dict()
            if state:
                self._compare(state, _models_of(subject))
                file = io.BytesIO()
                torch.save(state, file)
                self._saved = file.getvalue()
        except Exception:
            # It may be for one rank alone to save it, or to be consolidated before.
            return

    def _compare(self, state: Any, models: list[list[torch.Tensor]]) -> None:
        """Note whether a state has tensors beyond those of models, and copy a model that is left
        out.
        """
        own = [one for model in models for one in model]
        self._has_more = False
        has_parameters = False
        has_tensors = False
        for value in _leaves(state).values():
            if not isinstance(value, torch.Tensor):
                continue
            has_tensors = True
            # Each value of the model is found once: a count may be like one in a buffer.
            found = next((at for at, one in enumerate(own) if _is_copy(value, one)), None)
            if found is None:
                self._has_more = True
            else:
                has_parameters |= isinstance(own.pop(found), torch.nn.Parameter)
        is_left = has_tensors and not has_parameters
        self._left = [copies(model) for model in models] if is_left else []

    def load_into(self, subject: Any, number: int) -> bool:
        """Load the state into another joinable, and record whether it took it; return whether the
        class has the methods.

        Args:
            number: of the context that follows.
        """
        if not _has_own_methods(subject):
            return False
        try:
            new = _leaves(subject.state_dict())
        except Exception:
            new = {}  # it may need a step before
        is_loaded = False
        if self._saved is not None:
            state = torch.load(io.BytesIO(self._saved), weights_only=False)
            if self._has_more or _has_other_numbers(state, new):
                try:
                    self._copy_model(subject)
                    subject.load_state_dict(state)
                    is_loaded = True
                except Exception:
                    # It may take the state of one rank alone, or need a step before.
                    is_loaded = False
        self.driver.recorder.event("resumed", context=number, is_loaded=is_loaded)
        return True

    @torch.no_grad()
    def _copy_model(self, subject: Any) -> None:
        """Copy the model that a state leaves out, as a trainer loads it."""
        for saved, model in zip(self._left, _models_of(subject), strict=bool(self._left)):
            for value, own in zip(saved, model, strict=True):
                own.copy_(value)


def _models_of(subject: Any) -> list[list[torch.Tensor]]:
    """Return the parameters and buffers of a joinable and of the modules that the kit finds."""
    parts = [subject, *parts_of(subject).values()]
    modules = {id(part): part for part in parts if isinstance(part, torch.nn.Module)}.values()
    inner = {id(one) for part in modules for one in part.modules() if one is not part}
    return [
        [
            *(one for _, one in part.named_parameters(remove_duplicate=False)),
            *(one for _, one in part.named_buffers(remove_duplicate=False)),
        ]
        for part in modules
        if id(part) not in inner
    ]


def _is_copy(value: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a value of a state is one of the model, perhaps in another dtype or on another
    device.
    """
    if value.shape != own.shape:
        return False
    return same_values(value.detach().cpu(), own.detach().to("cpu", value.dtype))


def _leaves(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return the values in nested mappings, lists and tuples by their paths, without None."""
    if isinstance(state, (list, tuple)):
        state = dict(enumerate(state))
    if not isinstance(state, Mapping):
        return {} if state is None else {path: state}
    found: dict[tuple[Any, ...], Any] = {}
    for name, value in state.items():
        found |= _leaves(value, (*path, name))
    return found


def _has_other_numbers(state: Any, new: Mapping[tuple[Any, ...], Any]) -> bool:
    """Whether a state has numbers, or objects, that the state of a new joinable has not."""
    return any(
        not isinstance(value, _NUMBERS) or new.get(path) != value
        for path, value in _leaves(state).items()
        if not isinstance(value, torch.Tensor)
    )


def _has_own_methods(subject: Any) -> bool:
    owners = [
        next((made for made in type(subject).__mro__ if name in vars(made)), None)
        for name in _METHODS
    ]
    return not any(one is None or one.__module__.split(".")[0] == "torch" for one in owners)

"""A joinable's state that is saved after a join, and loaded by a new joinable."""

import io
from collections.abc import Mapping
from typing import Any

import torch

from conformance.ranks.drivers.base import RankDriver

_METHODS = ("state_dict", "load_state_dict")


class Checkpoint:
    """The state of a joinable whose class has ``state_dict`` and ``load_state_dict`` of its own.

    A subclass of a module that inherits them saves the model alone. So does one whose methods leave
    out the prefix of the module inside: what else there is to save is the trainer's to save.

    Args:
        driver: of this rank.
    """

    def __init__(self, driver: RankDriver) -> None:
        self.driver = driver
        self._saved: bytes | None = None

    def save(self, subject: Any) -> None:
        """Save the state, if it is not empty and can be saved."""
        self._saved = None
        if not _has_own_methods(subject):
            return
        try:
            state = subject.state_dict()
            if state and not _is_of_model_alone(subject, state):
                file = io.BytesIO()
                torch.save(state, file)
                self._saved = file.getvalue()
        except Exception:
            # It may be for one rank alone to save it, or to be consolidated before.
            return

    def load_into(self, subject: Any, number: int) -> bool:
        """Load the state into another joinable, and record whether it took it; return whether the
        class has the methods.

        Args:
            number: of the context that follows.
        """
        if not _has_own_methods(subject):
            return False
        is_loaded = False
        if self._saved is not None:
            state = torch.load(io.BytesIO(self._saved), weights_only=False)
            try:
                subject.load_state_dict(state)
                is_loaded = True
            except Exception:
                # It may take the state of one rank alone, or need a step before.
                is_loaded = False
        self.driver.recorder.event("resumed", context=number, is_loaded=is_loaded)
        return True


def _is_of_model_alone(subject: Any, state: Any) -> bool:
    """Whether a module's state holds nothing but its parameters and buffers, by any names."""
    if not isinstance(subject, torch.nn.Module) or not isinstance(state, Mapping):
        return False
    own = torch.nn.Module.state_dict(subject).values()
    of_model = {one.data_ptr() for one in own if isinstance(one, torch.Tensor)}
    return all(
        isinstance(one, torch.Tensor) and one.data_ptr() in of_model for one in state.values()
    )


def _has_own_methods(subject: Any) -> bool:
    owners = [
        next((made for made in type(subject).__mro__ if name in vars(made)), None)
        for name in _METHODS
    ]
    return not any(one is None or one.__module__.split(".")[0] == "torch" for one in owners)

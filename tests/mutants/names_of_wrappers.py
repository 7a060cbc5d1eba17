"""Mutants of rule 19.10: wrappers that take parts of a key which others have added for theirs, and
those that save or load other states than the module does.
"""

from collections import OrderedDict
from itertools import chain
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.wrappers import Around

State = dict[str, Any]


def _renamed(state: State, names: dict[str, str]) -> State:
    for key, name in names.items():
        state[name] = state.pop(key)
    return state


class DropsItsNameAnywhere(Around):
    """Remove the wrapper's name from all keys, also where DDP has added the same one."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = torch.nn.Module.state_dict(self, *args, **kwargs)
        return _renamed(state, {key: key.replace("module.", "") for key in list(state)})


class CleansKeys(Around):
    """Remove the names that wrappers are known by, those of torch.compile and of DDP among them."""

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = torch.nn.Module.state_dict(self, *args, prefix=prefix, **kwargs)
        known = {"module", "_orig_mod"}
        own = [key for key in state if key.startswith(prefix)]
        clean = {key: ".".join(part for part in key.split(".") if part not in known) for key in own}
        return _renamed(state, clean)


class LooksForItsNameAnywhere(Around):
    """On loading, take a key for one of a wrapper's if the name is in any part of it."""

    def _load_from_state_dict(self, state_dict: State, prefix: str, *_: Any) -> None:
        plain = [key for key in state_dict if key.startswith(prefix) and "module." not in key]
        _renamed(state_dict, {key: f"{prefix}module.{key[len(prefix) :]}" for key in plain})


class SavesTensors(Around):
    """Save all parameters and buffers: extra states are lost, passing buffers are saved."""

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        state = OrderedDict() if destination is None else destination
        for name, one in chain(self.module.named_parameters(), self.module.named_buffers()):
            state[prefix + name] = one if keep_vars else one.detach()
        return state


class SavesAllBuffers(Around):
    """Save buffers that are not persistent, too."""

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = self.module.state_dict(*args, prefix=prefix, **kwargs)
        state.update({prefix + name: one for name, one in self.module.named_buffers()})
        return state


class LoadsTensors(Around):
    """Leave extra states as they are on loading."""

    def _load_from_state_dict(self, state_dict: State, prefix: str, *_: Any) -> None:
        for key, value in self.module.state_dict(prefix=prefix).items():
            if key.endswith("_extra_state"):
                state_dict[key] = value
        super()._load_from_state_dict(state_dict, prefix)


MUTANTS = [
    Mutant("DropsItsNameAnywhere", ("19.10",), kind="wrapper"),
    Mutant("CleansKeys", ("19.10",), kind="wrapper"),
    Mutant("LooksForItsNameAnywhere", ("19.10",), kind="wrapper"),
    Mutant("SavesTensors", ("19.10",), kind="wrapper"),
    Mutant("SavesAllBuffers", ("19.10",), kind="wrapper"),
    Mutant("LoadsTensors", ("19.10",), kind="wrapper"),
]

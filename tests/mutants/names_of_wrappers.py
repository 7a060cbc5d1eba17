"""Mutants of rule 19.10: wrappers that take parts of a key which others have added for theirs."""

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


MUTANTS = [
    Mutant("DropsItsNameAnywhere", ("19.10",), kind="wrapper"),
    Mutant("CleansKeys", ("19.10",), kind="wrapper"),
    Mutant("LooksForItsNameAnywhere", ("19.10",), kind="wrapper"),
]

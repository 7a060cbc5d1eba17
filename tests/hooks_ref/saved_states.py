"""Set-ups that save a hook's state when a run ends, and continue from it in another run, in new
processes."""

import importlib
from pathlib import Path
from typing import Any

import torch

from conformance import Case


def saves(rank: int, hook: str, state: str, folder: str) -> Case:
    """Run ``hook`` with a state made by ``state``, both ``module:attribute``; save it after."""
    made = _named(state)()
    return Case(made, _named(hook), close=lambda: torch.save(made, Path(folder) / f"{rank}.pt"))


def loads(rank: int, hook: str, folder: str) -> Case:
    """Run ``hook`` with the state that was saved."""
    found = _named(hook)
    return Case(torch.load(Path(folder) / f"{rank}.pt", weights_only=True), found)


def loads_state_dict(rank: int, hook: str, state: str, folder: str) -> Case:
    """Run ``hook`` with a new state that takes over the one that was saved."""
    found = _named(hook)
    made = _named(state)()
    made.load_state_dict(torch.load(Path(folder) / f"{rank}.pt", weights_only=True).state_dict())
    return Case(made, found)


def _named(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)

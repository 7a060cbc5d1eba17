"""The load of a saved state by the optimizers of new processes."""

import datetime
import io
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist

from conformance.ranks.drivers._kit_averager import Averager
from conformance.records.recorder import Recorder
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import RESUMED
from conformance.scenarios.optimizer_training import RESUMED_GROUPS, averages_gradients


class Loading(Protocol):
    """The parts of the driver of optimizers that a load needs."""

    rank: int
    scenario: Scenario
    recorder: Recorder
    signals: dist.Store
    timeout: float
    activity: str
    averager: Averager | None
    consolidates: bool

    @property
    def ranks_of_group(self) -> list[int]: ...

    def load(self, rank: int | None = None) -> Any: ...

    def load_state(self, state: Any) -> None: ...

    def doing(self, activity: str) -> AbstractContextManager[None]: ...


def load_saved(driver: Loading) -> None:
    """Load the state that other processes have saved: of the group's first rank, or the own one.

    A consolidated state is on the first rank alone. If an optimizer averages gradients, and its
    states hold the same tensors on all ranks, that of the first rank is loaded on all: trainers
    write a checkpoint on one rank. If a rank refuses that state, every rank loads its own.
    """
    ranks = driver.ranks_of_group
    if driver.consolidates:
        driver.load_state(driver.load(ranks[0])["state"])
        return
    is_replicated = (
        driver.scenario.name in (RESUMED.name, RESUMED_GROUPS.name)
        and averages_gradients(driver.scenario)
        and driver.averager is None
    )
    if is_replicated and _have_equal_tensors([driver.load(rank)["state"] for rank in ranks]):
        refused = f"refuses the state of/{ranks[0]}"
        _load_first(driver, ranks[0], refused)
        driver.signals.set(f"tried the state of/{ranks[0]}/{driver.rank}", "1")
        everybody = [f"tried the state of/{ranks[0]}/{rank}" for rank in ranks]
        driver.signals.wait(everybody, datetime.timedelta(seconds=driver.timeout))
        if not driver.signals.check([refused]):
            return
    driver.load_state(driver.load()["state"])


def _load_first(driver: Loading, first: int, refused: str) -> None:
    """Load the state of the group's first rank, and signal an error on another rank."""
    if driver.rank == first:
        driver.load_state(driver.load(first)["state"])
        return
    activity = driver.activity
    try:
        driver.load_state(driver.load(first)["state"])
    except Exception as error:
        driver.activity = activity
        text = f"{type(error).__name__}: {str(error)[:200]}"
        driver.recorder.event("refuses_first", error=text)
        driver.signals.set(refused, "1")


def _have_equal_tensors(states: Sequence[Any]) -> bool:
    """Return whether states hold the same tensors, bit by bit, and hold any."""
    first, *others = [_tensors(state) for state in states]
    return any(len(content) for _, content in first) and all(first == other for other in others)


def _tensors(state: Any) -> list[tuple[str, bytes]]:
    """Return the forms and the bytes of all tensors and arrays in a state, also in objects."""
    found: list[tuple[str, bytes]] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> str | None:
            if isinstance(value, numpy.ndarray):
                found.append(("array", pickle.dumps(value)))
                return ""
            if not isinstance(value, torch.Tensor):
                return None
            dense = value.detach().cpu().to_dense() if value.is_sparse else value.detach().cpu()
            flat = dense.contiguous().reshape(-1).view(torch.uint8)
            found.append((f"{value.dtype} {list(value.shape)}", flat.numpy().tobytes()))
            return ""

    Pickler(io.BytesIO()).dump(state)
    return found

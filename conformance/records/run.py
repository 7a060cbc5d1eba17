"""A finished run as rules see it: the scenario, and what every rank recorded."""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.records.files import OUTCOME, PEER_DIED
from conformance.records.rank_record import RankRecord, read_rank
from conformance.scenarios.gradients import REPEATED, gradient, sparse_rows, uses
from conformance.scenarios.model import Param, Scenario


@dataclass
class Run:
    """One scenario at one world size.

    Attributes:
        scenario: what was run.
        world: number of processes.
        ranks: the record of each.
        stopped: ``ended``, or why the host ended it: ``hang``, ``peer``, ``flood``, ``host``, ``node``.
        left_processes: command lines of processes that outlived their rank.
        host: how the host died, or the node was lost, when it was.
    """

    scenario: Scenario
    world: int
    ranks: list[RankRecord]
    stopped: str = "ended"
    left_processes: tuple[str, ...] = ()
    host: str = ""

    @property
    def name(self) -> str:
        return f"{self.scenario.name}@{self.world}"

    @property
    def finished(self) -> bool:
        if self.stopped != "ended" or not self.ranks:
            return False
        killed_by_kit = {1: PEER_DIED} if self.scenario.fault.kind in ("peer_dies", "peer_dies_later") else {}
        return all(rank.finished or rank.exit == killed_by_kit.get(rank.rank) for rank in self.ranks)

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks that the model of ``rank`` lives on."""
        return self.scenario.group_of(rank, self.world)

    def steps(self, *kinds: str) -> list[int]:
        """Return the steps that fed one of ``kinds``."""
        return [step for step, kind in enumerate(self.scenario.steps) if kind in kinds]

    def parameter_name(self, index: int) -> str:
        return f"p{index}.weight" if self.scenario.params[index].layout == "sparse" else f"p{index}"

    def element_index(self, index: int, element: int) -> tuple[int, ...]:
        """Return the index within a parameter of an element of what :meth:`got` returns."""
        spec = self.scenario.params[index]
        shape = (*spec.shape, 2) if spec.dtype.startswith("complex") else spec.shape
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(element), shape)) if shape else ()

    def element(self, name: str, at: int) -> str:
        """Say which element of the tensor of that name, as records have it, is the one at that place in C order."""
        return f"element {at}"

    def got(self, rank: int, step: int, index: int) -> torch.Tensor | None:
        """Return the gradient that DDP left on ``rank``, flat in float64 (complex as pairs).

        Where a fused hook has freed it, it is what its future held.
        """
        tensors, name = self.ranks[rank].tensors, self.parameter_name(index)
        tensor = tensors.get(f"{step}/grad/{name}", tensors.get(f"{step}/result/{name}"))
        return None if tensor is None else tensor.reshape(-1).double()

    def bytes_sent(self, begin: int = 0) -> Iterator[tuple[int, int, list[tuple[str, int]], int]]:
        """Yield (rank, step, (collective, bytes) that the rank gave to each, bytes of its gradients), from step ``begin`` on."""
        for rank in self.ranks:
            for sent in rank.all("sent"):
                if sent["step"] >= begin:
                    calls = rank.all("call", step=sent["step"])
                    gradients = sum(call["numel"] * getattr(torch, call["dtype"]).itemsize for call in calls)
                    yield rank.rank, sent["step"], [(name, size) for name, size in sent["collectives"]], gradients

    def recorded(self, group: tuple[int, ...], step: int, index: int) -> torch.Tensor | None:
        """Return what ``group`` fed, ``[W, numel]`` in float64, where that is on record; None where the inputs are the kit's own."""
        return None

    def knows(self, step: int) -> bool:
        """Whether it is known what was fed at ``step``."""
        return step >= 0

    def feeds(self, rank: int, step: int, index: int) -> bool:
        """Whether ``rank`` has an input at ``step``, and its forward uses the parameter; if not, zeros are its part of the mean."""
        group = self.group(rank)
        number = step + self.scenario.first_step
        used = not self.scenario.ddp.find_unused_parameters or uses(len(group), group.index(rank), number, index)
        return step < self.scenario.inputs_of(rank, self.world) and used and not self.scenario.params[index].frozen

    def receives(self, rank: int, step: int, index: int) -> bool:
        """Whether DDP leaves a gradient on ``rank``: it has an input, and some rank of its group has fed one."""
        has_input = step < self.scenario.inputs_of(rank, self.world)
        return has_input and any(self.feeds(other, step, index) for other in self.group(rank))

    def fed(self, rank: int, step: int, index: int) -> torch.Tensor:
        """Return the gradient that the kit fed on ``rank``, in the same form."""
        spec = self.scenario.params[index]
        if not self.feeds(rank, step, index):
            return torch.zeros(math.prod(spec.shape) * (2 if spec.dtype.startswith("complex") else 1), dtype=torch.float64)
        kind = self.scenario.steps[step]
        same = kind in REPEATED and spec.layout != "sparse"  # at every step: of a sparse one, other rows are used
        number = 0 if same else step + self.scenario.first_step
        return fed(kind, spec, len(self.group(rank)), rank, number, index)

    def bucket_of(self, rank: int, step: int, index: int) -> int | None:
        """Return the index of the bucket that held a parameter at ``step``."""
        name = self.parameter_name(index)
        return next((e["index"] for e in self.ranks[rank].all("call", step=step) if name in e["parameters"]), None)


@functools.lru_cache(maxsize=4096)
def fed(kind: str, spec: Param, world: int, rank: int, step: int, index: int) -> torch.Tensor:
    """Return what the kit feeds on ``rank``, in the form of :meth:`Run.fed`; ``world`` is the size of its group."""
    values = gradient(kind, spec.shape, getattr(torch, spec.dtype), world=world, rank=rank, step=step, param=index)
    if spec.layout == "sparse":
        used = torch.zeros(spec.shape[0], 1, dtype=values.dtype)
        used[sparse_rows(spec.shape[0], rank, step)] = 1
        values = values * used
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.reshape(-1).double()


def load_run(folder: Path, scenario: Scenario, world: int) -> Run:
    """Read the records of a run from its folder."""
    outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_text())
    ranks = [read_rank(folder / str(rank["rank"]), rank["rank"], rank) for rank in outcome["ranks"]]
    return Run(scenario, world, ranks, outcome["stopped"], tuple(outcome["left_processes"]), outcome.get("host", ""))

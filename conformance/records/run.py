"""A finished run as rules read it: the scenario, and the records of all ranks."""

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
from conformance.scenarios.specials import base_kind
from conformance.scenarios.used_in_micro_batches import factor_of_step


@dataclass(eq=False)
class Run:
    """One scenario at one world size. Each is equal to itself alone.

    Attributes:
        scenario: the scenario that was run.
        world: the number of processes.
        ranks: the record of each rank.
        stopped: ``ended``, or why the host ended the run: ``hang``, ``peer``, ``flood``, ``host``,
            ``silent``, ``node``.
        left_processes: command lines of processes that outlived their rank.
        host: how the host died or fell silent, or the node was lost, if that happened.
        reference: the run of the claimed reference, for rules that compare each run with it.
    """

    scenario: Scenario
    world: int
    ranks: list[RankRecord]
    stopped: str = "ended"
    left_processes: tuple[str, ...] = ()
    host: str = ""
    reference: "Run | None" = None

    @property
    def name(self) -> str:
        return f"{self.scenario.name}@{self.world}"

    @property
    def finished(self) -> bool:
        """Whether every rank has a complete record, except one that the kit killed."""
        if self.stopped != "ended" or not self.ranks:
            return False
        killed_by_kit: set[tuple[int, int | None]] = set()
        if self.scenario.fault.kind in ("peer_dies", "peer_dies_later"):
            killed_by_kit = {(1, PEER_DIED)}
        return all(rank.finished or (rank.rank, rank.exit) in killed_by_kit for rank in self.ranks)

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the group that the model of ``rank`` lives on."""
        return self.scenario.group_of(rank, self.world)

    def steps(self, *kinds: str) -> list[int]:
        """Return the steps that fed one of these kinds of gradient, at whatever place."""
        steps = enumerate(self.scenario.steps)
        return [step for step, kind in steps if base_kind(kind) in kinds]

    def parameter_name(self, index: int) -> str:
        if self.scenario.params[index].layout == "sparse":
            return f"p{index}.weight"
        return f"p{index}"

    def element_index(self, index: int, element: int) -> tuple[int, ...]:
        """Return the index within a parameter of one element of the result of :meth:`got`.

        Args:
            index: the number of the parameter.
            element: the element's position in the flat result.
        """
        spec = self.scenario.params[index]
        shape = spec.shape
        if spec.dtype.startswith("complex"):
            shape = (*shape, 2)
        if not shape:
            return ()
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(element), shape))

    def element(self, name: str, at: int) -> str:
        """Return a description of one element of a recorded tensor.

        Args:
            name: the tensor's name in the record.
            at: the element's position in C order.
        """
        return f"element {at}"

    def got(self, rank: int, step: int, index: int) -> torch.Tensor | None:
        """Return the gradient that DDP left on ``rank``, or None if none is on record.

        It is flat and in float64, complex values as pairs. If a fused hook has freed the gradient,
        it is the value of the hook's future.
        """
        tensors = self.ranks[rank].tensors
        name = self.parameter_name(index)
        tensor = tensors.get(f"{step}/grad/{name}")
        if tensor is None:
            tensor = tensors.get(f"{step}/result/{name}")
        return None if tensor is None else tensor.reshape(-1).double()

    def fold(self, rank: int, step: int, name: str) -> dict[str, torch.Tensor]:
        """Return the parts of a folded result (``ranks/instruments/folding.py``), in float64.

        Args:
            rank: the rank.
            step: the step.
            name: ``grad``, ``parameter``, or the bucket.

        Returns:
            ``low``, ``high``, and perhaps ``low_at`` and ``high_at``; empty if none is on record.
        """
        prefix = f"{step}/fold/{name}/"
        tensors = self.ranks[rank].tensors
        parts = {key: tensors.get(prefix + key) for key in ("low", "high", "low_at", "high_at")}
        return {
            key: part.double() if part.is_floating_point() else part
            for key, part in parts.items()
            if part is not None
        }

    def dropped(self, rank: int, step: int, index: int) -> torch.Tensor | None:
        """Return the hook's result that DDP dropped, because no rank had used the parameter.

        It has the form of :meth:`got`, and is None if none is on record.
        """
        tensors = self.ranks[rank].tensors
        name = self.parameter_name(index)
        tensor = tensors.get(f"{step}/dropped/{name}", tensors.get(f"{step}/result/{name}"))
        return None if tensor is None else tensor.reshape(-1).double()

    def bytes_sent(self, begin: int = 0) -> Iterator[tuple[int, int, list[tuple[str, int]], int]]:
        """Yield the traffic of every rank and step, from step ``begin`` on.

        Each item is the rank, the step, a list of collectives with the bytes that the rank gave to
        each, and the bytes of the rank's gradients.
        """
        for rank in self.ranks:
            for sent in rank.all("sent"):
                if sent["step"] >= begin:
                    calls = rank.all("call", step=sent["step"])
                    gradients = sum(
                        call["numel"] * getattr(torch, call["dtype"]).itemsize for call in calls
                    )
                    collectives = [(name, size) for name, size in sent["collectives"]]
                    yield rank.rank, sent["step"], collectives, gradients

    def bytes_sent_unrecorded(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield the traffic of every rank in the steps before those that are recorded.

        Each item is the rank, the bytes that it gave to collectives in each step, and the bytes of
        its gradients in a step.
        """
        gradients = {rank: size for rank, _, _, size in self.bytes_sent()}
        for rank in self.ranks:
            for sent in rank.all("sent_unrecorded"):
                if rank.rank in gradients:
                    yield rank.rank, sent["totals"], gradients[rank.rank]

    def recorded(self, group: tuple[int, ...], step: int, index: int) -> torch.Tensor | None:
        """Return the recorded inputs of a group, ``[W, numel]`` in float64.

        None means that they are not on record, because the kit made them and can make them again.
        """
        return None

    def knows(self, step: int) -> bool:
        """Whether the inputs of ``step`` are known."""
        return step >= 0

    def feeds(self, rank: int, step: int, index: int) -> bool:
        """Whether ``rank`` has an input at ``step`` and its forward uses the parameter.

        If not, its part of the mean is zeros.
        """
        group = self.group(rank)
        all_used = not self.scenario.ddp.find_unused_parameters
        used = all_used or self._uses(group, rank, step, index)
        has_input = self.scenario.has_input(rank, self.world, step)
        return has_input and used and not self.scenario.is_frozen(index, step)

    def _uses(self, group: tuple[int, ...], rank: int, step: int, index: int) -> bool:
        """Whether the forward of a rank uses a parameter, if some are left out."""
        number = step + self.scenario.first_step
        kind = self.scenario.steps[step]
        return uses(len(group), group.index(rank), number, index, kind)

    def factor(self, rank: int, step: int, index: int) -> int:
        """Return the sum of the weights of the micro-batches in which ``rank`` feeds a parameter.

        It is 0 if none does.
        """
        if not self.feeds(rank, step, index):
            return 0
        if len(self.scenario.microbatch_weights) == 1:
            return 1
        kind = self.scenario.steps[step]
        number = step + self.scenario.first_step
        return factor_of_step(self.scenario, self.group(rank).index(rank), number, index, kind)

    def receives(self, rank: int, step: int, index: int) -> bool:
        """Whether DDP leaves a gradient on ``rank``.

        It does if the rank has an input, and some rank of its group feeds the parameter.
        """
        has_input = self.scenario.has_input(rank, self.world, step)
        return has_input and any(self.feeds(other, step, index) for other in self.group(rank))

    def fed(self, rank: int, step: int, index: int) -> torch.Tensor:
        """Return the gradient that the kit fed on ``rank``, in the form of :meth:`got`."""
        spec = self.scenario.params[index]
        if not self.feeds(rank, step, index):
            numel = math.prod(spec.shape)
            if spec.dtype.startswith("complex"):
                numel *= 2
            return torch.zeros(numel, dtype=torch.float64)
        kind = self.scenario.steps[step]
        number = self.scenario.inputs_at(step)
        # These kinds feed the same values at every step; a sparse gradient has other rows at each.
        if kind in REPEATED and spec.layout != "sparse":
            number = 0
        size = len(self.group(rank))
        values = fed(kind, spec, size, rank, number, index, self.scenario.period)
        factor = self.factor(rank, step, index)
        if factor != 1:
            values = values * factor
        return values * self.scenario.loss_scale(step) if self.scenario.loss_scales else values

    def bucket_of(self, rank: int, step: int, index: int) -> int | None:
        """Return the index of the bucket that held a parameter at ``step``."""
        name = self.parameter_name(index)
        for call in self.ranks[rank].all("call", step=step):
            if name in call["parameters"]:
                bucket: int = call["index"]
                return bucket
        return None


@functools.lru_cache(maxsize=4096)
def fed(
    kind: str, spec: Param, world: int, rank: int, step: int, index: int, period: int = 0
) -> torch.Tensor:
    """Return the gradient that the kit feeds on ``rank``, in the form of :meth:`Run.fed`.

    Args:
        world: the size of the rank's group.
        step: the number of the step for the inputs.
        period: the length of the table that gradients repeat, or 0.
    """
    dtype = getattr(torch, spec.dtype)
    values = gradient(
        kind,
        spec.shape,
        dtype,
        world=world,
        rank=rank,
        step=step,
        param=index,
        exponent=spec.exponent_at(step),
        period=period,
    )
    if spec.layout == "sparse":
        used = torch.zeros(spec.shape[0], 1, dtype=torch.bool)
        used[sparse_rows(spec, rank, step)] = True
        values = torch.where(used, values, 0.0)
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.reshape(-1).double()


def load_run(folder: Path, scenario: Scenario, world: int) -> Run:
    """Read the records of a run from its folder."""
    outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_text())
    ranks = [read_rank(folder / str(rank["rank"]), rank["rank"], rank) for rank in outcome["ranks"]]
    left_processes = tuple(outcome["left_processes"])
    return Run(scenario, world, ranks, outcome["stopped"], left_processes, outcome.get("host", ""))

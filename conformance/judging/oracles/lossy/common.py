"""The parts that all lossy claims share: means, results, norms and causes."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.judging.oracles.mean import mean
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.gradients import REPEATED
from conformance.subjects.claims import Claims

LIMIT = 1 / 16
ROUNDINGS = 16  # units in the last place of any dtype that every claim is allowed


@dataclass
class JudgedRun:
    """One run under one claim."""

    run: Run
    claims: Claims
    found: Found
    means: dict[Any, torch.Tensor] = field(default_factory=dict)

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose mean is right for ``rank``."""
        return tuple(range(self.run.world)) if self.claims.world_only else self.run.group(rank)

    def mean(self, rank: int, step: int, index: int) -> torch.Tensor:
        """Return the mean; it is computed once for steps that feed the same gradients."""
        scenario = self.run.scenario
        group = self.group(rank)
        kind = scenario.steps[step]
        # A sparse parameter gets the gradients of other rows at every step.
        is_repeated = kind in REPEATED and scenario.params[index].layout != "sparse"
        factors = tuple(self.run.factor(other, step, index) for other in group)
        key = (group, kind if is_repeated else step, index, factors)
        if key not in self.means:
            self.means[key] = mean(self.run, rank, step, index, group)
        return self.means[key]

    def receiving(self, rank: int, step: int, call: dict[str, Any]) -> list[int]:
        """Return the parameters of a call's bucket that get a gradient, in the bucket's order."""
        indices = {self.run.parameter_name(i): i for i in range(len(self.run.scenario.params))}
        members = [indices[name] for name in call["parameters"] if name in indices]
        return [index for index in members if self.run.receives(rank, step, index)]

    def bucket_members(self, rank: int, step: int, index: int) -> list[int]:
        """Return the parameters of the bucket that held a parameter."""
        name = self.run.parameter_name(index)
        buckets = (set(call["parameters"]) for call in self.run.ranks[rank].all("call", step=step))
        names = next((names for names in buckets if name in names), {name})
        indices = range(len(self.run.scenario.params))
        return [other for other in indices if self.run.parameter_name(other) in names]

    def parameters(self, *ranks: int) -> Iterator[tuple[int, int, str]]:
        """Yield (rank, index, place in words) of each nonempty parameter, on all ranks or some.

        Frozen parameters are left out: they get no gradient. So are those that freeze before the
        last step, with what is held back of them, and under ``unbiased`` those that thaw.
        """
        scenario = self.run.scenario
        last = len(scenario.steps) - 1
        steps = range(len(scenario.steps)) if self.claims.unbiased else (last,)
        for rank in ranks or range(self.run.world):
            for index, spec in enumerate(scenario.params):
                is_frozen = any(scenario.is_frozen(index, step) for step in steps)
                if math.prod(spec.shape) and not is_frozen:
                    yield rank, index, f"rank {rank}, parameter {self.run.parameter_name(index)}"

    def without_equals(self) -> list[int]:
        """Return the ranks without those that need no judging of their own, once it is known that
        gradients have the same bits on all ranks of a group that have them.

        One of the ranks of a group is judged that have gradients of the same parameters and steps.
        Results that DDP drops are on record by rank, and are not known to be the same.
        """
        if self.run.scenario.ddp.find_unused_parameters:
            return list(range(self.run.world))
        judged: dict[object, int] = {}
        for rank in range(self.run.world):
            names = frozenset(self.run.ranks[rank].tensors)
            judged.setdefault((self.group(rank), names, self.trains_throughout(rank)), rank)
        return list(judged.values())

    def trains_throughout(self, rank: int) -> bool:
        """Whether a rank has an input in every step."""
        scenario = self.run.scenario
        steps = range(len(scenario.steps))
        return all(scenario.has_input(rank, self.run.world, step) for step in steps)

    def bucket_result(
        self, rank: int, step: int, members: list[int], place: str
    ) -> torch.Tensor | None:
        """Return the results of some parameters in one vector; if one is missing, record it."""
        result = joined([self.run.got(rank, step, index) for index in members])
        self.found.require(result is not None, "a gradient", f"{place}: a parameter has none")
        return result

    def results(self, rank: int, index: int, steps: Iterable[int]) -> torch.Tensor | None:
        """Return the results of a parameter in ``steps``, a row ``[numel]`` for each.

        If no rank has used the parameter in a step, DDP drops the hook's result. The row then holds
        the dropped values if they are on record, and zeros otherwise. If a result is missing or not
        finite, record the failure and return None.
        """
        results = []
        for step in steps:
            got = self.run.got(rank, step, index)
            if not self.run.receives(rank, step, index):
                got = self.run.dropped(rank, step, index)
                if got is None:
                    got = torch.zeros_like(self.run.fed(rank, step, index))
            place = f"rank {rank}, step {step}, parameter {self.run.parameter_name(index)}"
            if got is None:
                self.found.require(False, "a gradient", f"{place}: none")
                return None
            self.found.checked(1)
            finite = bool(got.isfinite().all())
            expected = "finite values for finite gradients"
            if not self.found.require(finite, expected, f"{place}: some are not"):
                return None
            results.append(got)
        return torch.stack(results) if results else torch.zeros(0, 1)

    def fed_norm(self, rank: int, steps: Iterable[int], indices: list[int]) -> float:
        """Return the root of the sum over steps of (mean_r ||x_r||)**2, over some parameters."""
        group = self.group(rank)
        total = 0.0
        for step in steps:
            norms = []
            for other in group:
                parts = (self.square_of(other, step, index) for index in indices)
                norms.append(math.sqrt(sum(parts)))
            total += (sum(norms) / len(norms)) ** 2
        return math.sqrt(total)

    def square_of(self, rank: int, step: int, index: int) -> float:
        """Return the squared norm of a fed gradient; once for steps that feed the same."""
        scenario = self.run.scenario
        if not self.run.feeds(rank, step, index):
            return 0.0
        kind = scenario.steps[step]
        is_repeated = kind in REPEATED and scenario.params[index].layout != "sparse"
        key = ("square", rank, kind if is_repeated else step, index)
        if key not in self.means:
            self.means[key] = self.run.fed(rank, step, index).square().sum()
        return float(self.means[key])


def joined(results: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the results in one vector, or None if one is missing."""
    present = [got for got in results if got is not None]
    return torch.cat(present) if len(present) == len(results) else None


def unit_roundoff(run: Run, index: int) -> float:
    """Return the unit roundoff of a parameter's dtype."""
    dtype = run.scenario.params[index].dtype
    real = dtype.replace("complex64", "float32").replace("complex128", "float64")
    return torch.finfo(getattr(torch, real)).eps / 2


def likely_cause(
    total: torch.Tensor, means: torch.Tensor, own: torch.Tensor, size: int, feedback: bool = False
) -> str:
    """Return the known mistake behind a sum of results; empty if none is known.

    Args:
        total: the sum of the results.
        means: the sum of the means.
        own: the sum of the rank's own gradients.
        size: the number of ranks in the group; 1 if no mistake of communication is to be named.
        feedback: the subject claims feedback.
    """
    square = float(means.square().sum())
    ratio = float(total @ means) / square if square else float("nan")
    is_multiple = float((total - ratio * means).norm()) <= LIMIT * float(means.norm())
    if size > 1 and float((total - own).norm()) <= LIMIT * float(own.norm()):
        cause = "equal to this rank's own gradients: nothing was communicated"
        if feedback:
            cause += ", or its residual is taken against the values that it received"
        return cause
    if size > 1 and is_multiple and abs(ratio - size) <= LIMIT * size:
        return "world_size times the mean: the sum was not divided"
    if size > 1 and is_multiple and abs(ratio - 1 / size) <= LIMIT:
        return "the mean divided by world_size: it was divided twice"
    if is_multiple:
        return f"{ratio:.3g} times the mean"
    if abs(ratio - 1) <= LIMIT or not math.isfinite(ratio):
        return ""
    if 0 < ratio < 1 and feedback:
        return (
            f"only {ratio:.2g} of the mean comes out: the rest of a step is lost, "
            "or not added to the next"
        )
    return f"the result is {ratio:.2g} times the mean plus a part orthogonal to it"

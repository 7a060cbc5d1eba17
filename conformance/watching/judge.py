"""A step of a training run as rules see it, and what they say of it: the same rules as of a run of the kit's, on fewer records.

Of a training run nobody knows what its gradients have to be, so what every rank fed is on record too, as far as it was sampled;
the mean is taken from that, in float64, and the bound is the one of ``oracle.py`` for values that are not crafted, with W times
the smallest normal number of the gradient's dtype added, where that is below 1e-30: a process may flush subnormals to zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from conformance.judging.oracles.mean import precision
from conformance.judging.rule import Rule
from conformance.judging.verdict import Failure, Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.rules.section_2_equivalence import random_values
from conformance.rules.section_3_replicas import identical_models, identical_results
from conformance.rules.section_8_special_values import control_flow, nan
from conformance.rules.section_9_non_interference import parameters as untouched
from conformance.rules.section_10_collectives import agree
from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.subjects.claims import LOCAL, Claims
from conformance.watching.replicas import place
from conformance.watching.sampling import Gathered, Layout

Indices = list[torch.Tensor]


@dataclass(frozen=True)
class Finding:
    """One rule that a step of a training run does not keep.

    Attributes:
        rule: its number; '' where a check could not be made.
        title: of the rule.
        step: the backward pass that averaged gradients, counted from 0.
        failure: expected, actual and the likely cause.
        remedy: where to look.
    """

    rule: str
    title: str
    step: int
    failure: Failure
    remedy: str = ""

    def __str__(self) -> str:
        lines = [f"{self.rule} {self.title}".strip() + f"  [step {self.step}]"]
        said = (("Expected", self.failure.expected), ("Actual", self.failure.actual), ("Likely cause", self.failure.cause))
        return "\n".join(lines + [f"  {name + ':':<13} {text}" for name, text in (*said, ("Look at", self.remedy)) if text])


class _Always(tuple[str, ...]):
    """The kind of gradient that every step fed, whatever its number."""

    def __getitem__(self, step: Any) -> Any:
        return "normal"


class LiveRun(Run):
    """One step of a training run, of which elements were sampled on every rank.

    Args:
        layout, index: which elements those are.
        gathered: what the ranks said.
        step: its number.
        joined: places of the ranks that have run out of inputs, under ``Join``: they feed zeros, and nobody reads their results.
        find_unused: DDP's.
        fused: a gradient that is gone when backward is over was freed by the hook.
    """

    def __init__(
        self, layout: Layout, index: Indices, gathered: Gathered, step: int, *, joined: set[int], find_unused: bool, fused: bool
    ) -> None:
        params = tuple(Param(tuple(p.shape), str(p.dtype).removeprefix("torch.")) for p in layout.parameters)
        scenario = Scenario(
            "live", "a step of a training run", params, _Always(), ddp=DDPOptions(find_unused_parameters=find_unused), initial_value=0.0
        )
        super().__init__(scenario, len(gathered.words), [RankRecord(rank) for rank in range(len(gathered.words))])
        self.layout, self.index, self.gathered, self.step = layout, index, gathered, step
        self.joined, self.fused = joined, fused
        self.training = [rank for rank in range(self.world) if rank not in joined]
        self.receiving = self.training  # whose results are compared with the mean
        self.places: dict[str, Callable[[int], tuple[int, ...]]] = {}

    @property
    def finished(self) -> bool:
        return True

    def steps(self, *kinds: str) -> list[int]:
        return [self.step] if "normal" in kinds else []

    def parameter_name(self, index: int) -> str:
        return self.layout.names[index]

    def bucket_of(self, rank: int, step: int, index: int) -> int | None:
        return None

    def knows(self, step: int) -> bool:
        return step == self.step or (step == self.step - 1 and self.gathered.has_before)

    def feeds(self, rank: int, step: int, index: int) -> bool:
        return bool(self.gathered.has_fed[rank, index])

    def receives(self, rank: int, step: int, index: int) -> bool:
        freed = self.fused and not self.gathered.has_result[rank, index]
        return rank in self.receiving and not freed and bool(self.gathered.has_fed[:, index].any())

    def fed(self, rank: int, step: int, index: int) -> torch.Tensor:
        return (self.gathered.fed if step == self.step else self.gathered.before)[index][rank].double()

    def recorded(self, group: tuple[int, ...], step: int, index: int) -> torch.Tensor:
        return self.gathered.fed[index].double()

    def got(self, rank: int, step: int, index: int) -> torch.Tensor | None:
        return self.gathered.results[index][rank].double() if self.gathered.has_result[rank, index] else None

    def place(self, index: int, element: int) -> tuple[int, ...]:
        spec = self.scenario.params[index]
        pair = spec.dtype.startswith("complex")
        at = self.index[index][element // 2 if pair else element].cpu()
        found = tuple(int(i) for i in torch.unravel_index(at, spec.shape)) if spec.shape else ()
        return (*found, element % 2) if pair else found

    def element(self, name: str, at: int) -> str:
        return f"index {self.places[name](at)}"

    def show_results(self) -> None:
        """Put the sampled results on record, as those of gradients; one NaN is as good as another."""
        for index, name in enumerate(self.layout.names):
            key = f"{self.step}/grad/{name}"
            self.places[key] = lambda at, index=index: self.place(index, at)  # type: ignore[misc]
            for rank in range(self.world):
                shown = self.training[0] if rank in self.joined else rank
                if self.gathered.has_result[shown, index]:
                    values = self.gathered.results[index][shown]
                    self.ranks[rank].tensors[key] = torch.where(values.isnan(), math.nan, values)

    def show_parameter(self, name: str, parameter: torch.Tensor, strides: tuple[int, ...], begin: int, rows: torch.Tensor) -> None:
        """Put elements of a parameter on record, ``[W, n]``, of which the first lies at ``begin`` in its memory."""
        key, pair = f"{self.step}/parameter/{name}", parameter.is_complex()

        def where(at: int) -> tuple[int, ...]:
            found = place(parameter.shape, strides, (begin + at) // 2 if pair else begin + at)
            return (*found, (begin + at) % 2) if pair else found

        self.places[key] = where
        for rank in range(self.world):
            self.ranks[rank].tensors[key] = rows[self.training[0] if rank in self.joined else rank]


@dataclass
class Judged:
    """What rules say of one step.

    Attributes:
        findings: one for each rule that does not hold.
        figures: ``margin``, the largest error as a fraction of its bound, where the claim has one; ``off``, the distance of the
            result from the mean, as a fraction of the mean, where it is lossy.
    """

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def ask(self, rule: Rule, run: Run, claims: Claims) -> Found:
        """Ask a rule of the book, and keep what it finds."""
        found = Found()
        rule.check(run, claims, found)
        return self.keep(rule, run, found)

    def keep(self, rule: Rule, run: Run, found: Found) -> Found:
        if found.failures and isinstance(run, LiveRun):
            self.findings.append(Finding(rule.number, rule.title, run.step, found.failures[0], rule.remedy))
        return found


def judge_values(run: LiveRun, claims: Claims, judged: Judged) -> None:
    """Judge what came of the gradients: 2.2, 3.1, 8.1, 8.4 and 9.2."""
    _judge_mean(run, claims, judged)
    if not run.gathered.alike:
        run.show_results()
        judged.ask(identical_results, run, claims)
    for rule, check in ((nan, _require_seen), (control_flow, _require_finite)):
        found = Found()
        check(run, claims, found)
        judged.keep(rule, run, found)
    for rank in run.training:
        changed = [name for name, moved in zip(run.layout.names, run.gathered.moved[rank].tolist(), strict=True) if moved]
        run.ranks[rank].events.append({"event": "stepped", "step": run.step, "time": 0.0, "parameters_changed": changed})
    judged.ask(untouched, run, claims)


def judge_models(run: LiveRun, claims: Claims, judged: Judged) -> None:
    """Judge parameters that are on record because they differ: 3.2."""
    for rank in run.ranks:
        rank.tensors = {name: tensor for name, tensor in rank.tensors.items() if "/parameter/" in name}
    judged.ask(identical_models, run, claims)


def judge_collectives(run: LiveRun, claims: Claims, judged: Judged, heard: list[list[tuple[str, list[int], str]]]) -> None:
    """Judge the collectives of every rank, as (what, places of the group's ranks, its name): 10.2."""
    for rank, said in zip(run.ranks, heard, strict=True):
        common = {"event": "collective", "step": run.step, "time": 0.0, "call": None, "inside": True}
        rank.events += [{**common, "what": what, "group": group, "named": named} for what, group, named in said]
    judged.ask(agree, run, claims)


def _judge_mean(run: LiveRun, claims: Claims, judged: Judged) -> None:
    if claims.lossy:
        judged.figures["off"] = _off(run, claims)
        return
    if run.gathered.alike:  # one rank speaks for all, until something is wrong
        run.receiving = run.training[:1]
        found = Found()
        random_values.check(run, claims, found)
        run.receiving = run.training
        if not found.failures:
            judged.figures["margin"] = found.margin or 0.0
            return
    found = judged.ask(random_values, run, claims)
    judged.figures["margin"] = math.inf if found.failures else found.margin or 0.0


def _off(run: LiveRun, claims: Claims) -> float:
    """Return how far the first training rank's result is from the mean, as a fraction of it, over all sampled elements."""
    rank, off, whole = run.training[0], 0.0, 0.0
    for index in range(len(run.layout.names)):
        got = run.got(rank, run.step, index)
        if got is not None and run.receives(rank, run.step, index):
            right = run.recorded((), run.step, index).mean(0) * (run.world if claims.sum else 1)
            off, whole = off + float((got - right).square().sum()), whole + float(right.square().sum())
    return math.sqrt(off / whole) if whole else 0.0


def _require_seen(run: LiveRun, claims: Claims, found: Found) -> None:
    """Where some gradient is not finite, some result must not be: on every rank, or under ``local`` on that which fed it."""
    said = run.gathered
    fed = ~(said.fed_top.isfinite()) & said.has_fed
    if not fed.any():
        return
    for rank in run.training:
        if claims.lossy == LOCAL and not fed[rank].any():
            continue
        shown = said.has_result[rank]
        if claims.lossy or claims.fused:
            seen = bool((~said.result_top[rank].isfinite() & shown).any()) or not bool((shown & fed.any(0)).any())
            where = ""
        else:
            hidden = (fed.any(0) & shown & said.result_top[rank].isfinite()).nonzero()
            seen = not len(hidden)
            where = "" if seen else f", parameter {run.layout.names[int(hidden[0])]}"
        feeder = int(fed.any(1).nonzero()[0])
        if not found.require(
            seen,
            "a result that is not finite where a gradient is not",
            f"rank {rank}, step {run.step}{where}: all are finite; rank {feeder} fed others",
        ):
            return


def _require_finite(run: LiveRun, claims: Claims, found: Found) -> None:
    """Where all gradients of a parameter are finite, and far from overflow, results must be: on every rank, all elements.

    So must parameters, whatever is fed: those that are not are what a result at a step that was not sampled leaves behind.
    """
    said, widest = run.gathered, run.world if claims.sum else 1
    for rank in run.training:
        lost = (~said.held_top[rank].isfinite()).nonzero()
        if len(lost):
            actual = f"rank {rank}, step {run.step}, parameter {run.layout.names[int(lost[0])]}: some elements are not, before backward"
            found.require(False, "finite parameters", actual, "a step before this one was made with results that were not finite")
            return
    if not said.fed_top.isfinite().all():
        return  # what is scaled or rotated as a whole may carry them anywhere
    for index, name in enumerate(run.layout.names):
        largest = precision(run.scenario.params[index].dtype, claims)[2]
        if float(said.fed_top[:, index].sum()) * widest >= largest / 16:
            continue
        for rank in run.training:
            finite = not said.has_result[rank, index] or bool(said.result_top[rank, index].isfinite())
            cause = "a division by zero, or state that keeps a NaN or an infinity of an earlier step"
            actual = f"rank {rank}, step {run.step}, parameter {name}: some elements are not"
            if not found.require(finite, "finite values for finite gradients", actual, cause):
                return


def renamed(finding: Finding, ranks: tuple[int, ...]) -> Finding:
    """Say whose ranks a finding speaks of, where they are not those of WORLD."""
    if ranks == tuple(range(len(ranks))):
        return finding
    group = f" (places in the model's group, of ranks {', '.join(map(str, ranks))})"
    return replace(finding, failure=replace(finding.failure, actual=finding.failure.actual + group))

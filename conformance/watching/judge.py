"""Applies rules of the book to one step of a training run, sampled on all ranks.

The rules are those for runs of the kit's own; only the records have less in them. The gradients of
a training run are not known beforehand, so the sampled gradients that every rank fed are on record
too. The mean is computed from them in float64. The bound is the one of ``oracles/mean.py`` for
values that are not crafted, plus W times the smallest normal number of the gradient's dtype if that
is below 1e-30: a process may flush subnormal numbers to zero.
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
from conformance.rules.section_9_non_interference import parameters as unchanged_parameters
from conformance.rules.section_10_collectives import agree
from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.subjects.claims import LOCAL, Claims
from conformance.watching.collectives import Collective
from conformance.watching.replicas import index_at
from conformance.watching.sampling import Gathered, Layout

Index = tuple[int, ...]
# The numbers of the rules that a watch can judge.
RULES = tuple(
    rule.number
    for rule in (
        random_values,
        identical_results,
        identical_models,
        nan,
        control_flow,
        unchanged_parameters,
        agree,
    )
)


def rules_under(claims: Claims) -> list[str]:
    """Return the numbers of the rules that are judged under these claims."""
    left_out: set[str] = set()
    if claims.lossy:
        left_out.add(random_values.number)
    if claims.lossy == LOCAL:
        left_out |= {identical_results.number, identical_models.number}
    if claims.fused:
        left_out.add(unchanged_parameters.number)
    return [number for number in RULES if number not in left_out]


@dataclass(frozen=True)
class Finding:
    """One rule that a step of a training run breaks.

    Attributes:
        rule: the rule's number; empty if a check could not be made.
        title: the rule's title.
        step: the number of the backward passes that averaged gradients before this one since the
            watch began, so that the first step is step 0.
        failure: the expected and the actual state, and the likely cause.
        remedy: where to look.
    """

    rule: str
    title: str
    step: int
    failure: Failure
    remedy: str = ""

    def __str__(self) -> str:
        title = f"{self.rule} {self.title}".strip()
        details = {
            "Expected": self.failure.expected,
            "Actual": self.failure.actual,
            "Likely cause": self.failure.cause,
            "Look at": self.remedy,
        }
        lines = [f"{title}  [step {self.step}]"]
        lines += [f"  {name + ':':<13} {text}" for name, text in details.items() if text]
        return "\n".join(lines)


class _SameKind(tuple[str, ...]):
    """The kinds of gradient of all steps: every step, whatever its number, has the same kind."""

    def __getitem__(self, step: Any) -> Any:
        return "normal"


class SampledRun(Run):
    """One step of a training run, sampled on all ranks, as a run that rules can read.

    Args:
        layout: the layout of the samples.
        index: the sampled indices of each parameter.
        gathered: the samples of all ranks.
        step: the number of the step.
        joined: the ranks in the group that have run out of inputs, under ``Join``. They feed zeros,
            and their results are not used.
        find_unused: DDP's ``find_unused_parameters``.
        fused: whether the hook may free gradients: one that is gone after backward is no failure.
    """

    def __init__(
        self,
        layout: Layout,
        index: list[torch.Tensor],
        gathered: Gathered,
        step: int,
        *,
        joined: set[int],
        find_unused: bool,
        fused: bool,
    ) -> None:
        params = tuple(
            Param(tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
            for parameter in layout.parameters
        )
        scenario = Scenario(
            "watched",
            "a step of a training run",
            params,
            _SameKind(),
            ddp=DDPOptions(find_unused_parameters=find_unused),
            initial_value=0.0,
        )
        world = len(gathered.numbers)
        super().__init__(scenario, world, [RankRecord(rank) for rank in range(world)])
        self.layout = layout
        self.index = index
        self.gathered = gathered
        self.step = step
        self.joined = joined
        self.fused = fused
        self.training = [rank for rank in range(world) if rank not in joined]
        # The ranks whose results are compared with the mean.
        self.receiving = self.training
        # For each recorded tensor, the index within its parameter of each of its elements.
        self._index_of: dict[str, Callable[[int], Index]] = {}

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
        if step == self.step - 1:
            return self.gathered.has_fed_before
        return step == self.step

    def feeds(self, rank: int, step: int, index: int) -> bool:
        return bool(self.gathered.has_fed[rank, index])

    def receives(self, rank: int, step: int, index: int) -> bool:
        freed = self.fused and not self.gathered.has_result[rank, index]
        was_fed = bool(self.gathered.has_fed[:, index].any())
        return rank in self.receiving and not freed and was_fed

    def fed(self, rank: int, step: int, index: int) -> torch.Tensor:
        fed = self.gathered.fed if step == self.step else self.gathered.fed_before
        return fed[index][rank].double()

    def recorded(self, group: tuple[int, ...], step: int, index: int) -> torch.Tensor:
        return self.gathered.fed[index].double()

    def got(self, rank: int, step: int, index: int) -> torch.Tensor | None:
        if not self.gathered.has_result[rank, index]:
            return None
        return self.gathered.results[index][rank].double()

    def element_index(self, index: int, element: int) -> Index:
        spec = self.scenario.params[index]
        if spec.dtype.startswith("complex"):
            # Samples of complex elements are pairs of reals.
            return (*self._sampled_index(index, element // 2), element % 2)
        return self._sampled_index(index, element)

    def _sampled_index(self, index: int, number: int) -> Index:
        """Return the index within a parameter of its sampled element of that number."""
        shape = self.scenario.params[index].shape
        if not shape:
            return ()
        position = self.index[index][number].cpu()
        return tuple(int(i) for i in torch.unravel_index(position, shape))

    def element(self, name: str, at: int) -> str:
        return f"index {self._index_of[name](at)}"

    def record_results(self) -> None:
        """Put the sampled results into the records, as gradients; all NaN become the same bits."""
        for index, name in enumerate(self.layout.names):
            key = f"{self.step}/grad/{name}"

            def index_of(at: int, index: int = index) -> Index:
                return self.element_index(index, at)

            self._index_of[key] = index_of
            for rank in range(self.world):
                shown = self._stand_in(rank)
                if self.gathered.has_result[shown, index]:
                    values = self.gathered.results[index][shown]
                    values = torch.where(values.isnan(), math.nan, values)
                    self.ranks[rank].tensors[key] = values

    def record_parameter(
        self,
        name: str,
        parameter: torch.Tensor,
        strides: tuple[int, ...],
        begin: int,
        rows: torch.Tensor,
    ) -> None:
        """Put consecutive elements of a parameter into the records.

        Args:
            strides: the strides of the order in which the elements lie.
            begin: the position of the first element in memory.
            rows: the elements of all ranks, ``[W, n]``.
        """
        key = f"{self.step}/parameter/{name}"
        is_complex = parameter.is_complex()

        def index_of(at: int) -> Index:
            position = begin + at
            if is_complex:
                return (*index_at(parameter.shape, strides, position // 2), position % 2)
            return index_at(parameter.shape, strides, position)

        self._index_of[key] = index_of
        for rank in range(self.world):
            self.ranks[rank].tensors[key] = rows[self._stand_in(rank)]

    def _stand_in(self, rank: int) -> int:
        """Return the rank whose values are recorded for ``rank``.

        Rules compare all ranks. For a rank that has joined they see the first training rank's
        values, so that it cannot differ.
        """
        return self.training[0] if rank in self.joined else rank


@dataclass
class StepJudgement:
    """The judgement of one step.

    Attributes:
        findings: one for each rule that is broken.
        figures: one number by its name. ``margin``, the largest error as a fraction of its bound,
            if the claims have a bound; it is infinite if an error exceeds the bound. ``off``, the
            distance of the result from the mean as a fraction of the mean, if the claims are lossy.
            None if there is no such number: a gradient, a result or a parameter is not finite, or
            no element was compared.
        reason: why the figure is None; None if it is a number.
    """

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float | None] = field(default_factory=dict)
    reason: str | None = None

    def set_figure(self, claims: Claims, value: float | None, reason: str | None = None) -> None:
        """Keep the figure of these claims, or the reason why there is none."""
        self.figures = {"off" if claims.lossy else "margin": None if reason else value}
        self.reason = reason

    def check(self, rule: Rule, run: SampledRun, claims: Claims) -> Found:
        """Check a rule of the book, and keep its first failure."""
        found = Found()
        rule.check(run, claims, found)
        self.keep(rule, run, found)
        return found

    def keep(self, rule: Rule, run: SampledRun, found: Found) -> None:
        """Keep the first failure, if there is one, as a finding of a rule."""
        if found.failures:
            finding = Finding(rule.number, rule.title, run.step, found.failures[0], rule.remedy)
            self.findings.append(finding)


def judge_values(run: SampledRun, claims: Claims, judgement: StepJudgement) -> None:
    """Judge the results of the step: rules 2.2, 3.1, 8.1, 8.4 and 9.2."""
    _judge_mean(run, claims, judgement)
    if not run.gathered.results_agree:
        run.record_results()
        judgement.check(identical_results, run, claims)
    found = Found()
    _require_visible(run, claims, found)
    judgement.keep(nan, run, found)
    found = Found()
    _require_finite(run, claims, found)
    judgement.keep(control_flow, run, found)
    for rank in run.training:
        flags = run.gathered.parameter_changed[rank].tolist()
        changed = [name for name, flag in zip(run.layout.names, flags, strict=True) if flag]
        event = _event("stepped", run, parameters_changed=changed)
        run.ranks[rank].events.append(event)
    judgement.check(unchanged_parameters, run, claims)


def judge_models(run: SampledRun, claims: Claims, judgement: StepJudgement) -> None:
    """Judge parameters that are on record because they differ: rule 3.2."""
    for rank in run.ranks:
        parameters = {key: value for key, value in rank.tensors.items() if "/parameter/" in key}
        rank.tensors = parameters
    judgement.check(identical_models, run, claims)


def judge_collectives(
    run: SampledRun,
    claims: Claims,
    judgement: StepJudgement,
    collectives: list[list[Collective]],
) -> None:
    """Judge the collectives of every rank: rule 10.2.

    Args:
        collectives: by rank; the ranks in them are numbers in the model's group.
    """
    for record, own in zip(run.ranks, collectives, strict=True):
        for collective in own:
            event = _event(
                "collective",
                run,
                call=None,
                inside=True,
                what=collective.description,
                group=collective.ranks,
                named=collective.group_name,
            )
            record.events.append(event)
    judgement.check(agree, run, claims)


def _event(name: str, run: SampledRun, **fields: Any) -> dict[str, Any]:
    return {"event": name, "step": run.step, "time": 0.0, **fields}


def _judge_mean(run: SampledRun, claims: Claims, judgement: StepJudgement) -> None:
    """Judge rule 2.2, and keep the figure of the step."""
    reason = _describe_not_finite(run)
    if claims.lossy:
        off = _distance_from_mean(run, claims)
        if off is None:
            reason = reason or "the mean of the sampled elements is zero, or none was compared"
        judgement.set_figure(claims, off, reason)
        return
    found = Found()
    if run.gathered.results_agree:
        # All ranks have the same results, so one of them is enough, until one is wrong.
        run.receiving = run.training[:1]
        random_values.check(run, claims, found)
        run.receiving = run.training
    if found.failures or not run.gathered.results_agree:
        found = judgement.check(random_values, run, claims)
    if not found.checks:
        reason = reason or "no element was compared"
    judgement.set_figure(claims, math.inf if found.failures else found.margin, reason)


def _describe_not_finite(run: SampledRun) -> str | None:
    """Return which value of the step is not finite. None if all are finite.

    The margin of the other elements would show nothing of it.
    """
    kinds = {
        "parameter": run.gathered.largest_parameter,
        "gradient": run.gathered.largest_fed,
        "result": run.gathered.largest_result,
    }
    for kind, values in kinds.items():
        places = (~values.isfinite()).nonzero().tolist()
        if places:
            rank, index = places[0]
            name = run.layout.names[index]
            return f"the {kind} of {name} on rank {rank} is not finite"
    return None


def _distance_from_mean(run: SampledRun, claims: Claims) -> float | None:
    """Return the distance of the first training rank's result from the mean.

    It is a fraction of the mean, in the Euclidean norm over all sampled elements. None if the mean
    is zero or no element was compared.
    """
    rank = run.training[0]
    factor = run.world if claims.sum else 1
    error = 0.0
    total = 0.0
    for index in range(len(run.layout.names)):
        got = run.got(rank, run.step, index)
        if got is not None and run.receives(rank, run.step, index):
            mean = run.recorded((), run.step, index).mean(0) * factor
            error += float((got - mean).square().sum())
            total += float(mean.square().sum())
    return math.sqrt(error / total) if total else None


def _require_visible(run: SampledRun, claims: Claims, found: Found) -> None:
    """If a gradient is not finite, a result must not be finite either.

    This holds on every rank; under ``local`` on the rank that fed the gradient.
    """
    gathered = run.gathered
    fed = ~gathered.largest_fed.isfinite() & gathered.has_fed
    if not fed.any():
        return
    affected = fed.any(0)
    feeder = int(fed.any(1).nonzero()[0])
    for rank in run.training:
        if claims.lossy == LOCAL and not fed[rank].any():
            continue
        shown = gathered.has_result[rank]
        finite = gathered.largest_result[rank].isfinite()
        parameter = ""
        if claims.lossy or claims.fused:
            # A lossy hook may carry the value to other parameters, and a fused hook may have freed
            # the gradient: some result must show it, unless none of the affected ones is there.
            visible = bool((~finite & shown).any()) or not bool((shown & affected).any())
        else:
            hidden = (affected & shown & finite).nonzero()
            visible = not len(hidden)
            if not visible:
                parameter = f", parameter {run.layout.names[int(hidden[0])]}"
        holds = found.require(
            visible,
            "a result that is not finite for a gradient that is not",
            f"rank {rank}, step {run.step}{parameter}: all are finite; rank {feeder} fed others",
        )
        if not holds:
            return


def _require_finite(run: SampledRun, claims: Claims, found: Found) -> None:
    """If all gradients of a parameter are finite and far from overflow, results must be finite.

    This holds for all elements on every rank. Parameters must be finite in any case: a parameter
    that is not follows from a result at a step that was not sampled.
    """
    gathered = run.gathered
    for rank in run.training:
        lost = (~gathered.largest_parameter[rank].isfinite()).nonzero()
        if len(lost):
            name = run.layout.names[int(lost[0])]
            found.require(
                False,
                "finite parameters",
                f"rank {rank}, step {run.step}, parameter {name}: "
                "some elements are not, before backward",
                "a step before this one was made with results that were not finite",
            )
            return
    if not gathered.largest_fed.isfinite().all():
        # A hook that scales or rotates all gradients together may carry the value anywhere.
        return
    factor = run.world if claims.sum else 1
    for index, name in enumerate(run.layout.names):
        largest = precision(run.scenario.params[index].dtype, claims)[2]
        if float(gathered.largest_fed[:, index].sum()) * factor >= largest / 16:
            continue
        for rank in run.training:
            has_result = bool(gathered.has_result[rank, index])
            finite = not has_result or bool(gathered.largest_result[rank, index].isfinite())
            holds = found.require(
                finite,
                "finite values for finite gradients",
                f"rank {rank}, step {run.step}, parameter {name}: some elements are not",
                "a division by zero, or state that keeps a NaN or an infinity of an earlier step",
            )
            if not holds:
                return


def with_group(finding: Finding, ranks: tuple[int, ...]) -> Finding:
    """Add the group to a finding if its rank numbers are not those of WORLD.

    Args:
        ranks: the global ranks of the model's group.
    """
    if ranks == tuple(range(len(ranks))):
        return finding
    numbers = ", ".join(map(str, ranks))
    group = f" (numbered in the model's group, whose ranks are {numbers})"
    failure = replace(finding.failure, actual=finding.failure.actual + group)
    return replace(finding, failure=failure)

"""Rules on samples made by hand: right results, and the smallest errors that are found."""

import math
from typing import Any

import pytest
import torch

from conformance.subjects.claims import parse_claims
from conformance.watching.collectives import Collective
from conformance.watching.judge import (
    RULES,
    SampledRun,
    StepJudgement,
    judge_collectives,
    judge_models,
    judge_values,
    rules_under,
    with_group,
)
from conformance.watching.sampling import Layout, Sample, pack, unpack

FED = torch.tensor([[1.0, -3.0, 5.0, 1e-3], [2.0, 7.0, -5.0, 3e-3]])
MEAN = FED.double().mean(0).float()


def run_of(
    fed: torch.Tensor,
    results: torch.Tensor,
    before: torch.Tensor | None = None,
    joined: tuple[int, ...] = (),
    **held: Any,
) -> SampledRun:
    """Return step 9 of as many ranks as ``fed`` has rows, with one parameter of (2, 2)."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2, dtype=fed.dtype))
    layout = Layout({"weight": parameter}, 100, len(fed), 0)
    rows = []
    for rank, (mine, result) in enumerate(zip(fed, results, strict=True)):
        sample = Sample(layout.indices(9))
        with torch.no_grad():
            parameter.fill_(held.get("level", 0.0))
        sample.take_parameters(layout)
        if before is not None:
            sample.take_fed_before(0, before[rank].view(2, 2))
        if rank not in joined:
            sample.take_fed(0, mine.view(2, 2))
            parameter.grad = result.view(2, 2).clone()
            sample.take_results(layout)
        rows.append(pack(layout, sample, [9], torch.zeros(1, dtype=torch.int64)))
    gathered = unpack(layout, torch.stack(rows), 1, 1)
    return SampledRun(
        layout, layout.indices(9), gathered, 9, joined=set(joined), find_unused=False, fused=False
    )


def found(run: SampledRun, claims: str = "exact") -> StepJudgement:
    judged = StepJudgement()
    judge_values(run, parse_claims(claims), judged)
    return judged


def rules(run: SampledRun, claims: str = "exact") -> list[str]:
    return [finding.rule for finding in found(run, claims).findings]


def both(result: torch.Tensor) -> torch.Tensor:
    return torch.stack([result, result])


@pytest.mark.parametrize(
    "claims", ["exact", "world_only", "compressed", "unbiased", "local", "fused(SGD, lr=0.1)"]
)
def test_the_mean_is_right(claims: str) -> None:
    judged = found(run_of(FED, both(MEAN)), claims)
    assert not judged.findings
    [figure] = judged.figures.values()
    assert figure is not None
    assert figure < 0.5
    assert judged.reason is None


def test_the_bound_is_that_of_a_sum() -> None:
    """With two ranks one unit in the last place is within the bound of a sum, ten are not."""
    assert not rules(run_of(FED, both(torch.nextafter(MEAN, MEAN * 2))))
    wrong = MEAN.clone()
    for _ in range(10):
        wrong[3] = torch.nextafter(wrong[3], wrong[3] * 2)
    judged = found(run_of(FED, both(wrong)))
    assert [finding.rule for finding in judged.findings] == ["2.2"]
    failure = judged.findings[0].failure
    assert failure.expected.endswith(" within 3.58e-10")
    assert (
        "rank 0, step 9, parameter weight (float32), index (1, 1); 2 of 8 elements"
        in failure.actual
    )
    assert judged.figures["margin"] == math.inf
    first, second, *_ = str(judged.findings[0]).splitlines()
    assert first == "2.2 Gives the mean of random gradients within the bound of a sum  [step 9]"
    assert second.startswith("  Expected:     mean")


@pytest.mark.parametrize(
    ("claims", "result", "fails", "cause"),
    [
        ("exact", FED.sum(0), ["2.2"], "the sum was not divided"),
        ("sum", FED.sum(0), [], ""),
        ("sum", MEAN, ["2.2"], "the subject claims the sum, but divides"),
        ("exact", (FED.half().sum(0) / 2).float(), ["2.2"], "rounded to float16"),
        ("rounded(float16)", (FED.half().sum(0) / 2).float(), [], ""),
        ("rounded(float16)", MEAN * 1.5, ["2.2"], "1.5 times the mean"),
        ("exact", -MEAN, ["2.2"], "the wrong sign"),
        ("exact", torch.full((4,), 0.25), ["2.2"], "one step late"),
        ("compressed", MEAN * 0, [], ""),
    ],
)
def test_claims_decide_which_rules_apply(
    claims: str, result: torch.Tensor, fails: list[str], cause: str
) -> None:
    judged = found(run_of(FED, both(result), before=torch.tensor([[0.0] * 4, [0.5] * 4])), claims)
    assert [finding.rule for finding in judged.findings] == fails
    assert cause in "".join(finding.failure.cause for finding in judged.findings)
    if claims == "compressed":
        assert judged.figures["off"] == pytest.approx(1.0)


def test_a_failure_names_the_index_within_the_parameter() -> None:
    """Of 100 elements 4 are sampled, the last one among them; it is named by its own index."""
    parameter = torch.nn.Parameter(torch.zeros(10, 10))
    layout = Layout({"weight": parameter}, 4, 2, 0)
    rows = []
    for _ in range(2):
        sample = Sample(layout.indices(9))
        sample.take_parameters(layout)
        sample.take_fed(0, torch.ones(10, 10))
        parameter.grad = torch.ones(10, 10)
        parameter.grad[9, 9] = 3.0
        sample.take_results(layout)
        rows.append(pack(layout, sample, [9], torch.zeros(1, dtype=torch.int64)))
    gathered = unpack(layout, torch.stack(rows), 1, 1)
    run = SampledRun(
        layout, layout.indices(9), gathered, 9, joined=set(), find_unused=False, fused=False
    )
    [finding] = found(run).findings
    assert "parameter weight (float32), index (9, 9); 2 of 8 elements" in finding.failure.actual


def test_one_rank_that_is_wrong() -> None:
    results = both(MEAN)
    results[1, 2] += 1
    judged = found(run_of(FED, results))
    assert [finding.rule for finding in judged.findings] == ["2.2", "3.1"]
    assert judged.findings[0].failure.cause == "right on the other ranks, wrong on rank 1"
    assert (
        judged.findings[1].failure.actual
        == "ranks 0 and 1 differ at step 9, grad/weight, index (1, 0): 0 and 1"
    )
    assert rules(run_of(FED, results), "compressed") == ["3.1"]
    assert rules(run_of(FED, results), "local") == []
    assert (
        "(numbered in the model's group, whose ranks are 1, 3)"
        in with_group(judged.findings[0], (1, 3)).failure.actual
    )


def test_a_rank_that_has_joined_feeds_zeros_and_its_results_are_ignored() -> None:
    assert not rules(run_of(FED, both(FED[0] / 2), joined=(1,)))
    assert rules(run_of(FED, both(FED[0]), joined=(1,))) == ["2.2"]


@pytest.mark.parametrize(
    ("claims", "fed", "result", "fails"),
    [
        ("exact", math.nan, math.nan, []),
        ("exact", math.inf, math.inf, []),
        ("exact", math.inf, math.nan, ["2.2"]),
        ("exact", math.nan, 0.0, ["2.2", "8.1"]),
        ("compressed", math.nan, 0.0, ["8.1"]),
        ("compressed", math.nan, math.nan, []),
        ("compressed", 1.0, math.nan, ["8.4"]),
        ("exact", 1.0, math.nan, ["2.2", "8.4"]),
        ("fused(SGD, lr=0.1)", 1.0, math.nan, ["2.2", "8.4"]),
        ("rounded(float16)", 1e5, math.inf, []),
    ],
)
def test_values_that_are_not_finite(
    claims: str, fed: float, result: float, fails: list[str]
) -> None:
    given = FED.clone()
    got = MEAN.clone()
    given[0, 0] = fed
    got[0] = result
    rounded = (given.half().float().sum(0) / 2) if "float16" in claims else got
    assert rules(run_of(given, both(rounded)), claims) == fails


@pytest.mark.parametrize(
    ("claims", "fed", "result", "level", "reason"),
    [
        ("exact", math.nan, math.nan, 0.0, "the gradient of weight on rank 0 is not finite"),
        ("exact", math.inf, math.inf, 0.0, "the gradient of weight on rank 0 is not finite"),
        ("exact", math.nan, 0.0, 0.0, "the gradient of weight on rank 0 is not finite"),
        ("exact", 1.0, math.nan, 0.0, "the result of weight on rank 0 is not finite"),
        ("exact", 1.0, 1.5, math.nan, "the parameter of weight on rank 0 is not finite"),
        ("compressed", math.nan, math.nan, 0.0, "the gradient of weight on rank 0 is not finite"),
        ("compressed", 1.0, math.inf, 0.0, "the result of weight on rank 0 is not finite"),
    ],
)
def test_a_step_that_is_not_finite_has_no_figure(
    claims: str, fed: float, result: float, level: float, reason: str
) -> None:
    """A margin of 0 would be the best value, although nothing of the step is right."""
    given = FED.clone()
    given[0, 0] = fed
    got = MEAN.clone()
    got[0] = result
    judged = found(run_of(given, both(got), level=level), claims)
    assert list(judged.figures.values()) == [None]
    assert judged.reason == reason


@pytest.mark.parametrize(
    ("claims", "name", "reason"),
    [
        ("exact", "margin", "no element was compared"),
        ("compressed", "off", "the mean of the sampled elements is zero, or none was compared"),
    ],
)
def test_a_step_without_compared_elements_has_no_figure(
    claims: str, name: str, reason: str
) -> None:
    layout = Layout({"weight": torch.nn.Parameter(torch.zeros(2, 2))}, 100, 2, 0)
    sample = Sample(layout.indices(9))
    row = pack(layout, sample, [9], torch.zeros(1, dtype=torch.int64))
    gathered = unpack(layout, torch.stack([row, row]), 1, 1)
    run = SampledRun(
        layout, layout.indices(9), gathered, 9, joined=set(), find_unused=False, fused=False
    )
    judged = found(run, claims)
    assert (judged.figures, judged.reason) == ({name: None}, reason)


@pytest.mark.parametrize(
    ("claims", "left_out"),
    [
        ("exact", set()),
        ("compressed", {"2.2"}),
        ("local", {"2.2", "3.1", "3.2"}),
        ("fused(SGD, lr=0.1)", {"9.2"}),
    ],
)
def test_rules_under_claims(claims: str, left_out: set[str]) -> None:
    assert set(RULES) - set(rules_under(parse_claims(claims))) == left_out


def test_nans_with_different_bits_are_equal() -> None:
    given = FED.clone()
    results = both(MEAN)
    given[0, 0] = math.nan
    results[:, 0] = math.nan
    results[1].view(torch.int32)[0] ^= 1
    assert not rules(run_of(given, results))


def test_parameters_that_are_not_finite() -> None:
    judged = found(run_of(FED, both(MEAN), level=math.nan))
    assert [(finding.rule, finding.failure.expected) for finding in judged.findings] == [
        ("8.4", "finite parameters")
    ]


def test_subnormal_numbers_may_be_flushed_to_zero() -> None:
    assert not rules(run_of(FED * 1e-39, both(MEAN * 0)))
    assert rules(run_of(FED * 1e-30, both(MEAN * 0))) == ["2.2"]


def test_models_and_collectives_are_judged_by_rules_of_the_book() -> None:
    run = run_of(FED, both(MEAN))
    judged = StepJudgement()
    claims = parse_claims("exact")
    parameter = torch.zeros(4, 6).t()  # laid out by columns
    run.record_parameter(
        "weight", parameter, parameter.stride(), 7, torch.tensor([[1.0, 2.0], [1.0, 3.0]])
    )
    judge_models(run, claims, judged)
    both_ranks = [0, 1]
    started = [
        Collective("allreduce SUM 4 float32", both_ranks, "g"),
        Collective("barrier", both_ranks, "g"),
    ]
    judge_collectives(run, claims, judged, [started, started])
    judge_collectives(run_of(FED, both(MEAN)), claims, judged, [started, started[:1]])
    assert [finding.rule for finding in judged.findings] == ["3.2", "10.2"]
    assert (
        judged.findings[0].failure.actual
        == "ranks 0 and 1 differ at step 9, parameter/weight, index (2, 1): 2 and 3"
    )
    assert judged.findings[1].failure.actual.endswith("rank 0 issues barrier (step 9), rank 1 none")

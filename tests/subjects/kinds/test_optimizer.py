"""Judging optimizer wrappers: the oracle, torch's own wrappers, and targets that are refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from conformance.errors import TargetError, UsageError
from conformance.judging.oracles.optimizer_steps import right_steps
from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Verdict
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.gradients import gradient
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import ADAM, RELOADED, START
from conformance.scenarios.optimizer_training import is_exact, plan_of
from conformance.subjects.claims import parse_claims
from conformance.subjects.kinds.optimizer import OPTIMIZER
from tests.cases import Case, Judgements, by_short_rules, own_judge
from tests.made_runs import event

LOCAL_SGD = "torch.distributed.optim.post_localSGD_optimizer:PostLocalSGDOptimizer"
ZERO_VIEWS = "torch.distributed.optim:ZeroRedundancyOptimizer,parameters_as_bucket_view=True"
TORCHS = by_short_rules(Case(LOCAL_SGD, worlds=(2,), kind="optimizer"), ("15.7", "15.14", "15.18"))
VIEWS = by_short_rules(Case(ZERO_VIEWS, worlds=(2,), kind="optimizer"), ("15.16",))
# The MUST rules that fail for each, with a part of the cause or of the observation.
FAILURES = {
    TORCHS: {
        "15.14": "stepped with an earlier learning rate, 0.125",
    },
    VIEWS: {
        "15.16": (
            "elements are in another order: the parameter's strides differ from those of its "
            "gradient"
        )
    },
}
EXACT = [scenario for scenario in OPTIMIZER.scenarios if is_exact(scenario)]


@pytest.mark.parametrize("case", FAILURES, ids=str)
def test_torchs_own_are_refused_by_these_rules_alone(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    judgements = judgements_of(case)
    failed = {number for number, j in judgements.items() if j.verdict is Verdict.FAIL}
    refused = {number for number in failed if rules[number].level == MUST}
    assert refused == FAILURES[case].keys()
    for number, text in FAILURES[case].items():
        first = judgements[number].failures[0]
        assert text in (first.cause or first.actual)
    assert failed - refused == ({"15.18"} if case is TORCHS else set())


def run_of(scenario: Scenario, world: int, averager: bool) -> Run:
    """Return a run whose records hold nothing but the construction of the subject."""
    options = dict(plan_of(scenario).options)
    made = event("made", -1, averager=averager, options=options, takes_any=True)
    return Run(scenario, world, [RankRecord(rank, [made]) for rank in range(world)])


@pytest.mark.parametrize("averager", [False, True])
@pytest.mark.parametrize("scenario", EXACT, ids=lambda scenario: scenario.name)
def test_sgd_is_exact(scenario: Scenario, averager: bool) -> None:
    """The dtype represents every step and average, so that right wrappers give the same bits."""
    for world in scenario.fits((2, 4)) or scenario.fits((1, 3)):
        for step in right_steps(run_of(scenario, world, averager)).values():
            for spec, stepped, after in zip(scenario.params, step.stepped, step.after, strict=True):
                for value in (stepped, after):
                    assert torch.equal(value.to(getattr(torch, spec.dtype)).double(), value)


def test_adam_is_torchs() -> None:
    scenario = replace(ADAM, params=ADAM.params[:1])
    start = gradient("crafted", (5, 3), torch.float32, world=1, rank=0, step=START, param=0)
    parameter = torch.nn.Parameter(start.double())
    optimizer = torch.optim.Adam([parameter], lr=2.0**-7)
    right = right_steps(run_of(scenario, 1, False))
    for step in range(8):
        grad = gradient("normal", (5, 3), torch.float32, world=1, rank=0, step=step, param=0)
        parameter.grad = grad.double()
        optimizer.step()
        after = right[0, step].after[0].view(5, 3)
        assert torch.allclose(after, parameter.detach(), rtol=1e-14, atol=1e-14)


def test_a_restored_averager_repeats_its_count() -> None:
    """Averages are due at the averager's counts 1, 3, 5; at step 5 its count is 2 again."""
    right = right_steps(run_of(RELOADED, 2, True))
    assert [step for step in range(9) if right[0, step].averaged] == [1, 3, 6, 8]
    assert torch.equal(right[0, 5].before[0], right[0, 1].after[0])


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("no_such_module:Optimizer", "there is no module 'no_such_module' on the path"),
        ("hooks_ref:PostLocalSGDOptimiser", "did you mean PostLocalSGDOptimizer"),
        (
            "hooks_ref:allreduce_hook",
            "takes optim, or optimizer_class and **options, or lr: its signature has none of them",
        ),
        (
            "tests.subjects.kinds.test_optimizer:nothing",
            "an optimizer wrapper has a method step(); NoneType has none",
        ),
        (
            "torch.distributed.optim:ZeroRedundancyOptimizer,lr=0.1",
            "lr= is for the kit to choose; leave it out of the target",
        ),
    ],
)
@pytest.mark.ranks
def test_other_targets_are_refused_in_one_line(target: str, text: str) -> None:
    with pytest.raises(TargetError) as raised:
        own_judge().judge(Case(target, worlds=(2,), kind="optimizer"))
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def nothing(optim: torch.optim.Optimizer) -> None:
    """Return no optimizer."""


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        (
            "exact",
            "'exact' is not a claim of an optimizer; known: averages",
        ),
        ("min_world_size(0)", "min_world_size"),
    ],
)
def test_claims_that_do_not_parse(claims: str, text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_claims(claims, "optimizer")
    assert text in str(raised.value)

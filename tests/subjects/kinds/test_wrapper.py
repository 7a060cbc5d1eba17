"""Judging wrappers of modules: the oracle, torch's own, and targets and claims that are refused."""

from collections.abc import Callable

import pytest
import torch

from conformance.errors import TargetError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.oracles.wrapper import TOLERANCES, differing_elements, prefix_cause
from conformance.judging.rule import MUST, Rule
from conformance.session.engine import make_engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import default_claims, parse_claims
from conformance.subjects.spec import parse_other
from tests.cases import Case, Judgements, by_short_rules

TORCHS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
WRAPPER = by_short_rules(
    Case(f"{TORCHS}:checkpoint_wrapper", "recomputes", worlds=(2,), kind="wrapper"),
    ("19.12", "19.20", "19.36", "19.37"),
)
REENTRANT = by_short_rules(
    Case(f"{TORCHS}:checkpoint_wrapper,checkpoint_impl=REENTRANT", worlds=(2,), kind="wrapper"),
    ("19.12", "19.20", "19.37"),
)
OFFLOAD = by_short_rules(
    Case(f"{TORCHS}:OffloadWrapper", worlds=(2,), kind="wrapper"), ("19.12", "19.22")
)
# The MUST rules that refuse them: without reentrance, inputs that are given by keyword and changed
# in place are read again.
REFUSED = {WRAPPER: {"19.36"}}
# The SHOULD rules that do not hold: names of buffers and of the network around (19.12), buffers
# that are updated twice (19.20), and parameters that are changed in place (19.37, which builds on
# 19.36).
ADVICE = {
    WRAPPER: {"19.12", "19.20", "19.37"},
    REENTRANT: {"19.12", "19.20", "19.37"},
    OFFLOAD: {"19.12"},
}
# save_on_cpu returns saved tensors without their strides. Whether a float64 matmul of a transposed
# operand and of its contiguous copy give the same bits depends on the kernels that the CPU runs.
MAY_ADVISE = {OFFLOAD: {"19.22"}}


@pytest.mark.parametrize("case", ADVICE, ids=str)
def test_torchs_own_are_refused_by_these_rules_alone_and_get_this_advice(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    reasons = {n: j.reason for n, j in judgements_of(case).items() if not j.verdict.holds}
    refused = {number for number in reasons if rules[number].level == MUST}
    assert refused == REFUSED.get(case, set())
    assert reasons.keys() - refused - MAY_ADVISE.get(case, set()) == ADVICE[case], reasons


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("hooks_rev:checkpoint_wrapper", "there is no module 'hooks_rev'"),
        ("hooks_ref:checkpoint_wraper", "did you mean checkpoint_wrapper"),
        ("hooks_ref:PREFIX_OF_NOTHING", "no attribute"),
        ("hooks_ref:allreduce_hook", "allreduce_hook cannot be called with one argument"),
        ("builtins:repr", "repr returned a str"),
        (
            "hooks_ref:checkpoint_wrapper,checkpoint_impl=REENTRENT",
            "no such member; CheckpointImpl has REENTRANT, NO_REENTRANT",
        ),
    ],
)
def test_other_targets_are_refused_in_one_line(
    pool: Pool, rules: dict[str, Rule], target: str, text: str
) -> None:
    spec = parse_other("wrapper", target)
    claims = parse_claims("recomputes", "wrapper")
    engine = make_engine(LocalSource(pool), rules, spec, claims, (2,))
    with pytest.raises(TargetError) as error:
        engine.judge("19.1")
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["recompute", "recomputes(2)", "reentrant, reentrant", "exact", "recomputes("]
)
def test_claims_that_do_not_parse(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_claims(text, "wrapper")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "claims"),
    [
        ({}, "what every wrapper is"),
        ({"checkpoint_impl": "REENTRANT"}, "recomputes, reentrant"),
        ({"checkpoint_impl": "CheckpointImpl.NO_REENTRANT"}, "recomputes"),
        ({"use_reentrant": True, "preserve_rng_state": False}, "recomputes, reentrant, draws_anew"),
        ({"preserve_rng_state": True}, "what every wrapper is"),
    ],
)
def test_default_claims_follow_from_arguments(arguments: dict[str, object], claims: str) -> None:
    assert str(default_claims("wrapper", arguments)) == claims
    assert parse_claims(claims, "wrapper") == default_claims("wrapper", arguments)


def test_the_tolerance_is_above_another_order_and_below_float32() -> None:
    right = torch.rand(7, dtype=torch.float64) + 0.5
    tolerance = TOLERANCES[""]
    assert not len(differing_elements(right * (1 + 2.0**-40), right, tolerance))
    assert len(differing_elements(right.float(), right, tolerance))
    nan = right.float() * float("nan")
    assert len(differing_elements(nan, right, TOLERANCES["autocast"])) == 7
    assert not len(differing_elements(torch.zeros(3), torch.zeros(3), 0.0))


def test_a_prefix_is_recognised() -> None:
    wanted = ["a.weight", "a.bias", "b"]
    assert prefix_cause(["a.inside.weight", "a.inside.bias", "b"], wanted)
    assert not prefix_cause(["a.weight", "a.bias", "c"], wanted)
    assert not prefix_cause(wanted, wanted)

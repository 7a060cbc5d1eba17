"""Wrappers of modules: what is said of torch's own, and of what is none."""

from collections.abc import Callable

import pytest
import torch

from conformance.errors import TargetError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.oracles.wrapper import CLOSE, _apart, _prefix
from conformance.judging.rule import MUST, Rule
from conformance.session.engine import make_engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import default_claims, parse_claims
from conformance.subjects.spec import parse_other
from tests.cases import Case, Judgements

TORCHS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
# What it is, and the advice that it gets: names of buffers and in the network around; batch norm; strides of what is saved.
OWN = {
    Case(f"{TORCHS}:checkpoint_wrapper", "recomputes", worlds=(2,), kind="wrapper"): {"19.12", "19.20"},
    Case(f"{TORCHS}:checkpoint_wrapper,checkpoint_impl=REENTRANT", worlds=(2,), kind="wrapper"): {"19.12", "19.20"},
    Case(f"{TORCHS}:OffloadWrapper", worlds=(2,), kind="wrapper"): {"19.12", "19.22"},
}


@pytest.mark.parametrize("case", OWN, ids=str)
def test_torchs_own_are_certified_with_advice(judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case) -> None:
    judgements = judgements_of(case)
    refused = {number for number, judgement in judgements.items() if not judgement.verdict.holds}
    assert {number for number in refused if rules[number].level == MUST} == set()
    # Saved values come back with other strides. Whether the bits then differ depends on the kernels
    # that torch has for the processor: on some they are the same, and 19.22 holds.
    assert refused | ({"19.22"} & OWN[case]) == OWN[case], {number: judgements[number].reason for number in refused}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("hooks_rev:checkpoint_wrapper", "there is no module 'hooks_rev'"),
        ("hooks_ref:checkpoint_wraper", "did you mean checkpoint_wrapper"),
        ("hooks_ref:PREFIX_OF_NOTHING", "no attribute"),
        ("hooks_ref:allreduce_hook", "allreduce_hook cannot be called with one argument"),
        ("builtins:repr", "repr returned a str"),
        ("hooks_ref:checkpoint_wrapper,checkpoint_impl=REENTRENT", "no such member; CheckpointImpl has REENTRANT, NO_REENTRANT"),
    ],
)
def test_what_is_none_is_said_in_a_line(pool: Pool, rules: dict[str, Rule], target: str, said: str) -> None:
    engine = make_engine(LocalSource(pool), rules, parse_other("wrapper", target), parse_claims("recomputes", "wrapper"), (2,))
    with pytest.raises(TargetError) as error:
        engine.judge("19.1")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["recompute", "recomputes(2)", "reentrant, reentrant", "exact", "recomputes("])
def test_claims_that_cannot_be_read(text: str) -> None:
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
def test_what_arguments_say(arguments: dict[str, object], claims: str) -> None:
    assert str(default_claims("wrapper", arguments)) == claims
    assert parse_claims(claims, "wrapper") == default_claims("wrapper", arguments)


def test_float32_on_the_way_is_too_far_off() -> None:
    right = torch.rand(7, dtype=torch.float64) + 0.5
    assert not len(_apart(right * (1 + 2.0**-40), right, CLOSE[""]))
    assert len(_apart(right.float(), right, CLOSE[""]))
    assert len(_apart(right.float() * float("nan"), right, CLOSE["autocast"])) == 7
    assert not len(_apart(torch.zeros(3), torch.zeros(3), 0.0))


def test_a_prefix_is_recognised() -> None:
    wanted = ["a.weight", "a.bias", "b"]
    assert _prefix(["a.inside.weight", "a.inside.bias", "b"], wanted)
    assert not _prefix(["a.weight", "a.bias", "c"], wanted)
    assert not _prefix(wanted, wanted)

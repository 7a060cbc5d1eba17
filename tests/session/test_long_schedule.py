"""The schedule of a long run fits the claims, and ``--steps`` lengthens it."""

import json

import pytest

from conformance.errors import UsageError
from conformance.scenarios.feed import feed_of
from conformance.scenarios.hook import BUCKETS, SAVED
from conformance.scenarios.long_runs import ENDURANCE, MOST_ROWS
from conformance.scenarios.model import Scenario, scenario_from_json
from conformance.session.adaptations import adapt_scenario
from conformance.session.options import Options
from conformance.session.request import read_request
from conformance.subjects.claims import parse_claims

CLAIMS = (
    "exact",
    "rounded(float16)",
    "sum",
    "compressed",
    "compressed(delta=0.01)",
    "compressed(delta=1)",
    "compressed(feedback=ef21, delta=0.25)",
    "compressed(feedback=False, delta=0.99)",
    "unbiased",
    "local",
    "compressed, warmup(1000)",
    "fused(SGD, lr=0.1)",
)


def adapted(claims: str, scenario: Scenario = ENDURANCE, seed: int = 0, steps: int = 0) -> Scenario:
    return adapt_scenario(scenario, parse_claims(claims), seed=seed, steps=steps)


@pytest.mark.parametrize("claims", CLAIMS)
def test_more_than_a_thousand_steps_follow_the_warm_up(claims: str) -> None:
    for seed in range(20):
        scenario = adapted(claims, seed=seed)
        feed = feed_of(scenario)
        assert feed.steps - scenario.long_run.warm_up >= 1200
        assert len(feed.keys) < 200, "gradients come again"
        assert scenario_from_json(json.loads(json.dumps(scenario.to_json()))) == scenario


def test_seeds_give_other_lengths_and_places() -> None:
    runs = [adapted("exact", seed=seed) for seed in range(20)]
    assert len({len(run.steps) for run in runs}) > 15
    assert len({run.steps.index("nan") for run in runs}) > 15


@pytest.mark.parametrize("claims", CLAIMS)
@pytest.mark.parametrize("steps", [1600, 5000, 100_000])
def test_a_longer_run_keeps_a_small_record(claims: str, steps: int) -> None:
    scenario = adapted(claims, steps=steps)
    feed = feed_of(scenario)
    assert feed.steps - scenario.long_run.warm_up >= steps
    # Zeros at the end, and the warm-up, come on top.
    assert feed.rounds <= MOST_ROWS + 1400 + scenario.long_run.warm_up
    assert feed.steps_of(feed.rounds - 1)[-1] == feed.steps - 1


def test_a_long_warm_up_comes_before_the_record() -> None:
    buckets = adapted("compressed, warmup(1000)", BUCKETS)
    assert (buckets.unrecorded_steps, buckets.steps[:9].count("crafted")) == (992, 8)
    saved = adapted("compressed, warmup(1000)", SAVED)
    assert saved.resume.saves_at == SAVED.resume.saves_at + 8
    assert adapted("compressed, warmup(50)", BUCKETS).unrecorded_steps == 0


def test_steps_of_the_command_line() -> None:
    assert read_request(Options(hook="m:f")).steps == 0
    assert read_request(Options(hook="m:f", steps=100_000)).steps == 100_000
    message = "--steps 7 is out of range: give a number from 1200 to 10000000"
    with pytest.raises(UsageError, match=message):
        read_request(Options(hook="m:f", steps=7))
    message = (
        "--steps 2000: only the long run of a hook can be lengthened; leave --steps out for an "
        "averager"
    )
    with pytest.raises(UsageError, match=message):
        read_request(Options(averager="m:f,period=4", steps=2000))

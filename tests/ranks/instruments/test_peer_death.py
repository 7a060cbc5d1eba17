"""A peer that dies before the last of several collectives, or goes on, and the verdicts on it."""

import pytest

from conformance.hosts.pool import Pool
from conformance.judging.rule import Rule
from conformance.judging.verdict import Found, Verdict
from conformance.records.files import PEER_DIED
from conformance.scenarios.hook import PEER_DIES_LATER
from conformance.subjects.claims import parse_claims
from tests.hooks_ref.algorithms import try_hook
from tests.made_runs import event, made_run


@pytest.mark.parametrize(
    "given",
    [
        # A callback starts the last collective.
        {"setup": "examples.setups:zero_interleaved"},
        {"hook": "hooks_ref:powerSGD_hook", "state": "examples.states:power_sgd_from_the_start"},
        # It waits for its first collective.
        {"hook": "tests.right.few_bits:fp8_by_powers_of_two", "state": "tests.right._common:State"},
        # It has one collective.
        {"hook": "hooks_ref:allreduce_hook"},
    ],
    ids=str,
)
def test_the_peer_dies_at_the_last_collective(pool: Pool, given: dict[str, str]) -> None:
    run = try_hook(pool, PEER_DIES_LATER, **given)
    (fault,) = run.ranks[0].all("fault")
    assert (run.ranks[1].exit, fault["raised"], fault["unused"]) == (PEER_DIED, True, False), fault
    before = [step for step in range(4) if run.ranks[1].first("stepped", step=step)]
    assert before == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"hook": "tests.right.exact:point_to_point"}, Verdict.NOT_APPLICABLE),
        # It has no collective: nothing could fail.
        ({"hook": "hooks_ref:noop_hook"}, Verdict.NOT_RUN),
        # The number of its collectives changes with every step.
        (
            {"hook": "tests.right.local:random_pairs", "state": "tests.right._common:State"},
            Verdict.NOT_APPLICABLE,
        ),
    ],
    ids=str,
)
def test_the_peer_lives_if_no_collective_is_the_last(
    pool: Pool, rules: dict[str, Rule], given: dict[str, str], verdict: Verdict
) -> None:
    run = try_hook(pool, PEER_DIES_LATER, **given)
    (fault,) = run.ranks[0].all("fault")
    assert (run.ranks[1].exit, fault["raised"], fault["unused"]) == (0, False, True), fault
    found = Found()
    rules["12.4"].check(run, parse_claims("exact"), found)
    assert found.verdict() is verdict


@pytest.mark.parametrize(
    ("exit_of_rank_1", "unused", "raised", "verdict"),
    [
        (PEER_DIED, False, True, Verdict.PASS),
        (PEER_DIED, False, False, Verdict.FAIL),
        # Rank 0 ended before its last collective.
        (PEER_DIED, True, False, Verdict.NOT_APPLICABLE),
        # Rank 1 did not come to its last collective.
        (0, False, False, Verdict.NOT_APPLICABLE),
    ],
)
def test_the_verdict(
    rules: dict[str, Rule], exit_of_rank_1: int, unused: bool, raised: bool, verdict: Verdict
) -> None:
    run = made_run(scenario=PEER_DIES_LATER)
    run.ranks[1].exit = exit_of_rank_1
    outcome = {"fault": "peer_dies_later", "unused": unused, "started": 2, "raised": raised}
    if raised:
        outcome |= {"type": "RuntimeError", "message": "Connection closed by peer"}
    run.ranks[0].events.append(event("fault", 3, **outcome))
    found = Found()
    rules["12.4"].check(run, parse_claims("exact"), found)
    assert found.verdict() is verdict

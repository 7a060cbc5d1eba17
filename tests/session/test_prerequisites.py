"""Which runs a rule reads on a backend whose futures are complete at once."""

import pytest

from conformance.rules import book
from conformance.scenarios.profiles import CUDA, GLOO_CPU, Profile, requested_profile
from conformance.session.plan import Plan
from conformance.session.prerequisites import reason_not_applicable
from conformance.subjects.claims import Claims

NCCL = requested_profile("nccl", CUDA)


def names(number: str, profile: Profile) -> set[str]:
    """Return the scenarios that a rule reads on a profile."""
    plan = Plan("hook", Claims(), profile, (1, 2, 3, 4))
    return {scenario.name for scenario, _ in plan.runs_of(book()[number])}


def test_no_run_waits_for_a_failure_that_no_future_tells_of() -> None:
    everywhere = names("12.5", GLOO_CPU)
    assert everywhere - names("12.5", NCCL) == {"dies_large"}
    assert names("12.1", NCCL) == names("12.1", GLOO_CPU) != set()


@pytest.mark.parametrize("number", ["12.2", "12.3", "12.4"])
def test_a_rule_on_such_failures_alone_needs_no_runs(number: str) -> None:
    assert names(number, GLOO_CPU) != set() == names(number, NCCL)
    assert "watchdog" in str(reason_not_applicable(book()[number], NCCL))

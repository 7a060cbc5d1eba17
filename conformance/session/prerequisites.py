"""Which rules another rule builds on, and which apply on a backend."""

from collections.abc import Mapping

from conformance.judging.rule import Rule
from conformance.scenarios.model import COLLECTIVE_FAULTS, Scenario
from conformance.scenarios.profiles import Profile
from conformance.subjects.claims import Claims

# Faults of a peer that a backend with streams reports through its watchdog, not through a future.
NOTICED_BY_FUTURES = ("peer_dies", "peer_dies_later", "peer_silent")
# The rank leaves its peers, whose collectives would wait on the device.
LEAVES_PEERS = COLLECTIVE_FAULTS


def is_noticed_by_futures(scenario: Scenario) -> bool:
    """Whether only the future of a collective tells of the scenario's failure."""
    return scenario.fault.kind in NOTICED_BY_FUTURES


def reason_not_applicable(rule: Rule, profile: Profile) -> str | None:
    """Return why a rule does not apply on a profile's backend, or None if it does."""
    if profile.ordered:
        if all(is_noticed_by_futures(scenario) for scenario in rule.on):
            return (
                f"on {profile.backend} a future is complete once its collective is enqueued; "
                "its failure is noticed by the backend's watchdog, which ends the process, and no "
                "hook can hide it"
            )
        if all(scenario.fault.kind in LEAVES_PEERS for scenario in rule.on):
            return (
                f"on {profile.backend} the peers of a rank that has raised wait on the device, "
                "until the backend's watchdog ends their processes: this is judged on Gloo alone"
            )
    elif all(scenario.captured for scenario in rule.on):
        return f"{profile.backend}'s collectives cannot be captured"
    return None


def needs_of(rule: Rule, rules: Mapping[str, Rule], claims: Claims) -> tuple[str, ...]:
    """Return the rules that a rule builds on.

    For a lossy subject section 13 takes the place of 2.1 and 2.2.
    """
    lossy = [other for other in rules.values() if other.judges_lossy_results]
    is_one_of_them = rule.section in {other.section for other in lossy}
    needs_exact = any(rules[needed].judges_exact_results for needed in rule.needs)
    if claims.lossy and not is_one_of_them and needs_exact:
        return (*rule.needs, *(other.number for other in lossy))
    return rule.needs


def builds_on(rule: Rule, number: str, rules: Mapping[str, Rule]) -> bool:
    """Whether a rule builds on another one, directly or not."""
    return number in rule.needs or any(
        builds_on(rules[needed], number, rules) for needed in rule.needs
    )

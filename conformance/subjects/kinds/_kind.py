"""The declaration of a kind of subject, before torch is imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.scenarios.model import Scenario
from conformance.scenarios.probes import ProbeMaker
from conformance.subjects.kinds._claim import Claim, Reference


def _no_contradiction(claimed: Mapping[str, Mapping[str, Any]]) -> str | None:
    return None


def _no_missing_claim(options: Mapping[str, Any], size: int) -> str:
    return ""


def _as_it_is(scenario: Scenario, options: Mapping[str, Any]) -> Scenario:
    return scenario


@dataclass(frozen=True)
class Kind:
    """A kind of subject.

    Attributes:
        name: also of its option, ``--averager``, and of its driver in ``ranks.drivers``.
        summary: one line for people.
        sections: of the rule book; their rules apply to this kind alone.
        reference: the target of the control, which is judged beside every subject.
        scenarios: the runs of a subject; the first is the plainest, and a subject that breaks it
            is judged in no other.
        claims: the claims that a subject can make, by name.
        default_claims: returns the claims that follow from the arguments of the target, or None if
            none follow. Raises ValueError if the kind needs claims.
        contradiction: returns the reason why claims do not go together or one is missing, or None
            if they are fine. It takes the values of the claims by name.
        missing_claim: returns advice if a subject that raises on a group of so many ranks lacks a
            claim, by its ``Claims.options``, or '' if it lacks none.
        adapt: returns a scenario as it is run for a subject, by the subject's ``Claims.options``.
        references: those that a subject can claim to be like, by name.
        probes: makes runs for the numbers in a subject's own code; None if no rule reads such runs.
        default_reason: the author of the default claims, as the certificate names it.
        searches_claims: whether ``--claims auto`` can try claims.
        bound: the target is called again and again, with its arguments each time; otherwise it
            makes an object on each rank.
    """

    name: str
    summary: str
    sections: tuple[str, ...]
    reference: str
    scenarios: tuple[Scenario, ...]
    claims: Mapping[str, Claim]
    default_claims: Callable[[Mapping[str, Any]], str | None]
    contradiction: Callable[[Mapping[str, Mapping[str, Any]]], str | None] = _no_contradiction
    missing_claim: Callable[[Mapping[str, Any], int], str] = _no_missing_claim
    adapt: Callable[[Scenario, Mapping[str, Any]], Scenario] = _as_it_is
    references: Mapping[str, Reference] = field(default_factory=dict)
    probes: ProbeMaker | None = None
    default_reason: str = "the arguments of the target"
    searches_claims: bool = False
    bound: bool = False

    @property
    def with_article(self) -> str:
        """The name in a sentence: ``an averager``."""
        article = "an" if self.name[0] in "aeiou" else "a"
        return f"{article} {self.name}"

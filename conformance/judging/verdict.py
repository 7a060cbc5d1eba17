"""The verdicts of a rule, ordered so that a skipped rule never hides a failed one."""

import enum
from dataclasses import dataclass, field
from typing import Any

# Certificates leave out rules whose reason ends in one of these: they say nothing about a subject.
NOT_CLAIMED = "it is not claimed"
INSTEAD = "is judged instead"
NOTHING_TO_TRY = "compares with a number"


class Verdict(enum.IntEnum):
    """From best to worst; "not applicable" stands for a declared exception that was verified."""

    PASS = 0
    NOT_APPLICABLE = 1
    NOT_RUN = 2
    FAIL = 3
    KIT_ERROR = 4

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")

    @property
    def holds(self) -> bool:
        """Whether a certificate can be given with it."""
        return self <= Verdict.NOT_APPLICABLE


@dataclass
class Failure:
    """One requirement that does not hold.

    Attributes:
        expected: the requirement, in the terms of this run.
        actual: the observation and its place: rank, step, bucket, parameter, index.
        cause: the known mistake that leaves this pattern; empty if none is recognised.
        evidence: by rank, the output and stacks that the host kept of a failed run.
    """

    expected: str
    actual: str
    cause: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


class Found:
    """The findings of a rule in the records of one run."""

    def __init__(self) -> None:
        self.checks = 0
        self.margin: float | None = None
        self.failures: list[Failure] = []
        self.not_applicable: str | None = None
        self.without_evidence: str | None = None
        self.is_left_out = False
        self.notes: list[str] = []
        self._sent: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        """Add a note to the certificate, whatever the verdict."""
        self.notes.append(text)

    def require(self, holds: bool, expected: str, actual: str, cause: str = "") -> bool:
        """Count one check, and keep a failure if it does not hold. Return ``holds``."""
        self.checks += 1
        if not holds:
            self.failures.append(Failure(expected, actual, cause))
        return holds

    def checked(self, count: int, margin: float | None = None) -> None:
        """Count checks that held.

        Args:
            count: the number of checks.
            margin: the largest error as a fraction of its bound.
        """
        self.checks += count
        if margin is not None:
            self.margin = max(margin, self.margin or 0.0)

    def sends(self, size: int, of: int) -> None:
        """Add the traffic of one rank in one step to the certificate.

        Args:
            size: the bytes that the rank sent.
            of: the bytes that it would have sent without compression.
        """
        self._sent.append((size, of))

    @property
    def traffic(self) -> dict[str, float] | None:
        """Traffic as a share of the uncompressed bytes: of the largest step, and of all steps."""
        shares = [size / of for size, of in self._sent if of]
        if not shares:
            return None
        mean = sum(size for size, _ in self._sent) / sum(of for _, of in self._sent)
        return {"largest": round(max(shares), 6), "mean": round(mean, 6)}

    def does_not_apply(self, reason: str = NOT_CLAIMED) -> None:
        """Declare the requirement not applicable, for a reason that was verified."""
        self.not_applicable = reason

    def leaves_out(self, reason: str) -> None:
        """Leave this run out, for a reason that was verified and is noted on the certificate.

        The rule's other runs decide. If none of them has a check, the rule is not run.
        """
        self.is_left_out = True
        self.note(reason)

    def lacks_evidence(self, reason: str) -> None:
        """Declare that the run never gave the requirement a chance to fail, and why."""
        self.without_evidence = reason

    def verdict(self) -> Verdict:
        if self.failures:
            return Verdict.FAIL
        if self.without_evidence is not None:
            return Verdict.NOT_RUN
        if self.not_applicable is not None:
            return Verdict.NOT_APPLICABLE
        if self.is_left_out:
            return Verdict.PASS
        # A rule that found nothing to check must not count as a pass.
        return Verdict.PASS if self.checks else Verdict.NOT_RUN


@dataclass
class Judgement:
    """The verdict on one rule.

    Attributes:
        number: the rule's number.
        verdict: the worst verdict over the rule's runs. A run to which the rule does not apply
            counts only if there is no other one.
        reason: one line for any verdict but a pass.
        failures: the failures of the first run that failed.
        runs: by run, its verdict, number of checks and margin, and the traffic if the rule
            counts bytes.
    """

    number: str
    verdict: Verdict
    reason: str = ""
    failures: list[Failure] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def note_run(self, name: str, verdict: Verdict, reason: str, **figures: Any) -> None:
        """Enter one run.

        Args:
            name: of the run, such as ``values@2``.
            verdict: on this run.
            reason: one line for any verdict but a pass.
            figures: more to keep of the run; None is left out.
        """
        entry = {"verdict": str(verdict), "reason": reason, **figures}
        self.runs[name] = {key: value for key, value in entry.items() if value is not None}
        if verdict > self.verdict:
            self.verdict = verdict
            self.reason = f"{name}: {reason}"
        entered = {run["verdict"] for run in self.runs.values()}
        if self.verdict is Verdict.NOT_APPLICABLE and str(Verdict.PASS) in entered:
            self.verdict = Verdict.PASS
            self.reason = ""

    @property
    def checks(self) -> int:
        return sum(run.get("checks", 0) for run in self.runs.values())

    @property
    def margin(self) -> float | None:
        margins = [run["margin"] for run in self.runs.values() if run.get("margin") is not None]
        return max(margins, default=None)

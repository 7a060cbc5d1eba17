"""What a rule can say, ordered so that nothing hides behind a skip."""

import enum
from dataclasses import dataclass, field
from typing import Any

NOT_CLAIMED = "it is not claimed"
INSTEAD = "is judged instead"


class Verdict(enum.IntEnum):
    """pass < not applicable (declared, and its mirror verified) < not run < fail < kit error."""

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
    """One thing that should not have been: the only shape of failure that there is.

    Attributes:
        expected: what the requirement asks for, at this place.
        actual: what was seen, with its place: rank, step, bucket, parameter, index.
        cause: the known mistake that makes this pattern; empty when none is recognised.
        evidence: per rank, what the host kept of a run that broke.
    """

    expected: str
    actual: str
    cause: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


class Found:
    """What a rule finds in the records of one run. A rule that checks nothing has not run."""

    def __init__(self) -> None:
        self.checks = 0
        self.margin: float | None = None
        self.failures: list[Failure] = []
        self.not_applicable = ""
        self.notes: list[str] = []
        self._sent: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        """Say something that the certificate is to hold, whatever the verdict."""
        self.notes.append(text)

    def require(self, holds: bool, expected: str, actual: str, cause: str = "") -> bool:
        """Count one check; keep the failure when it does not hold. Returns ``holds``."""
        self.checks += 1
        if not holds:
            self.failures.append(Failure(expected, actual, cause))
        return holds

    def checked(self, count: int, margin: float | None = None) -> None:
        """Count checks that held, with the largest error as a fraction of its bound."""
        self.checks += count
        if margin is not None:
            self.margin = max(margin, self.margin or 0.0)

    def sends(self, size: int, of: int) -> None:
        """Keep how many bytes a rank sent in a step, and how many it would have without compression; the certificate holds both."""
        self._sent.append((size, of))

    @property
    def traffic(self) -> dict[str, float] | None:
        """What was sent, as a share of what it is without compression: of the step that sent most, and of all steps together."""
        shares = [size / of for size, of in self._sent if of]
        if not shares:
            return None
        mean = sum(size for size, _ in self._sent) / sum(of for _, of in self._sent)
        return {"largest": round(max(shares), 6), "mean": round(mean, 6)}

    def does_not_apply(self, reason: str = NOT_CLAIMED) -> None:
        """Say that the requirement does not apply, for a reason that was verified."""
        self.not_applicable = reason

    def verdict(self) -> Verdict:
        if self.failures:
            return Verdict.FAIL
        if self.not_applicable:
            return Verdict.NOT_APPLICABLE
        return Verdict.PASS if self.checks else Verdict.NOT_RUN


@dataclass
class Judgement:
    """The verdict on one rule.

    Attributes:
        number: of the rule.
        verdict: the worst over its runs.
        reason: one line for anything but a pass.
        failures: of the first run that failed.
        runs: for each run, its verdict, number of checks and margin; and, of rules that count bytes, its traffic.
    """

    number: str
    verdict: Verdict
    reason: str = ""
    failures: list[Failure] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def checks(self) -> int:
        return sum(run.get("checks", 0) for run in self.runs.values())

    @property
    def margin(self) -> float | None:
        return max((run["margin"] for run in self.runs.values() if run.get("margin") is not None), default=None)

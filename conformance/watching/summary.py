"""The costs of a watch, and the line that is logged when it is closed."""

from collections import Counter
from dataclasses import dataclass

from conformance.watching.judge import StepJudgement


@dataclass
class Cost:
    """The costs of a watch so far, on this rank.

    Attributes:
        steps: the steps that were counted.
        samples: the steps that were sampled.
        seconds: the time spent on sampled steps; this includes waiting for other ranks.
        gathered: bytes that came from all ranks.
    """

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    gathered: int = 0


class Summary:
    """The numbers of the line that is logged when a watch is closed."""

    def __init__(self) -> None:
        self.logged = False
        self._steps_by_rule: Counter[str] = Counter()
        # The largest value of the figure, and its step.
        self._largest: tuple[float, int] | None = None
        self._name = ""
        self._without = 0

    def add(self, step: int, judgement: StepJudgement) -> None:
        """Add a sampled step."""
        self._steps_by_rule.update(finding.rule for finding in judgement.findings)
        for name, value in judgement.figures.items():
            self._name = name
            if value is None:
                self._without += 1
            elif self._largest is None or value > self._largest[0]:
                self._largest = (value, step)

    def describe(self, cost: Cost, ended: str | None) -> str:
        """Return the line."""
        parts = [f"{cost.samples} of {cost.steps} steps sampled"]
        if self._steps_by_rule:
            rules = sorted(self._steps_by_rule.items(), key=lambda item: _numbers(item[0]))
            counts = ", ".join(f"{rule}: {count}" for rule, count in rules)
            parts.append(f"steps with findings by rule: {counts}")
        else:
            parts.append("no finding")
        if self._largest is not None:
            value, step = self._largest
            parts.append(f"largest {self._name} {value:.3g} at step {step}")
        if self._without:
            parts.append(f"steps without {self._name}: {self._without}")
        if ended is not None:
            parts.append(f"the watch ended before it was closed: {ended}")
        return "the watch is closed: " + "; ".join(parts)


def _numbers(rule: str) -> list[int]:
    """Return the numbers of a rule, so that 10.2 comes after 9.2."""
    return [int(part) for part in rule.split(".")]

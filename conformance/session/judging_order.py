"""The order in which rules are judged: those that need every run of the session come last.

A rule that watches every run waits for the last of them, and in the meantime the processor would
have no rule to judge. The others are judged first, each as soon as its own runs are there.
"""

from collections.abc import Mapping, Sequence

from conformance.judging.rule import Rule
from conformance.session.prerequisites import needs_of
from conformance.subjects.claims import Claims


class JudgingOrder:
    """Says which rules are judged before another one.

    Args:
        rules: the whole book.
        claims: the claims of the subject.
    """

    def __init__(self, rules: Mapping[str, Rule], claims: Claims) -> None:
        self._rules = rules
        self._claims = claims
        self._waiting: dict[str, bool] = {}

    def before(self, number: str, selected: Sequence[str]) -> list[str]:
        """Return the selected rules that are judged before a rule, in the order of the book."""
        if not self._waits_for_every_run(number):
            return []
        return [other for other in selected if not self._waits_for_every_run(other)]

    def _waits_for_every_run(self, number: str) -> bool:
        """Whether a rule watches every run, or builds on one that does."""
        if number not in self._waiting:
            rule = self._rules[number]
            needed = (*needs_of(rule, self._rules, self._claims), *rule.presumes)
            self._waiting[number] = rule.watches or any(map(self._waits_for_every_run, needed))
        return self._waiting[number]

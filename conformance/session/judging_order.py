"""The order in which rules are judged: those that need every run of the session come last.

A rule that watches every run waits for the last of them, and in the meantime the processor would
have no rule to judge. The others are judged first, each as soon as its own runs are there.
"""

from collections.abc import Iterator, Mapping, Sequence

from conformance.judging.rule import Rule
from conformance.session.prerequisites import needs_of
from conformance.subjects.claims import Claims


def waits_for_every_run(number: str, rules: Mapping[str, Rule], claims: Claims) -> bool:
    """Whether a rule watches every run, or builds on one that does."""
    rule = rules[number]
    return rule.watches or any(
        waits_for_every_run(needed, rules, claims)
        for needed in (*needs_of(rule, rules, claims), *rule.presumes)
    )


def judged_before(
    number: str, selected: Sequence[str], rules: Mapping[str, Rule], claims: Claims
) -> Iterator[str]:
    """Yield the selected rules that are judged before a rule, in the order of the book."""
    if waits_for_every_run(number, rules, claims):
        for other in selected:
            if not waits_for_every_run(other, rules, claims):
                yield other

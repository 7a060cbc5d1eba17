"""The rules that were not run because another one fails: they follow from it."""

import re
from collections.abc import Collection, Mapping

from conformance.judging.verdict import Judgement, Verdict

# The places in a reason that name another rule, or a run that broke (``engine.py``, ``plan.py``,
# ``blame.py``).
_RULE = re.compile(r"(?:judged only if|it needs|fails?|see) (\d+\.\d+)|(\d+\.\d+) does not hold")
_RUN = re.compile(r"it hung in (\w+@\d+)|(\w+@\d+) broke")


def consequences(judgements: Mapping[str, Judgement]) -> dict[str, list[str]]:
    """Return by failed rule the rules that were not run for it, directly or through others.

    A rule that was not run for another reason follows from none.
    """
    followers: dict[str, list[str]] = {
        number: [] for number, judgement in judgements.items() if judgement.verdict >= Verdict.FAIL
    }
    for number, judgement in judgements.items():
        if judgement.verdict is Verdict.NOT_RUN:
            origin = _origin(number, judgements, frozenset())
            if origin is not None:
                followers[origin].append(number)
    return followers


def left_out_causes(
    judgements: Mapping[str, Judgement], selected: Collection[str], blamed: Mapping[str, str]
) -> dict[str, str]:
    """Return the findings of rules that were left out, and that selected ones were not run for.

    Args:
        judgements: all judgements, also those on rules that only selected ones build on.
        selected: the numbers of the selected rules.
        blamed: the rules that broken runs are blamed on, with their findings.
    """
    not_run = [n for n in selected if n in judgements and judgements[n].verdict is Verdict.NOT_RUN]
    found = {}
    for number, followers in consequences(judgements).items():
        if number not in selected and not set(not_run).isdisjoint(followers):
            judgement = judgements[number]
            found[number] = judgement.failures[0].actual if judgement.failures else judgement.reason
    if not_run and not found:
        found = {number: line for number, line in blamed.items() if number not in judgements}
    return found


def _origin(number: str, judgements: Mapping[str, Judgement], seen: frozenset[str]) -> str | None:
    """Return the failed rule that a rule was not run for."""
    judgement = judgements.get(number)
    if judgement is None or number in seen:
        return None
    if judgement.verdict >= Verdict.FAIL:
        return number
    if judgement.verdict is not Verdict.NOT_RUN:
        return None
    for named in _named(judgement.reason, judgements):
        origin = _origin(named, judgements, seen | {number})
        if origin is not None:
            return origin
    return None


def _named(reason: str, judgements: Mapping[str, Judgement]) -> list[str]:
    """Return the rules that a reason names, or that failed in a run that it names."""
    numbers = [one or other for one, other in _RULE.findall(reason)]
    for pair in _RUN.findall(reason):
        run = pair[0] or pair[1]
        for number, judgement in judgements.items():
            entry = judgement.runs.get(run)
            if judgement.verdict >= Verdict.FAIL and entry and entry["verdict"] != "pass":
                numbers.append(number)
    return numbers

"""The parts that the texts of a session share: findings, reasons, and the evidence of ranks."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.certificates.certificate import limits
from conformance.judging.rule import MUST, Rule
from conformance.judging.run_failures import BEFORE_ITS_CALLS
from conformance.judging.verdict import Judgement, Verdict
from conformance.session.session import Session

LABELS = {
    "certified": "CERTIFIED",
    "refused": "REFUSED",
    "kit error": "KIT ERROR",
    "not certified": "NOT JUDGED IN FULL",
}
_LEFT_OUT = "a collective that only some ranks issue"
_BROKEN_RUN = (
    f"the place where the stacks of the ranks end; {_LEFT_OUT}; a future that is never completed"
)
_SET_UP = (
    "the end of the traceback; the arguments that the kit passes to a set-up function or to the "
    "factory of a state (docs/your-hook.md), and the use that the function makes of them on each "
    "rank"
)
# The line on an error that the subject raised, as run_failures writes it.
_RAISED = re.compile(r"(rank \d+) raised ")
_TRACEBACK = "the last line of the traceback that is in your file"
# The runs at the start of a reason, as the engine writes them.
_RUNS = re.compile(r"^\w+@\d+(?: and \w+@\d+)*(?: and \d+ more)?: ")


@dataclass(frozen=True)
class RankGroup:
    """Ranks that left the same evidence.

    Attributes:
        ranks: their names.
        end: how they ended.
        pieces: by name, the pieces of evidence.
    """

    ranks: str
    end: str
    pieces: Mapping[str, str]


def is_failed(judgement: Judgement) -> bool:
    """Whether a rule fails, or could not be judged because of the kit."""
    return judgement.verdict >= Verdict.FAIL


def advice_of(session: Session) -> list[Judgement]:
    """Return the judgements on SHOULD rules that do not hold."""
    return [
        judgement
        for judgement in session.judgements.values()
        if judgement.verdict is Verdict.FAIL and session.rules[judgement.number].level != MUST
    ]


def limits_by_reason(session: Session) -> dict[str, list[str]]:
    """Return the numbers of the rules that are limits of the subject, by reason."""
    return _by_reason(
        judgement
        for number, judgement in session.judgements.items()
        if limits(session.rules, {number: judgement})
    )


def not_run_by_reason(session: Session) -> dict[str, list[str]]:
    """Return the numbers of the rules that were not run, by reason."""
    return _by_reason(
        judgement
        for judgement in session.judgements.values()
        if judgement.verdict is Verdict.NOT_RUN
    )


def _by_reason(judgements: Iterable[Judgement]) -> dict[str, list[str]]:
    """Return the numbers of rules by reason.

    Reasons that differ only in the names of runs are equal; a reason of one rule keeps its run.
    """
    groups: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        groups.setdefault(_RUNS.sub("", judgement.reason), []).append(judgement)
    return {
        group[0].reason if len(group) == 1 else reason: [judgement.number for judgement in group]
        for reason, group in groups.items()
    }


def failed_run_name(judgement: Judgement) -> str:
    """Return the name of the first run with the judgement's verdict, or an empty name."""
    verdict = str(judgement.verdict)
    return next((name for name, run in judgement.runs.items() if run["verdict"] == verdict), "")


_OF_THE_KIT = (
    "the kit and this machine: the subject was not judged by this rule. Report the kit error to "
    "the maintainers of the kit, with report.json"
)


def remedy_of(rule: Rule, judgement: Judgement) -> str:
    """Return the advice on a failed rule.

    An error has a traceback, which says more than any rule. A run that broke in another way has
    stacks and collectives to look at first: the rule's own advice is about wrong results, unless
    broken runs are its subject.
    """
    is_about_broken_runs = bool(rule.blamed_for) or _LEFT_OUT in rule.remedy
    first = next(iter(judgement.failures), None)
    if judgement.verdict is Verdict.KIT_ERROR:
        return _OF_THE_KIT
    if first and BEFORE_ITS_CALLS in first.actual:
        return _SET_UP if is_about_broken_runs else f"{_SET_UP}; then {rule.remedy}"
    raised = _RAISED.match(first.actual) if first else None
    if first and raised and first.evidence.get(raised[1], {}).get("traceback"):
        return _TRACEBACK if is_about_broken_runs else f"{_TRACEBACK}; then {rule.remedy}"
    if first and first.evidence and not is_about_broken_runs:
        return f"{_BROKEN_RUN}; then {rule.remedy}"
    return rule.remedy


def finding_rows(rule: Rule, judgement: Judgement) -> dict[str, str]:
    """Return the findings on a failed rule by label."""
    rows = {"Requirement": rule.requirement}
    for failure in judgement.failures[:1]:
        rows["Expected"] = failure.expected
        rows["Actual"] = failure.actual
        if failure.cause:
            rows["Likely cause"] = failure.cause
    if judgement.verdict is Verdict.KIT_ERROR:
        rows["Kit error"] = judgement.reason
    return rows


def rank_groups(evidence: Mapping[str, Any], shorten: Callable[[str, str], str]) -> list[RankGroup]:
    """Return the evidence by rank; ranks with the same evidence form one group.

    Args:
        evidence: by rank, the evidence of a failed run.
        shorten: returns the shown part of a piece, given its name and text.
    """
    ranks_by_content: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for rank, kept in evidence.items():
        end = "killed by the kit" if kept.get("killed by the kit") else f"exit {kept['exit']}"
        pieces = []
        for name in ("traceback", "stacks", "output", "last collectives"):
            piece = kept.get(name)
            if piece:
                text = piece if isinstance(piece, str) else "\n".join(piece)
                pieces.append((name, shorten(name, text)))
        ranks_by_content.setdefault((end, tuple(pieces)), []).append(rank)
    groups = []
    # Ranks may share one piece of their evidence and differ in another.
    first_ranks: dict[tuple[str, str], list[str]] = {}
    for (end, content), ranks in ranks_by_content.items():
        shown = {}
        for name, text in content:
            first = first_ranks.setdefault((name, text), ranks)
            shown[name] = text if first is ranks else f"the same as on {_rank_names(first)}"
        groups.append(RankGroup(_rank_names(ranks), end, shown))
    return groups


def _rank_names(ranks: Sequence[str]) -> str:
    """Return "ranks 0, 1 and 2" for "rank 0", "rank 1", "rank 2"."""
    if len(ranks) == 1:
        return ranks[0]
    numbers = [rank.removeprefix("rank ") for rank in ranks]
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"

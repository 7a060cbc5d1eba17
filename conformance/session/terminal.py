"""The texts in the terminal: a failed rule, and the closing lines of a session.

The closing lines fit a screen, whatever the verdict: the first cause comes first, with its remedy
and its command, and other findings are one line each or a count. ``report.html`` has all of them.
"""

from collections.abc import Mapping
from typing import Any

from conformance.certificates.certificate import (
    NOT_TRIED,
    Conclusion,
    at_scale,
    coverage_line,
    uncovered_lines,
)
from conformance.judging.rule import MUST, SHOULD, Rule
from conformance.judging.verdict import Judgement, Verdict
from conformance.session.claim_search import EXACT, equivalent_claims
from conformance.session.consequences import consequences
from conformance.session.report_parts import (
    LABELS,
    advice_of,
    failed_run_name,
    finding_rows,
    is_failed,
    limits_by_reason,
    not_run_by_reason,
    rank_groups,
    remedy_of,
)
from conformance.session.session import Session
from conformance.subjects.claims import WITHOUT_CLAIMS
from conformance.subjects.kinds import HOOK, KINDS

# Of each piece of evidence the terminal shows so many lines; report.json holds all of them.
_SHOWN_LINES = 8
_SHOWN_FRAMES = 9
# Of rules that were not run the terminal shows so many lines, and so many numbers in a line.
_NOT_RUN_LINES = 3
_SHOWN_NUMBERS = 8
# Lines of the closing summary, by subject.
_SHOWN_FAILURES = 6
_SHOWN_ADVICE = 3
_SHOWN_LIMITS = 3
_SHOWN_REASONS = 8
_SHOWN_UNCOVERED = 3
# Characters of a line in the closing summary: two or three rows of a terminal.
_LONGEST = 240


def failure_text(session: Session, rule: Rule, judgement: Judgement) -> str:
    """Return the text of a failed rule: requirement, expected, actual, cause, remedy, command."""
    run = failed_run_name(judgement)
    rows = finding_rows(rule, judgement)
    lines = [f"{rule.number} {rule.title}" + (f"  [{run}]" if run else "")]
    lines += [_row_line(label, text) for label, text in rows.items() if label != "Kit error"]
    for failure in judgement.failures[:1]:
        lines += _evidence_lines(failure.evidence)
    if "Kit error" in rows:
        lines.append(_row_line("Kit error", rows["Kit error"]))
    return "\n".join([*lines, *_remedy_lines(session, rule, judgement)])


def short_failure_text(session: Session, rule: Rule, judgement: Judgement) -> str:
    """Return the text of a rule that fails after another one: its finding and its command."""
    rows = finding_rows(rule, judgement)
    lines = [_row_line(label, rows[label]) for label in ("Actual", "Likely cause") if label in rows]
    lines.append(_row_line("Rerun", session.rerun(rule.number)))
    return "\n".join([*lines, "  The rest is in report.html; pytest -v shows it here, too."])


def _remedy_lines(session: Session, rule: Rule, judgement: Judgement) -> list[str]:
    """Return the lines on a failed rule that tell people how to go on."""
    first, *others = remedy_of(rule, judgement).split("; ")
    lines = [
        _row_line("Look at", first),
        *(f"{'':16}{other}" for other in others),
        _row_line("Rerun", session.rerun(rule.number)),
    ]
    if script := session.reproducer(rule.number):
        lines.append(_row_line("Reproduce", script.command))
    return lines


def conclusion_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the closing lines of a session in the terminal."""
    return [*_letter_lines(session), *_closing_lines(session, conclusion)]


def conclusion_text(session: Session, conclusion: Conclusion) -> str:
    """Return the report as text: the first failures, then the closing lines."""
    failed = [
        judgement
        for judgement in session.judgements.values()
        if is_failed(judgement) and session.rules[judgement.number].level == MUST
    ]
    texts = [
        failure_text(session, session.rules[judgement.number], judgement)
        for judgement in failed[:1]
    ]
    texts += [
        f"{judgement.number} {session.rules[judgement.number].title}\n"
        + short_failure_text(session, session.rules[judgement.number], judgement)
        for judgement in failed[1:_SHOWN_FAILURES]
    ]
    return "\n\n".join([*texts, "\n".join(_closing_lines(session, conclusion))])


def _closing_lines(session: Session, conclusion: Conclusion) -> list[str]:
    details = [
        *_advice_lines(session),
        *_not_run_lines(session, conclusion),
        *_limit_lines(session),
        *_scale_lines(session),
        *_coverage_lines(session, conclusion),
        *session.notes,
    ]
    claims = session.header["claims"]["text"]
    verdict = f"{LABELS[conclusion.verdict]}  {session.display_name}"
    if not claims.startswith(WITHOUT_CLAIMS):
        verdict += f"  as {claims}"
    if conclusion.certificate:
        return [*details, verdict, *certificate_lines(session)]
    lines = [verdict]
    if conclusion.verdict == "not certified":
        lines.append("nothing failed, and there is no certificate:")
    lines += _cause_lines(session, conclusion)
    lines += proposal_lines(session, conclusion)
    return [*lines, *details]


def _cause_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the reasons against a certificate, the first failed rule with its remedy."""
    failed = [
        number
        for number, judgement in session.judgements.items()
        if is_failed(judgement) and session.rules[number].level == MUST
    ]
    others = [
        reason
        for reason in conclusion.reasons
        if reason.partition(" ")[0].removesuffix(":") not in failed
    ]
    lines = []
    if failed:
        lines += _first_cause_lines(session, failed)
        lines += _other_failure_lines(session, failed[1:])
    lines += [_cut(f"  {reason}") for reason in others[:_SHOWN_REASONS]]
    if len(others) > _SHOWN_REASONS:
        lines.append(f"  and {len(others) - _SHOWN_REASONS} more reasons, see report.html")
    return [*lines, *_left_out_cause_lines(session)]


def _left_out_cause_lines(session: Session) -> list[str]:
    """Return the failed rules that nobody selected, and that selected ones were not run for."""
    lines = []
    for number, finding in session.left_out_causes().items():
        lines.append(_cut(f"  {number} {session.rules[number].title}, fails: {finding}"))
        lines.append(f"  {_row_line('Rerun', session.rerun(number))}")
    return lines


def _first_cause_lines(session: Session, failed: list[str]) -> list[str]:
    number = failed[0]
    rule = session.rules[number]
    judgement = session.judgements[number]
    rows = finding_rows(rule, judgement)
    del rows["Requirement"]
    run = failed_run_name(judgement)
    lines = [f"  {number} {rule.title}" + (f"  [{run}]" if run else "")]
    lines += [_cut(f"  {_row_line(label, text)}") for label, text in rows.items()]
    # A command is to be copied, and therefore never cut.
    lines += [f"  {line}" for line in _remedy_lines(session, rule, judgement)]
    if followers := consequences(session.judgements)[number]:
        lines.append(f"    {_not_run_because_of_it(followers)}: {_numbers(followers)}")
    return lines


def _not_run_because_of_it(followers: list[str]) -> str:
    were = "rule was" if len(followers) == 1 else "rules were"
    return f"{len(followers)} more {were} not run because this one fails"


def _other_failure_lines(session: Session, numbers: list[str]) -> list[str]:
    followers = consequences(session.judgements)
    lines = []
    for number in numbers[:_SHOWN_FAILURES]:
        judgement = session.judgements[number]
        finding = judgement.failures[0].actual if judgement.failures else judgement.reason
        lines.append(_cut(f"  {number} {session.rules[number].title}: {finding}"))
        if followers[number]:
            lines.append(f"    {_not_run_because_of_it(followers[number])}")
    if hidden := numbers[_SHOWN_FAILURES:]:
        lines.append(
            f"  and {len(hidden)} more rules that fail: {_numbers(hidden)}; see report.html"
        )
    return lines


def _advice_lines(session: Session) -> list[str]:
    """Return the SHOULD rules that do not hold."""
    advice = advice_of(session)
    lines = [
        _cut(f"advice  {one.number} {session.rules[one.number].title}: {one.reason}")
        for one in advice[:_SHOWN_ADVICE]
    ]
    if hidden := [one.number for one in advice[_SHOWN_ADVICE:]]:
        lines.append(
            f"advice  and {len(hidden)} more rules: {_numbers(hidden)}; report.html says why"
        )
    return lines


def _scale_lines(session: Session) -> list[str]:
    notes = at_scale(session.rules, session.judgements)
    return [f"at scale, simulated: {line}" for line in notes]


def _coverage_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the coverage of the subject's own code, cut to the size of a terminal."""
    coverage = session.header.get("coverage")
    # A refused subject was not run to its end: most of its branches are missing for that reason.
    was_run = conclusion.verdict in ("certified", "not certified")
    if coverage is None or not (was_run or coverage["required"]):
        return []
    uncovered = uncovered_lines(coverage)
    lines = [f"coverage  {coverage_line(coverage)}"]
    lines += [f"          {line}" for line in uncovered[:_SHOWN_UNCOVERED]]
    if len(uncovered) > _SHOWN_UNCOVERED:
        hidden = len(uncovered) - _SHOWN_UNCOVERED
        lines.append(f"          and {hidden} more, see report.html")
    if probed := coverage.get("probes"):
        untaken = {(one["file"], one["line"]) for one in coverage["untaken"]}
        missed = [one for one in probed if (one["file"], one["line"]) in untaken]
        reached = [one for one in probed if one not in missed]
        if reached:
            values = ", ".join(str(one["value"]) for one in reached)
            lines.append(f"          runs were made for these values in the code: {values}")
        if missed:
            places = ", ".join(f"{one['value']} ({one['file']}:{one['line']})" for one in missed)
            lines.append(f"          runs were made for {places}, but none took the branch there")
    if missed := coverage.get("out_of_reach"):
        places = ", ".join(f"{one['value']} ({one['file']}:{one['line']})" for one in missed)
        lines.append(f"          no run was made for {places}: {NOT_TRIED}")
    return lines


def _letter_lines(session: Session) -> list[str]:
    """Return the meaning of pytest's letters for verdicts, as far as they occur."""
    verdicts = {judgement.verdict for judgement in session.judgements.values()}
    meanings = []
    if Verdict.NOT_APPLICABLE in verdicts:
        meanings.append("n not applicable")
    if Verdict.NOT_RUN in verdicts:
        meanings.append("- not run")
    if advice_of(session):
        meanings.append("a advice (a SHOULD rule does not hold)")
    if Verdict.KIT_ERROR in verdicts:
        meanings.append("K kit error")
    return [f"letters: {', '.join(meanings)}"] if meanings else []


def _limit_lines(session: Session) -> list[str]:
    """Return the limits, one line for each reason.

    A reason that repeats the claims names them as "its claims": the verdict has them in full.
    """
    claims = session.header["claims"]["text"]
    groups = limits_by_reason(session)
    lines = []
    for reason, numbers in list(groups.items())[:_SHOWN_LIMITS]:
        name = _numbers(numbers)
        if len(numbers) == 1:
            name += f" {session.rules[numbers[0]].title}"
        short = reason.replace(f"because the subject claims {claims}", "because of its claims")
        lines.append(_cut(f"limit   {name}: {short}"))
    if hidden := [one for group in list(groups.values())[_SHOWN_LIMITS:] for one in group]:
        lines.append(
            f"limit   and {len(hidden)} more rules: {_numbers(hidden)}; report.html says why"
        )
    return lines


def _not_run_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the rules that were not run, by reason, the most frequent reasons first."""
    groups = dict(not_run_by_reason(session))
    if conclusion.verdict in ("refused", "kit error"):
        # They are counted below the rule that they follow from.
        following = {one for group in consequences(session.judgements).values() for one in group}
        groups = {
            reason: [number for number in numbers if number not in following]
            for reason, numbers in groups.items()
        }
    if conclusion.verdict == "not certified":
        # The reasons of the conclusion name the MUST rules.
        levels = {number: session.rules[number].level for number in session.judgements}
        groups = {
            reason: [number for number in numbers if levels[number] == SHOULD]
            for reason, numbers in groups.items()
        }
    ranked = sorted(filter(lambda group: group[1], groups.items()), key=lambda g: -len(g[1]))
    shown = ranked
    if len(ranked) > _NOT_RUN_LINES:
        shown = ranked[: _NOT_RUN_LINES - 1]
    lines = []
    for reason, numbers in shown:
        if len(numbers) == 1:
            title = session.rules[numbers[0]].title
            lines.append(_cut(f"not run  {numbers[0]} {title}: {reason}"))
            continue
        lines.append(_cut(f"not run  {len(numbers)} rules: {_numbers(numbers)}: {reason}"))
    hidden = ranked[len(shown) :]
    if hidden:
        count = sum(len(numbers) for _, numbers in hidden)
        lines.append(
            f"not run  {count} more rules, for {len(hidden)} other reasons, which report.html gives"
        )
    return lines


def proposal_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the claims as which a refused subject would hold the rules of equivalence."""
    if conclusion.verdict != "refused" or not session.engine:
        return []
    others = equivalent_claims(session.engine)
    if not others and _may_compress(session):
        return [
            "a hook that compresses has to claim it: --claims auto tries the claims, and proposes "
            "one that holds"
        ]
    if not others:
        return []
    proposals = ", or with ".join(f'--claims "{claims}"' for claims in others)
    return [
        f"the hook would pass {', '.join(EXACT)} with {proposals}: if it promises no more than "
        "that, run again with that claim"
    ]


def _may_compress(session: Session) -> bool:
    """Whether a hook that nobody made a claim for gives something other than the mean."""
    judgement = session.judgements.get("2.1")
    unclaimed = session.header["claims"]["declared_by"] == KINDS[HOOK].default_reason
    return unclaimed and judgement is not None and judgement.verdict is Verdict.FAIL


def certificate_lines(session: Session) -> list[str]:
    """Return the lines below CERTIFIED: the extent of the run, and the path of the certificate."""
    profile = session.header["profile"]
    extent = session.profile.where
    if profile["name"].endswith("-serialised"):
        extent += ", one collective at a time"
    nodes = len(profile.get("nodes", ()))
    if nodes:
        extent += f", on {nodes} node{'s' if nodes > 1 else ''}"
    extent += f", world sizes {', '.join(map(str, session.worlds))}"
    if steps := session.header.get("steps"):
        extent += f", a run of {steps} steps"
    checks = sum(judgement.checks for judgement in session.judgements.values())
    return [
        f"           {len(session.judgements)} rules, {checks} checks; {extent}, "
        f"torch {profile['torch']}, seed {session.request.seed}",
        f"           {session.certificate_path}",
    ]


def _row_line(label: str, text: str) -> str:
    return f"  {label + ':':<14}{text}"


def _evidence_lines(evidence: Mapping[str, Any]) -> list[str]:
    """Return the evidence of a failed run, cut to the size of a terminal."""
    lines = []
    for group in rank_groups(evidence, _terminal_text):
        lines.append(f"  {group.ranks}: {group.end}")
        for name, text in group.pieces.items():
            lines.append(f"    {name}:")
            lines += [f"      {line}" for line in text.splitlines()]
    return lines


def _terminal_text(name: str, text: str) -> str:
    """Return the part of a piece of evidence that the terminal shows."""
    if name == "last collectives":
        return text
    if name == "stacks":
        return "\n".join(_main_stack(text))
    return "\n".join(text.strip().splitlines()[-_SHOWN_LINES:])


def _main_stack(text: str) -> list[str]:
    """Return the stack of the main thread, innermost frames first, without the host's frames."""
    blocks = text.strip().split("\n\n")
    block = next((block for block in reversed(blocks) if "rank.py" in block), blocks[-1])
    return block.splitlines()[:_SHOWN_FRAMES]


def _numbers(numbers: list[str]) -> str:
    """Return a list of rules, cut to the size of a line."""
    listed = ", ".join(numbers[:_SHOWN_NUMBERS])
    return f"{listed}, ..." if len(numbers) > _SHOWN_NUMBERS else listed


def _cut(line: str) -> str:
    """Return a line in one row or a few rows of a terminal."""
    flat = " ".join(line.split("\n"))
    return flat if len(flat) <= _LONGEST else f"{flat[: _LONGEST - 4]} ..."

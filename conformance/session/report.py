"""The texts for people: a failed rule, the summary in the terminal, report.json and report.html."""

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, PackageLoader

from conformance.certificates.certificate import Conclusion, at_scale, limits, summary
from conformance.judging.rule import MUST, SECTIONS, SHOULD, Rule
from conformance.judging.verdict import Judgement, Verdict
from conformance.records.files import write_json
from conformance.session.claim_search import equivalent_claims
from conformance.session.session import Session

# Of each piece of evidence the terminal shows so many lines; report.json holds all of them.
_SHOWN_LINES = 8
_SHOWN_FRAMES = 9
_KEPT_FAILURES = 20
# Of rules that were not run the terminal shows so many lines, and so many numbers in a line.
_NOT_RUN_LINES = 3
_NOT_RUN_NUMBERS = 8
# Characters of report.html, which stays below 3 MB with 100 failures.
_EVIDENCE_SIZE = 1_600_000
_FAILURE_SIZE = 100_000
_TEXT_SIZE = 2000
_SHORT_TEXT_SIZE = 400
_SHOWN_RANKS = 16
_OTHER_FAILURES = 4
_SHOWN_REASONS = 5

_LABELS = {
    "certified": "CERTIFIED",
    "refused": "REFUSED",
    "kit error": "KIT ERROR",
    "not certified": "NOT CERTIFIED",
}
# The runs at the start of a reason, as the engine writes them.
_RUNS = re.compile(r"^\w+@\d+(?: and \w+@\d+)*(?: and \d+ more)?: ")


@dataclass(frozen=True)
class _RankGroup:
    """Ranks that left the same evidence.

    Attributes:
        ranks: their names.
        end: how they ended.
        pieces: by name, the pieces of evidence.
    """

    ranks: str
    end: str
    pieces: Mapping[str, str]


# --- the terminal ---------------------------------------------------------------------------------


def failure_text(session: Session, rule: Rule, judgement: Judgement) -> str:
    """Return the text of a failed rule: requirement, expected, actual, cause, remedy, command."""
    run = _failed_run(judgement)
    rows = _finding_rows(rule, judgement)
    lines = [f"{rule.number} {rule.title}" + (f"  [{run}]" if run else "")]
    lines += [_row_line(label, text) for label, text in rows.items() if label != "Kit error"]
    for failure in judgement.failures[:1]:
        lines += _evidence_lines(failure.evidence)
    if "Kit error" in rows:
        lines.append(_row_line("Kit error", rows["Kit error"]))
    lines.append(_row_line("Look at", rule.remedy))
    lines.append(_row_line("Rerun", session.rerun(rule.number)))
    return "\n".join(lines)


def conclusion_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the closing lines of a session in the terminal."""
    return [*_letter_lines(session), *_closing_lines(session, conclusion)]


def conclusion_text(session: Session, conclusion: Conclusion) -> str:
    """Return the whole report as text: every failure, then the closing lines."""
    failures = [
        failure_text(session, session.rules[judgement.number], judgement)
        for judgement in session.judgements.values()
        if _is_failed(judgement) and session.rules[judgement.number].level == MUST
    ]
    return "\n\n".join([*failures, "\n".join(_closing_lines(session, conclusion))])


def _closing_lines(session: Session, conclusion: Conclusion) -> list[str]:
    rules = session.rules
    lines = [
        f"advice  {judgement.number} {rules[judgement.number].title}: {judgement.reason}"
        for judgement in _advice(session)
    ]
    lines += _not_run_lines(session, conclusion)
    lines += _limit_lines(session)
    lines += [f"at scale, simulated: {line}" for line in at_scale(rules, session.judgements)]
    lines += session.notes
    claims = session.header["claims"]["text"]
    lines.append(f"{_LABELS[conclusion.verdict]}  {session.subject.name}  as {claims}")
    if conclusion.certificate:
        return [*lines, *_certificate_lines(session)]
    if conclusion.verdict == "not certified":
        lines.append("development run: no certificate")
    lines += [f"  {reason}" for reason in conclusion.reasons]
    return [*lines, *_proposal_lines(session, conclusion)]


def _letter_lines(session: Session) -> list[str]:
    """Return the meaning of pytest's letters for verdicts, as far as they occur."""
    verdicts = {judgement.verdict for judgement in session.judgements.values()}
    meanings = []
    if Verdict.NOT_APPLICABLE in verdicts:
        meanings.append("n not applicable")
    if Verdict.NOT_RUN in verdicts:
        meanings.append("- not run")
    if _advice(session):
        meanings.append("a advice (a SHOULD rule does not hold)")
    if Verdict.KIT_ERROR in verdicts:
        meanings.append("K kit error")
    return [f"letters: {', '.join(meanings)}"] if meanings else []


def _limit_lines(session: Session) -> list[str]:
    """Return the limits, one line for each reason."""
    lines = []
    for reason, numbers in _limits(session).items():
        name = ", ".join(numbers)
        if len(numbers) == 1:
            name += f" {session.rules[numbers[0]].title}"
        lines.append(f"limit   {name}: {reason}")
    return lines


def _not_run_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the rules that were not run, by reason, the most frequent reasons first."""
    groups = dict(_not_run(session))
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
            lines.append(f"not run  {numbers[0]} {title}: {reason}")
            continue
        listed = ", ".join(numbers[:_NOT_RUN_NUMBERS])
        if len(numbers) > _NOT_RUN_NUMBERS:
            listed += ", ..."
        lines.append(f"not run  {len(numbers)} rules: {reason}: {listed}")
    hidden = ranked[len(shown) :]
    if hidden:
        count = sum(len(numbers) for _, numbers in hidden)
        lines.append(f"not run  {count} more rules, for {len(hidden)} other reasons")
    return lines


def _proposal_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the claims as which a refused subject would hold the rules of equivalence."""
    if conclusion.verdict != "refused" or not session.engine:
        return []
    others = equivalent_claims(session.engine)
    if not others:
        return []
    proposals = ", or as ".join(f'--claims "{claims}"' for claims in others)
    return [f"it would hold the rules of equivalence as {proposals}"]


def _certificate_lines(session: Session) -> list[str]:
    """Return the lines below CERTIFIED: the extent of the run, and the path of the certificate."""
    profile = session.header["profile"]
    extent = session.profile.where
    if profile["name"].endswith("-serialised"):
        extent += ", one collective at a time"
    nodes = len(profile.get("nodes", ()))
    if nodes:
        extent += f", on {nodes} node{'s' if nodes > 1 else ''}"
    checks = sum(judgement.checks for judgement in session.judgements.values())
    sizes = ", ".join(map(str, session.worlds))
    return [
        f"           {len(session.judgements)} rules, {checks} checks; {extent}, world sizes "
        f"{sizes}, "
        f"torch {profile['torch']}",
        f"           {session.certificate_path}",
    ]


def _row_line(label: str, text: str) -> str:
    return f"  {label + ':':<14}{text}"


def _evidence_lines(evidence: Mapping[str, Any]) -> list[str]:
    """Return the evidence of a failed run, cut to the size of a terminal."""
    lines = []
    for group in _rank_groups(evidence, _terminal_text):
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


# --- the parts of a report ------------------------------------------------------------------------


def _is_failed(judgement: Judgement) -> bool:
    return judgement.verdict >= Verdict.FAIL


def _advice(session: Session) -> list[Judgement]:
    """Return the judgements on SHOULD rules that do not hold."""
    return [
        judgement
        for judgement in session.judgements.values()
        if judgement.verdict is Verdict.FAIL and session.rules[judgement.number].level != MUST
    ]


def _limits(session: Session) -> dict[str, list[str]]:
    """Return the numbers of the rules that are limits of the subject, by reason."""
    return _by_reason(
        judgement
        for number, judgement in session.judgements.items()
        if limits(session.rules, {number: judgement})
    )


def _not_run(session: Session) -> dict[str, list[str]]:
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


def _failed_run(judgement: Judgement) -> str:
    """Return the name of the first run with the judgement's verdict, or an empty name."""
    verdict = str(judgement.verdict)
    return next((name for name, run in judgement.runs.items() if run["verdict"] == verdict), "")


def _finding_rows(rule: Rule, judgement: Judgement) -> dict[str, str]:
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


def _rank_groups(
    evidence: Mapping[str, Any], shorten: Callable[[str, str], str]
) -> list[_RankGroup]:
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
        groups.append(_RankGroup(_rank_names(ranks), end, shown))
    return groups


def _rank_names(ranks: Sequence[str]) -> str:
    """Return "ranks 0, 1 and 2" for "rank 0", "rank 1", "rank 2"."""
    if len(ranks) == 1:
        return ranks[0]
    numbers = [rank.removeprefix("rank ") for rank in ranks]
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


# --- the files ------------------------------------------------------------------------------------


def write_report(session: Session, conclusion: Conclusion) -> None:
    """Write report.json, with the whole evidence, and report.html beside it.

    Raises:
        KitError: the folder cannot be written.
    """
    session.folder.mkdir(parents=True, exist_ok=True)
    report = {
        **session.header,
        "verdict": conclusion.verdict,
        "reasons": conclusion.reasons,
        "rules": [_rule_entry(session, judgement) for judgement in session.judgements.values()],
    }
    write_json(session.request.paths.report, report)
    page = _page(session, conclusion, report)
    # A text of a subject may hold half a surrogate pair, which UTF-8 cannot encode.
    session.request.paths.report.with_suffix(".html").write_text(
        page, encoding="utf-8", errors="backslashreplace"
    )


def _rule_entry(session: Session, judgement: Judgement) -> dict[str, Any]:
    """Return a rule's entry in report.json."""
    rule = session.rules[judgement.number]
    entry = {
        **summary(rule, judgement),
        "requirement": rule.requirement,
        "failures": [vars(failure) for failure in judgement.failures[:_KEPT_FAILURES]],
    }
    if _is_failed(judgement):
        entry["remedy"] = rule.remedy
        entry["rerun"] = session.rerun(rule.number)
    return entry


def _page(session: Session, conclusion: Conclusion, report: Mapping[str, Any]) -> str:
    """Return report.html."""
    advice = _advice(session)
    failed = [
        judgement
        for judgement in session.judgements.values()
        if _is_failed(judgement) and judgement not in advice
    ]
    size = min(_FAILURE_SIZE, _EVIDENCE_SIZE // max(1, len(failed) + len(advice)))
    environment = Environment(
        loader=PackageLoader("conformance", "session"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cut"] = _cut
    return environment.get_template("report.html.jinja").render(
        name=session.subject.name,
        label=_LABELS[conclusion.verdict],
        report=report,
        reasons=[_linked_reason(session, reason) for reason in conclusion.reasons[:_SHOWN_REASONS]],
        hidden_reasons=len(conclusion.reasons[_SHOWN_REASONS:]),
        proposals=_proposal_lines(session, conclusion),
        extent=_certificate_lines(session) if conclusion.certificate else [],
        checks=sum(judgement.checks for judgement in session.judgements.values()),
        failures=[_shown_failure(session, judgement, size) for judgement in failed],
        advice=[_shown_failure(session, judgement, size) for judgement in advice],
        limits=_limits(session),
        not_run=_not_run(session),
        at_scale=at_scale(session.rules, session.judgements),
        notes=session.notes,
        sections=_shown_sections(session, report["rules"]),
        short=_SHORT_TEXT_SIZE,
        long=_TEXT_SIZE,
    )


def _linked_reason(session: Session, reason: str) -> dict[str, str]:
    """Return a reason of the conclusion, with the rule that it begins with and its finding."""
    number = reason.partition(" ")[0].removesuffix(":")
    judgement = session.judgements.get(number)
    if judgement is None or not _is_failed(judgement):
        return {"text": reason}
    finding = judgement.failures[0].actual if judgement.failures else ""
    return {"number": number, "text": reason.removeprefix(number), "finding": finding}


def _shown_failure(session: Session, judgement: Judgement, size: int) -> dict[str, Any]:
    """Return a failed rule as report.html shows it.

    Args:
        session: the session.
        judgement: the judgement on the rule.
        size: the number of characters for the evidence.
    """
    rule = session.rules[judgement.number]
    evidence = judgement.failures[0].evidence if judgement.failures else {}
    groups = _rank_groups(evidence, lambda name, text: text)
    shown = groups[:_SHOWN_RANKS]
    share = size // max(1, sum(len(group.pieces) for group in shown))
    return {
        "number": rule.number,
        "title": rule.title,
        "verdict": str(judgement.verdict),
        "run": _failed_run(judgement),
        "rows": _finding_rows(rule, judgement),
        "remedy": rule.remedy,
        "rerun": session.rerun(rule.number),
        "evidence": [
            replace(group, pieces={name: _cut(text, share) for name, text in group.pieces.items()})
            for group in shown
        ],
        "hidden_evidence": len(groups) - len(shown),
        "others": judgement.failures[1 : 1 + _OTHER_FAILURES],
        "hidden_others": len(judgement.failures[1 + _OTHER_FAILURES :]),
    }


def _shown_sections(session: Session, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the sections of the rule book with their rules and the counts of their verdicts."""
    sections = []
    for number, title in SECTIONS.items():
        rules = [entry for entry in entries if session.rules[entry["rule"]].section == number]
        if rules:
            counts = Counter(entry["verdict"] for entry in rules)
            counted = [
                f"{counts[str(verdict)]} {verdict}" for verdict in Verdict if counts[str(verdict)]
            ]
            sections.append(
                {"title": f"{number} {title}", "counts": ", ".join(counted), "rules": rules}
            )
    return sections


def _cut(text: str, size: int) -> str:
    """Return a text without its middle, if it takes more characters than ``size`` in HTML."""
    escaped = len(html.escape(text))
    if escaped <= size:
        return text
    # Escaping makes a character up to six times as long.
    kept = size * len(text) // escaped
    end = 2 * kept // 3
    start = kept - end
    removed = len(text) - kept
    return (
        f"{text[:start]}\n[... {removed} characters; report.json has them ...]\n"
        f"{text[len(text) - end :]}"
    )

"""The files of a session for people and programs: report.json and report.html."""

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import Environment, PackageLoader

from conformance.certificates.certificate import (
    Conclusion,
    at_scale,
    coverage_line,
    probe_lines,
    summary,
    uncovered_lines,
)
from conformance.judging.rule import SECTIONS
from conformance.judging.verdict import Judgement, Verdict
from conformance.records.files import write_json
from conformance.session.consequences import consequences
from conformance.session.figures import figures
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
from conformance.session.reproducer import write_reproducers
from conformance.session.session import Session
from conformance.session.terminal import certificate_lines, proposal_lines
from conformance.session.timeline import Timeline, timeline

# Failures of a rule in report.json.
_KEPT_FAILURES = 20
# Characters of report.html, which stays below 3 MB with 100 failures.
_EVIDENCE_SIZE = 1_600_000
_FAILURE_SIZE = 100_000
_TEXT_SIZE = 2000
_SHORT_TEXT_SIZE = 400
_SHOWN_RANKS = 16
_OTHER_FAILURES = 4
_SHOWN_REASONS = 5


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
    scripts = [session.reproducer(number) for number in session.judgements]
    write_reproducers(session.folder, filter(None, scripts))
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
    if is_failed(judgement):
        entry["remedy"] = rule.remedy
        entry["rerun"] = session.rerun(rule.number)
        if script := session.reproducer(rule.number):
            entry["reproduce"] = script.command
    return entry


def _page(session: Session, conclusion: Conclusion, report: Mapping[str, Any]) -> str:
    """Return report.html."""
    advice = advice_of(session)
    failed = [
        judgement
        for judgement in session.judgements.values()
        if is_failed(judgement) and judgement not in advice
    ]
    size = min(_FAILURE_SIZE, _EVIDENCE_SIZE // max(1, len(failed) + len(advice)))
    # By run, the rule whose timeline shows it.
    shown_runs: dict[str, str] = {}
    environment = Environment(
        loader=PackageLoader("conformance", "session"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cut"] = _cut
    return environment.get_template("report.html.jinja").render(
        name=session.display_name,
        label=LABELS[conclusion.verdict],
        report=report,
        reasons=[_linked_reason(session, reason) for reason in conclusion.reasons[:_SHOWN_REASONS]],
        hidden_reasons=len(conclusion.reasons[_SHOWN_REASONS:]),
        proposals=proposal_lines(session, conclusion),
        extent=certificate_lines(session) if conclusion.certificate else [],
        checks=sum(judgement.checks for judgement in session.judgements.values()),
        failures=[_shown_failure(session, judgement, size, shown_runs) for judgement in failed],
        advice=[_shown_failure(session, judgement, size, shown_runs) for judgement in advice],
        declared=_declared(session),
        verdicts=_counted(_shown_verdict(session, j) for j in session.judgements.values()),
        figures=figures(session),
        limits=limits_by_reason(session),
        not_run=not_run_by_reason(session),
        at_scale=at_scale(session.rules, session.judgements),
        coverage=_shown_coverage(session),
        notes=session.notes,
        sections=_shown_sections(session, report["rules"]),
        short=_SHORT_TEXT_SIZE,
        long=_TEXT_SIZE,
    )


def _shown_coverage(session: Session) -> dict[str, Any] | None:
    """Return the coverage as report.html shows it, or None if a part of the book was judged."""
    coverage = session.header.get("coverage")
    if coverage is None:
        return None
    return {
        "line": coverage_line(coverage),
        "uncovered": uncovered_lines(coverage),
        "probes": probe_lines(coverage),
        "files": coverage.get("files", []),
        "not_named": coverage.get("not_named"),
    }


def _linked_reason(session: Session, reason: str) -> dict[str, str]:
    """Return a reason of the conclusion, with the rule that it begins with and its finding."""
    number = reason.partition(" ")[0].removesuffix(":")
    judgement = session.judgements.get(number)
    if judgement is None or not is_failed(judgement):
        return {"text": reason}
    finding = judgement.failures[0].actual if judgement.failures else ""
    return {"number": number, "text": reason.removeprefix(number), "finding": finding}


# On the page, the verdict on a SHOULD rule that does not hold: it refuses no certificate.
_ADVICE = "advice"
_SHOWN_VERDICTS = (
    *(str(verdict) for verdict in Verdict if verdict < Verdict.FAIL),
    _ADVICE,
    *(str(verdict) for verdict in Verdict if verdict >= Verdict.FAIL),
)


def _shown_verdict(session: Session, judgement: Judgement) -> str:
    """Return a verdict as report.html names it."""
    return _ADVICE if judgement in advice_of(session) else str(judgement.verdict)


def _counted(verdicts: Iterable[str]) -> dict[str, int]:
    """Return the number of rules by verdict, the best verdict first."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in _SHOWN_VERDICTS if counts[verdict]}


def _declared(session: Session) -> str:
    """Return where the claims come from, in words."""
    origin = session.header["claims"]["declared_by"]
    reason = origin.removeprefix("nobody: ")
    return f"not declared: {reason}" if reason != origin else f"declared by {origin}"


def _shown_failure(
    session: Session, judgement: Judgement, size: int, shown_runs: dict[str, str]
) -> dict[str, Any]:
    """Return a failed rule as report.html shows it.

    Args:
        session: the session.
        judgement: the judgement on the rule.
        size: the number of characters for the evidence.
        shown_runs: by run, the rule that shows its timeline; this rule is entered.
    """
    lanes = _timeline(session, judgement)
    same_as = shown_runs.setdefault(lanes.run, judgement.number) if lanes else ""
    rule = session.rules[judgement.number]
    evidence = judgement.failures[0].evidence if judgement.failures else {}
    script = session.reproducer(rule.number)
    groups = rank_groups(evidence, lambda name, text: text)
    shown = groups[:_SHOWN_RANKS]
    share = size // max(1, sum(len(group.pieces) for group in shown))
    return {
        "number": rule.number,
        "title": rule.title,
        "verdict": _shown_verdict(session, judgement),
        "run": failed_run_name(judgement),
        "rows": finding_rows(rule, judgement),
        "remedy": remedy_of(rule, judgement),
        "rerun": session.rerun(rule.number),
        "reproduce": script.command if script else "",
        "evidence": [
            replace(group, pieces={name: _cut(text, share) for name, text in group.pieces.items()})
            for group in shown
        ],
        "hidden_evidence": len(groups) - len(shown),
        "timeline": lanes,
        "same_timeline": same_as if same_as != judgement.number else "",
        "followers": consequences(session.judgements)[judgement.number],
        "others": judgement.failures[1 : 1 + _OTHER_FAILURES],
        "hidden_others": len(judgement.failures[1 + _OTHER_FAILURES :]),
    }


def _timeline(session: Session, judgement: Judgement) -> Timeline | None:
    """Return the calls of the ranks in the first run that fails a rule."""
    if session.engine is None:
        return None
    runs = {run.name: run for run in session.engine.runs}
    return timeline(judgement, runs, session.engine.maker.explained)


def _shown_sections(session: Session, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the sections of the rule book with their rules and the counts of their verdicts."""
    sections = []
    for number, title in SECTIONS.items():
        rules = [
            {**entry, "verdict": _shown_verdict(session, session.judgements[entry["rule"]])}
            for entry in entries
            if session.rules[entry["rule"]].section == number
        ]
        if rules:
            counts = _counted(rule["verdict"] for rule in rules)
            words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            sections.append({"title": f"{number} {title}", "counts": words, "rules": rules})
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

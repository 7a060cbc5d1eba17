"""The Markdown summaries of sessions and of the gate, for the page of a CI job.

A summary repeats the content of a report or a certificate; nothing is judged again. Foreign text is
literal (``markdown.py``). This module imports no torch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from conformance.certificates.certificate import (
    RuleEntry,
    advice_lines,
    coverage_line,
    limit_lines,
    uncovered_lines,
)
from conformance.certificates.markdown import block, span
from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict

MARGINS = 5  # rows in the table of errors
UNCOVERED = 10  # branches that no run took

_HEADINGS = {"certified": "CERTIFIED", "refused": "REFUSED", "kit error": "KIT ERROR"}


def session_markdown(body: Mapping[str, Any]) -> str:
    """Return the summary of a session, from the body of its report.json or certificate.json."""
    subject = body["subject"]
    profile = body["profile"]
    rules = body["rules"]
    name = subject.get("target") or subject.get("hook") or subject.get("setup")
    verdict = str(body.get("verdict", "certified"))
    sizes = ", ".join(map(str, profile["world_sizes"]))
    checks = sum(rule["checks"] for rule in rules)
    lines = [
        f"### {_HEADINGS.get(verdict, 'NOT JUDGED IN FULL')} {span(name)} "
        f"as {span(body['claims']['text'])}",
        "",
        f"{len(rules)} rules, {checks} checks; profile {span(profile['name'])}, "
        f"world sizes {span(sizes)}, torch {span(profile.get('torch'))}, "
        f"kit {span(body['kit']['version'])}",
        "",
    ]
    if verdict not in _HEADINGS:
        lines += ["Nothing failed, and there is no certificate.", ""]
    if verdict != "refused":
        # The reasons of a refusal are the rules that fail, which follow with their failures.
        lines += _titled_list("Because", body.get("reasons", ()))
    lines += _failures(rules)
    lines += _coverage(body)
    lines += _titled_list("Limits", limit_lines(rules))
    lines += _titled_list("Advice", advice_lines(rules))
    lines += _margin_table(rules)
    lines += _traffic_lines(rules)
    return "\n".join(lines)


def gate_markdown(
    title: str, worse: Sequence[str], notes: Sequence[str], unchecked: Sequence[str] = ()
) -> str:
    """Return the summary of the gate's result for a certificate."""
    lines = [
        f"### Gate: {'refused' if worse else 'holds'}",
        "",
        span(title),
        "",
        *_titled_list("Worse", worse),
        *_titled_list("Different, but no worse", notes),
        *_titled_list("Not checked", unchecked),
    ]
    return "\n".join(lines)


def nothing_markdown(folder: str) -> str:
    """Return the summary of a job that has left no report."""
    return f"### NOT JUDGED\n\nThere is no report in {span(folder)}; the log has the reason.\n"


def _failures(rules: Iterable[RuleEntry]) -> Iterator[str]:
    """Yield a paragraph for each MUST rule that fails."""
    for rule in rules:
        failed = rule["verdict"] in (str(Verdict.FAIL), str(Verdict.KIT_ERROR))
        if failed and rule["level"] == MUST:
            yield f"**{span(rule['rule'])}** {span(rule['title'])}"
            yield ""
            yield block(_failure(rule))
            yield ""


def _failure(rule: RuleEntry) -> str:
    """Return a rule's requirement and its first failure, one line each."""
    entries = {
        "Requirement": rule.get("requirement"),
        "Run": _first_run(rule, rule["verdict"]),
    }
    failures = rule.get("failures", ())
    if failures:
        entries["Expected"] = failures[0].get("expected")
        entries["Actual"] = failures[0].get("actual")
        entries["Likely cause"] = failures[0].get("cause")
    else:
        entries["Reason"] = rule.get("reason")
    return "\n".join(f"{key + ':':<14}{value}" for key, value in entries.items() if value)


def _first_run(rule: RuleEntry, verdict: str) -> str | None:
    """Return the name of the rule's first run with a verdict, or None."""
    for name, run in rule["runs"].items():
        if run.get("verdict") == verdict:
            return str(name)
    return None


def _coverage(body: Mapping[str, Any]) -> list[str]:
    """Return the coverage of the subject's own code; of a refused one it is incomplete."""
    coverage = body.get("coverage")
    if not coverage or body.get("verdict", "certified") != "certified":
        return []
    uncovered = uncovered_lines(coverage)
    lines = [f"Coverage: {span(coverage_line(coverage))}.", ""]
    lines += [f"- {span(line)}" for line in uncovered[:UNCOVERED]]
    if len(uncovered) > UNCOVERED:
        lines.append(f"- and {len(uncovered) - UNCOVERED} more")
    return [*lines, ""] if uncovered else lines


def _titled_list(title: str, lines: Iterable[str]) -> list[str]:
    """Return a list under a title, or nothing if the list is empty."""
    items = [f"- {span(line)}" for line in lines]
    return [f"{title}:", "", *items, ""] if items else []


def _margin_table(rules: Iterable[RuleEntry]) -> list[str]:
    """Return the table of the largest margins, or nothing if there is no margin."""
    margins = sorted(
        (rule for rule in rules if rule.get("margin")),
        key=lambda rule: -float(rule["margin"]),
    )
    if not margins:
        return []
    rows = [
        f"| {span(rule['rule'])} {span(rule['title'])} "
        f"| {span(format(float(rule['margin']), '.2g'))} |"
        for rule in margins[:MARGINS]
    ]
    return ["| largest errors | of their bound |", "|---|---|", *rows, ""]


def _traffic_lines(rules: Iterable[RuleEntry]) -> list[str]:
    """Return a line for each run in which bytes were counted."""
    lines = []
    for rule in rules:
        for run in rule["runs"].values():
            if sent := run.get("traffic"):
                mean = format(float(sent["mean"]), ".3g")
                largest = format(float(sent["largest"]), ".3g")
                lines.append(
                    f"Bytes sent by {span(rule['rule'])}: {span(mean)} of the bytes "
                    f"without compression, {span(largest)} in the step that sends most.\n"
                )
    return lines

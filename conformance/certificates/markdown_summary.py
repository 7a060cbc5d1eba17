"""What a CI job says of a session on its page: Markdown, from a report or a certificate. Imports no torch.

Made of what the files hold: nothing is judged again. All text that is not the kit's own is literal (``markdown.py``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from conformance.certificates.markdown import block, span
from conformance.judging.rule import MUST
from conformance.judging.verdict import INSTEAD, NOT_CLAIMED, Verdict

MARGINS = 5  # rows of the table
_HEADINGS = {"certified": "CERTIFIED", "refused": "REFUSED", "kit error": "KIT ERROR"}


def session_markdown(body: Mapping[str, Any]) -> str:
    """Return the summary of a session, from the body of its report.json or certificate.json."""
    subject, profile, rules = body["subject"], body["profile"], body["rules"]
    name = subject.get("target") or subject.get("hook") or subject.get("setup")
    verdict = str(body.get("verdict", "certified"))
    sizes = ", ".join(map(str, profile["world sizes"]))
    lines = [
        f"### {_HEADINGS.get(verdict, 'NOT CERTIFIED')} {span(name)} as {span(body['claims']['text'])}",
        "",
        f"{len(rules)} rules, {sum(rule['checks'] for rule in rules)} checks; profile {span(profile['name'])}, world sizes {span(sizes)}, "
        f"torch {span(profile.get('torch'))}, kit {span(body['kit']['version'])}",
        "",
    ]
    if verdict not in _HEADINGS:
        lines += ["A development run: no certificate.", ""]
    return "\n".join(
        [
            *lines,
            *_reasons(body),
            *_failures(rules),
            *_said("Limits", _limits(body)),
            *_said("Advice", _advice(body)),
            *_table(rules),
        ]
    )


def gate_markdown(title: str, worse: Sequence[str], notes: Sequence[str]) -> str:
    """Return the summary of what the gate said of a certificate."""
    held = f"### Gate: {'refused' if worse else 'holds'}"
    return "\n".join(
        [
            held,
            "",
            span(title),
            "",
            *_said("Worse", worse),
            *_said("Different, and no worse", notes),
        ]
    )


def nothing_markdown(folder: str) -> str:
    """Return the summary of a job that has left no report."""
    return f"### NOT JUDGED\n\nThere is no report in {span(folder)}: the log says why.\n"


def _reasons(body: Mapping[str, Any]) -> list[str]:
    """Why there is no certificate, where it is not for a rule that fails: those are said one by one."""
    return [] if body.get("verdict") == "refused" else _said("Because", body.get("reasons", ()))


def _failures(rules: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for rule in rules:
        if (
            rule["verdict"] not in (str(Verdict.FAIL), str(Verdict.KIT_ERROR))
            or rule["level"] != MUST
        ):
            continue
        yield from (
            f"**{span(rule['rule'])}** {span(rule['title'])}",
            "",
            block(_failure(rule)),
            "",
        )


def _failure(rule: Mapping[str, Any]) -> str:
    where = next(
        (name for name, run in rule["runs"].items() if run.get("verdict") == rule["verdict"]), ""
    )
    said = {"Requirement": rule.get("requirement"), "Where": where}
    for failure in rule.get("failures", ())[:1]:
        said |= {
            "Expected": failure.get("expected"),
            "Actual": failure.get("actual"),
            "Likely cause": failure.get("cause"),
        }
    if not rule.get("failures"):
        said["Reason"] = rule.get("reason")
    return "\n".join(f"{key + ':':<14}{value}" for key, value in said.items() if value)


def _limits(body: Mapping[str, Any]) -> list[str]:
    if "limits" in body:
        return list(body["limits"])
    spared = (rule for rule in body["rules"] if rule["verdict"] == str(Verdict.NOT_APPLICABLE))
    return [
        _line(rule)
        for rule in spared
        if not str(rule.get("reason", "")).endswith((NOT_CLAIMED, INSTEAD))
    ]


def _advice(body: Mapping[str, Any]) -> list[str]:
    if "advice" in body:
        return list(body["advice"])
    return [
        _line(rule)
        for rule in body["rules"]
        if rule["verdict"] == str(Verdict.FAIL) and rule["level"] != MUST
    ]


def _line(rule: Mapping[str, Any]) -> str:
    return f"{rule['rule']} {rule['title']}: {rule.get('reason', '')}"


def _said(title: str, lines: Iterable[str]) -> list[str]:
    items = [f"- {span(line)}" for line in lines]
    return [f"{title}:", "", *items, ""] if items else []


def _table(rules: Iterable[Mapping[str, Any]]) -> list[str]:
    """The largest margins, and what was sent."""
    margins = sorted(
        (rule for rule in rules if rule.get("margin")), key=lambda rule: -float(rule["margin"])
    )[:MARGINS]
    rows = [
        f"| {span(rule['rule'])} {span(rule['title'])} | {span(format(float(rule['margin']), '.2g'))} |"
        for rule in margins
    ]
    table = ["| largest errors | of their bound |", "|---|---|", *rows, ""] if rows else []
    counted = [
        (rule, run["traffic"])
        for rule in rules
        for run in rule["runs"].values()
        if run.get("traffic")
    ]
    return table + [
        f"Bytes sent by {span(rule['rule'])}: {span(format(float(sent['mean']), '.3g'))} of those without compression, "
        f"{span(format(float(sent['largest']), '.3g'))} in the step that sends most.\n"
        for rule, sent in counted
    ]

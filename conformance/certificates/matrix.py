"""A table of several results: a column for each subject, a row for each rule.

It is made from certificates and reports, and judges nothing. Foreign text is literal
(``markdown.py``, and jinja2 escapes it in HTML). This module imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, PackageLoader

from conformance.certificates.markdown import printable, span
from conformance.judging.rule import SHOULD
from conformance.judging.verdict import Verdict

# The text of a cell for each verdict; a failed SHOULD rule is advice.
_CELLS = {
    Verdict.PASS: "holds",
    Verdict.FAIL: "FAILS",
    Verdict.KIT_ERROR: "KIT ERROR",
    Verdict.NOT_RUN: "not run",
    Verdict.NOT_APPLICABLE: "-",
}
_ADVICE = "advice"
_BY_NAME = {str(verdict): verdict for verdict in Verdict}
_VERDICTS = {"certified": "CERTIFIED", "refused": "REFUSED", "kit error": "KIT ERROR"}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        label: the rule's number, or the name of a property such as ``claims``.
        title: the rule's title; empty for a property.
        cells: a text for each subject.
    """

    label: str
    title: str
    cells: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether two subjects differ, or one fails; margins are not compared."""
        plain = {cell.partition(" ")[0] for cell in self.cells}
        return len(plain) > 1 or bool(plain & {"FAILS", "KIT", _ADVICE})


@dataclass(frozen=True)
class Matrix:
    """The whole table.

    Attributes:
        subjects: the heading of each column.
        properties: verdict, claims, profile, torch and bytes.
        rules: a row for each rule that any of the subjects was judged by.
    """

    subjects: tuple[str, ...]
    properties: tuple[Row, ...]
    rules: tuple[Row, ...]

    def numbered(self) -> "Matrix":
        """Return the table with a number as each heading, for long names."""
        numbers = tuple(f"[{number}]" for number in range(1, len(self.subjects) + 1))
        return replace(self, subjects=numbers)

    def shown(self, *, all_rules: bool) -> tuple[Row, ...]:
        """Return the rows of rules to print: all, or only those in which subjects differ."""
        return tuple(row for row in self.rules if all_rules or row.differs)


def matrix_of(bodies: Sequence[Mapping[str, Any]]) -> Matrix:
    """Return the table of these certificates and reports, in their order."""
    entries = [{rule["rule"]: rule for rule in body["rules"]} for body in bodies]
    titles = {number: rule["title"] for column in entries for number, rule in column.items()}
    numbers = sorted(titles, key=lambda number: tuple(map(int, number.split("."))))
    rules = tuple(
        Row(number, titles[number], tuple(_cell(column.get(number)) for column in entries))
        for number in numbers
    )
    properties: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "verdict": lambda body: _VERDICTS.get(
            body.get("verdict", "certified"), "NOT JUDGED IN FULL"
        ),
        "claims": lambda body: str(body["claims"]["text"]),
        "profile": lambda body: str(body["profile"]["name"]),
        "world sizes": lambda body: ", ".join(map(str, body["profile"]["world_sizes"])),
        "torch": lambda body: str(body["profile"].get("torch", "")),
        "bytes sent": _bytes_sent,
        "largest margin": _largest_margin,
    }
    return Matrix(
        tuple(_name(body) for body in bodies),
        tuple(
            Row(label, "", tuple(value(body) for body in bodies))
            for label, value in properties.items()
        ),
        rules,
    )


def _name(body: Mapping[str, Any]) -> str:
    subject = body["subject"]
    return str(subject.get("target") or subject.get("hook") or subject.get("setup"))


def _cell(rule: Mapping[str, Any] | None) -> str:
    if rule is None:
        return ""
    verdict = _BY_NAME[rule["verdict"]]
    if rule["level"] == SHOULD and verdict is Verdict.FAIL:
        return _ADVICE
    margin = rule.get("margin")
    if verdict is Verdict.PASS and margin:
        return f"{_CELLS[verdict]} {float(margin):.2g}"
    return _CELLS[verdict]


def _bytes_sent(body: Mapping[str, Any]) -> str:
    """Return the mean share of the bytes without compression, of the rule that counts them."""
    for rule in body["rules"]:
        for run in rule["runs"].values():
            if sent := run.get("traffic"):
                return f"{float(sent['mean']):.3g} of vanilla"
    return ""


def _largest_margin(body: Mapping[str, Any]) -> str:
    margins = [
        (float(rule["margin"]), rule["rule"]) for rule in body["rules"] if rule.get("margin")
    ]
    if not margins:
        return ""
    margin, number = max(margins)
    return f"{margin:.2g} ({number})"


def as_text(matrix: Matrix, *, all_rules: bool) -> str:
    """Return the table for a terminal."""
    numbered = [f"{number}: {name}" for number, name in enumerate(matrix.subjects, 1)]
    head = ["", *(f"[{number}]" for number in range(1, len(matrix.subjects) + 1))]
    lines = [[row.label, *row.cells] for row in matrix.properties if any(row.cells)]
    lines += [[row.label, *row.cells] for row in matrix.shown(all_rules=all_rules)]
    cells = [[printable(" ".join(cell.split())) for cell in line] for line in [head, *lines]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    subjects = [f"[{printable(' '.join(name.split()))}" for name in numbered]
    names = [subject.replace(":", "]", 1) for subject in subjects]
    return "\n".join([*names, "", *table, "", _note(matrix, all_rules=all_rules)])


def as_markdown(matrix: Matrix, *, all_rules: bool) -> str:
    """Return the table in Markdown."""
    heading = ["", *(span(name) for name in matrix.subjects)]
    lines = [_markdown_row(heading), "|" + "---|" * len(heading)]
    lines += [
        _markdown_row([row.label, *map(span, row.cells)])
        for row in matrix.properties
        if any(row.cells)
    ]
    lines += [
        _markdown_row([f"{row.label} {span(row.title)}", *map(span, row.cells)])
        for row in matrix.shown(all_rules=all_rules)
    ]
    return "\n".join([*lines, "", _note(matrix, all_rules=all_rules)])


def as_html(matrix: Matrix, *, all_rules: bool) -> str:
    """Return the table as a page of its own."""
    environment = Environment(
        loader=PackageLoader("conformance", "certificates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("matrix.html.jinja").render(
        matrix=matrix,
        rows=matrix.shown(all_rules=all_rules),
        note=_note(matrix, all_rules=all_rules),
    )


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _note(matrix: Matrix, *, all_rules: bool) -> str:
    """Return a line about the rows that are left out."""
    left_out = len(matrix.rules) - len(matrix.shown(all_rules=all_rules))
    legend = "A number is the largest error as a fraction of its bound."
    if not left_out:
        return legend
    return f"{left_out} rules in which the subjects do not differ are left out (--all). {legend}"

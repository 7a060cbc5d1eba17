"""docs/matrix.md: torch's own subjects and the references, by rule: ``python -m tests.matrix``.

Each subject is judged by its command of docs/matrix.md, at the default world sizes. What is written
for a subject is read from its report.json, and kept in tests/matrix_results.json, so that the page
can be written again without running anything: ``python -m tests.matrix --page``. Subjects whose
results are of the same rules, torch and command are not judged again.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from conformance.certificates.markdown import span
from conformance.certificates.matrix import as_markdown, matrix_of
from conformance.judging.rule import GOLDEN, MUST, SHOULD
from conformance.rules import book
from conformance.subjects.kinds import KINDS
from tests.matrix_subjects import MEANINGS, TORCHS, Subject, ours

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "matrix_results.json"
PAGE = ROOT / "docs" / "matrix.md"
# Seconds. A run that hangs ends by its own deadlines long before.
LIMIT = 1800
_ACTUAL = 160
_VERDICTS = {"certified": "**certified**", "refused": "refused", "kit error": "kit error"}

Results = dict[str, Any]


def read() -> Results:
    """Return the results on file: an entry for each command."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def write(results: Mapping[str, Any]) -> None:
    """Write the results, one line for each command."""
    lines = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in results.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def judge(subject: Subject) -> Mapping[str, Any]:
    """Judge a subject by its command, and return what is kept of its report."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "--pyargs", "conformance"),
                *(*shlex.split(subject.options), "-p", "no:cacheprovider"),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        reports = list(Path(folder).glob("conformance-results/*/report.json"))
        if len(reports) != 1:
            printed = (run.stderr.strip() or run.stdout.strip()).splitlines() or ["nothing printed"]
            return {"error": printed[-1][:300]}
        return kept(json.loads(reports[0].read_text()))


def kept(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parts of a report that the page needs."""
    return {
        "golden_list": report["kit"]["golden_list"],
        "date": report["date"][:10],
        "seed": report["seed"],
        "verdict": report["verdict"],
        "subject": {key: report["subject"][key] for key in ("target", "hook", "setup")},
        "claims": report["claims"]["text"],
        "torch": report["profile"]["torch"],
        "profile": report["profile"]["name"],
        "world_sizes": report["profile"]["world_sizes"],
        "rules": {
            rule["rule"]: [rule["verdict"], float(f"{rule['margin']:.2g}")]
            if rule.get("margin")
            else [rule["verdict"]]
            for rule in report["rules"]
        },
        "failures": {
            rule["rule"]: rule["failures"][0]["actual"][:_ACTUAL]
            for rule in report["rules"]
            if rule.get("failures")
        },
    }


def is_current(entry: Mapping[str, Any] | None) -> bool:
    """Whether an entry is of the present rules and the present torch."""
    return (
        entry is not None
        and "error" not in entry
        and entry["golden_list"] == hashlib.sha256(GOLDEN.read_bytes()).hexdigest()
        and entry["torch"] == torch.__version__
    )


def page() -> str:
    """Return docs/matrix.md."""
    results = read()
    lines = [
        "# The matrix",
        "",
        "torch's own hooks, averagers, optimizers, strategies, joins, collectives and wrappers, "
        "and the references of `hooks_ref`, by",
        "rule. `python -m tests.matrix` judges what is not current, at the default world sizes on "
        "Gloo and CPU, and writes this page.",
        "A subject that is *not run* was left out so far, which says nothing about it. A "
        'verdict "by the rules of" a date is older than the',
        "present rules: rules that were added or changed since have not judged that subject. "
        "[Versions of torch](torch-versions.md) has other",
        "versions than this page, and fewer and older rules: a subject that is refused here "
        "may hold there.",
        "",
        "## torch's own",
        "",
        *_table(TORCHS, results, "subject"),
        "",
        "### What the refusals mean",
        "",
        *_refusals(results),
        "",
        "## References",
        "",
        *_table(ours(), results, "command"),
    ]
    for kind in KINDS:
        shown = [one for one in TORCHS if one.kind == kind and "rules" in results.get(one.key, {})]
        if not shown:
            continue
        matrix = matrix_of([_body(results[one.key], one) for one in shown])
        lines += ["", f"## torch's own, kind {kind}, by rule", "", _by_rule(matrix)]
    return "\n".join([*lines, ""])


def _by_rule(matrix: Any) -> str:
    """Return the table with numbers in place of long names, and the names before it."""
    names = [f"{number}. {name}" for number, name in enumerate(matrix.subjects, 1)]
    return "\n".join([*names, "", as_markdown(matrix.numbered(), all_rules=False)])


def _table(subjects: Iterable[Subject], results: Mapping[str, Any], heading: str) -> list[str]:
    lines = [
        f"| kind | {heading} | claims | verdict | refused by | advice | held |",
        "|---|---|---|---|---|---|---|",
    ]
    for subject in subjects:
        entry = results.get(subject.key)
        cells = [subject.kind, f"`{subject.name if heading == 'subject' else subject.target}`"]
        if entry is None:
            cells += ["", "not run", "", "", ""]
        elif "error" in entry:
            cells += ["", f"not judged: {span(entry['error'])}", "", "", ""]
        else:
            stale = "" if is_current(entry) else f", by the rules of {entry['date']}"
            held = sum(value[0] == "pass" for value in entry["rules"].values())
            cells += [
                span(entry["claims"]),
                _VERDICTS.get(entry["verdict"], entry["verdict"]) + stale,
                _links(failed(entry, MUST)),
                _links(failed(entry, SHOULD)),
                str(held),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def failed(entry: Mapping[str, Any], level: str) -> list[str]:
    """Return the rules of a level that a subject fails."""
    rules = book()
    return [
        number
        for number, (verdict, *_) in entry["rules"].items()
        if verdict == "fail" and number in rules and rules[number].level == level
    ]


def _links(numbers: Iterable[str]) -> str:
    return ", ".join(f"[{number}](../conformance/RULES.md#{number})" for number in numbers)


def _refusals(results: Mapping[str, Any]) -> list[str]:
    rules = book()
    lines = []
    for subject in TORCHS:
        entry = results.get(subject.key, {})
        if entry.get("verdict") != "refused":
            continue
        lines += [f"**`{subject.name}`** ({subject.kind}). {MEANINGS.get(subject.name, '')}", ""]
        for number in failed(entry, MUST):
            actual = span(entry["failures"].get(number, ""))
            lines.append(f"- {number} {rules[number].title}: {actual}")
        lines.append("")
    return lines[:-1]


def _body(entry: Mapping[str, Any], subject: Subject) -> dict[str, Any]:
    """Return the report that matrix_of reads."""
    rules = book()
    return {
        "subject": {"target": subject.name},
        "verdict": entry["verdict"],
        "claims": {"text": entry["claims"]},
        "profile": {
            "name": entry["profile"],
            "world_sizes": entry["world_sizes"],
            "torch": entry["torch"],
        },
        "rules": [
            {
                "rule": number,
                "title": rules[number].title,
                "level": rules[number].level,
                "verdict": verdict,
                "margin": margin[0] if margin else None,
                "runs": {},
            }
            for number, (verdict, *margin) in entry["rules"].items()
            if number in rules
        ],
    }


def main() -> int:
    """Judge what is not current, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--only", metavar="TEXT", help="subjects whose command has this text")
    options = parser.parse_args()
    results = read()
    subjects = (*TORCHS, *ours())
    if not options.page:
        for subject in subjects:
            wanted = options.only is None or options.only in subject.options
            if wanted and not is_current(results.get(subject.key)):
                results[subject.key] = entry = judge(subject)
                print(f"{entry.get('verdict', entry.get('error'))}  {subject.options}", flush=True)
                write(results)
    keys = [subject.key for subject in subjects]
    write({key: results[key] for key in keys if key in results})
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The certificate: the rules that were run, under which claims and profile, and with which margins.

A certificate is issued only if every MUST rule of the golden list was judged in this session and
holds, at every required world size. Any other session that refuses nothing is a development run,
and its conclusion lists the reasons.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from conformance.certificates.canonical import digest, portable
from conformance.certificates.versions import SCHEMA
from conformance.errors import CERTIFIED, KIT_ERROR, NO_RULES, NOT_CERTIFIED, REFUSED
from conformance.judging.rule import AT_SCALE, GOLDEN, MUST, Rule, golden_list
from conformance.judging.verdict import (
    INSTEAD,
    NOT_CLAIMED,
    NOTHING_TO_TRY,
    Judgement,
    Verdict,
)
from conformance.subjects.kinds import HOOK

REQUIRED_WORLDS = (1, 2, 3, 4)

# Ends of reasons for which a rule that does not apply is no limit of the subject.
_NO_LIMIT = (NOT_CLAIMED, INSTEAD, NOTHING_TO_TRY)

RuleEntry = Mapping[str, Any]  # a rule in a certificate or in a report


@dataclass
class Conclusion:
    """The result of a whole session.

    Attributes:
        exit_code: one of the codes in ``errors.py``.
        verdict: the result in words: certified, refused, not certified, kit error.
        reasons: the reasons why there is no certificate, one line each.
        certificate: the certificate, or None.
    """

    exit_code: int
    verdict: str
    reasons: list[str] = field(default_factory=list)
    certificate: dict[str, Any] | None = None


def conclude(
    rules: Mapping[str, Rule],
    judgements: Mapping[str, Judgement],
    header: Mapping[str, Any],
    worlds: tuple[int, ...],
    kind: str = HOOK,
    interrupted: Sequence[str] = (),
) -> Conclusion:
    """Weigh the judgements of a session.

    Args:
        rules: the rule book, by number.
        judgements: the judgements, by the number of the rule.
        header: the certificate's entries on subject, claims and profile.
        worlds: the world sizes of the session.
        kind: the kind of subject.
        interrupted: runs that were cut short and repeated. The subject may have caused the
            interruption, so nothing is certified.
    """
    broken = [j for j in judgements.values() if j.verdict is Verdict.KIT_ERROR]
    if broken:
        return Conclusion(KIT_ERROR, "kit error", [f"{j.number}: {j.reason}" for j in broken])
    failed = [
        j
        for j in judgements.values()
        if j.verdict is Verdict.FAIL and rules[j.number].level == MUST
    ]
    if failed:
        return Conclusion(
            REFUSED, "refused", [f"{j.number} {rules[j.number].title}" for j in failed]
        )
    if not judgements:
        return Conclusion(NO_RULES, "not certified", ["no rule was selected"])
    golden = golden_list(kind, header.get("profile", {}).get("device", "cpu"))
    reasons = [*interrupted, *_missing(judgements, worlds, golden)]
    coverage = header.get("coverage", {})
    if coverage.get("required") and (
        not coverage["measured"] or coverage.get("function_not_measured")
    ):
        reasons.append(f"--require-coverage: {coverage_line(coverage)}")
    if reasons:
        return Conclusion(NOT_CERTIFIED, "not certified", reasons)
    if coverage.get("required") and uncovered_lines(coverage):
        return Conclusion(REFUSED, "refused", [f"--require-coverage: {coverage_line(coverage)}"])
    return Conclusion(CERTIFIED, "certified", certificate=_certificate(rules, judgements, header))


_LISTED = 12
# Why no run was made for a number in the subject's code.
NOT_TRIED = "no scenario reaches it, or eight others were tried before it"


def _missing(
    judgements: Mapping[str, Judgement], worlds: tuple[int, ...], golden: list[str]
) -> Iterator[str]:
    """Yield the reasons why this session does not suffice for a certificate, one line each."""
    if absent := [number for number in golden if number not in judgements]:
        # A run of a few rules leaves out most of them: their number says more than a list.
        which = f": {', '.join(absent)}" if len(absent) <= _LISTED else ""
        yield f"{len(absent)} of {len(golden)} MUST rules were left out of this run{which}"
    # Many rules are often not run for one reason, which is then given once.
    numbers_by_reason: dict[str, list[str]] = {}
    for number, judgement in judgements.items():
        if number in golden and judgement.verdict is Verdict.NOT_RUN:
            numbers_by_reason.setdefault(_without_run(judgement.reason), []).append(number)
    for reason, numbers in numbers_by_reason.items():
        were = "was" if len(numbers) == 1 else "were"
        yield f"{', '.join(numbers)} {were} not run: {reason}"
    if sizes := [world for world in REQUIRED_WORLDS if world not in worlds]:
        yield worlds_left_out(sizes)


def worlds_left_out(sizes: Sequence[int]) -> str:
    """Return the reason for a development run that lacks these world sizes."""
    if len(sizes) == 1:
        return f"world size {sizes[0]} was left out"
    return f"world sizes {', '.join(map(str, sizes))} were left out"


def _without_run(reason: str) -> str:
    """Return a reason without the name of the run at its start."""
    return re.sub(r"^\w+@\d+: ", "", reason)


def _certificate(
    rules: Mapping[str, Rule], judgements: Mapping[str, Judgement], header: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a certificate, with its digest."""
    entries = [summary(rules[number], judgement) for number, judgement in judgements.items()]
    simulated = at_scale(rules, judgements)
    body = {
        "schema": SCHEMA,
        "certified": True,
        **header,
        "limits": limit_lines(entries),
        "advice": advice_lines(entries),
        **({"at_scale": {"simulated": True, "notes": simulated}} if simulated else {}),
        "rules": entries,
    }
    written: dict[str, Any] = portable(body)
    return {**written, "digest": digest(written)}


def limits(rules: Mapping[str, Rule], judgements: Mapping[str, Judgement]) -> list[str]:
    """Return the requirements that the subject is allowed not to meet, one line for each rule."""
    return limit_lines(summary(rules[j.number], j) for j in judgements.values())


def limit_lines(entries: Iterable[RuleEntry]) -> list[str]:
    """Return the limits that follow from the entries of rules.

    A rule for a claim that the subject does not make is no limit of the subject, and neither is one
    that another rule replaces.
    """
    return [
        _reason_line(entry)
        for entry in entries
        if entry["verdict"] == str(Verdict.NOT_APPLICABLE)
        and not str(entry.get("reason", "")).endswith(_NO_LIMIT)
    ]


def advice_lines(entries: Iterable[RuleEntry]) -> list[str]:
    """Return the advice that follows from the entries of rules: the SHOULD rules that fail."""
    return [
        _reason_line(entry)
        for entry in entries
        if entry["verdict"] == str(Verdict.FAIL) and entry["level"] != MUST
    ]


def coverage_line(coverage: Mapping[str, Any]) -> str:
    """Return the coverage of the subject's own files in one line.

    Args:
        coverage: the entry of a certificate or a report.
    """
    if not coverage["measured"]:
        return f"coverage was not measured: {coverage['reason']}"
    untaken = len(coverage["untaken"])
    never_called = len(coverage["never_called"])
    files = len(coverage["files"])
    parts = [
        f"{untaken} branch{'' if untaken == 1 else 'es'}",
        f"{never_called} function{'' if never_called == 1 else 's'}",
    ]
    in_files = f"of the subject's own code ({files} file{'' if files == 1 else 's'})"
    missing = coverage.get("function_not_measured")
    but = f", but its function was not measured: {missing}" if missing else ""
    if not untaken and not never_called:
        return f"every branch {in_files} ran{but}"
    return f"no run reached {' and '.join(parts)} {in_files}{but}"


def uncovered_lines(coverage: Mapping[str, Any]) -> list[str]:
    """Return the branches that no run took and the functions that none entered, one line each."""
    if not coverage["measured"]:
        return []
    branches = [
        f"{one['file']}:{one['line']}: {one['source']} ({one['side']})"
        for one in coverage["untaken"]
    ]
    functions = [
        f"{one['file']}:{one['line']}: {one['function']} was never called"
        for one in coverage["never_called"]
    ]
    return [*branches, *functions]


def probe_lines(coverage: Mapping[str, Any]) -> list[str]:
    """Return the numbers that runs were made for, and those that none reaches, one line each."""
    if not coverage["measured"]:
        return []
    tried = [
        f"{one['value']} ({one['file']}:{one['line']}): {', '.join(one['runs'])}"
        for one in coverage["probes"]
    ]
    missed = [
        f"{one['value']} ({one['file']}:{one['line']}): {NOT_TRIED}"
        for one in coverage["out_of_reach"]
    ]
    return [*tried, *missed]


def _reason_line(entry: RuleEntry) -> str:
    return f"{entry['rule']} {entry['title']}: {entry.get('reason', '')}"


def at_scale(rules: Mapping[str, Rule], judgements: Mapping[str, Judgement]) -> list[str]:
    """Return the notes on simulated ranks, one line for each kind of gradient.

    The list is empty if no ranks could be simulated.
    """
    return [
        note
        for number, judgement in judgements.items()
        if rules[number].section == AT_SCALE
        for run in judgement.runs.values()
        for note in run.get("notes", ())
    ]


def summary(rule: Rule, judgement: Judgement) -> dict[str, Any]:
    """Return one rule's entry in a certificate and in a report.

    Without a bound, or of results that are NaN, an error is no fraction of the bound; JSON has no
    number for it, and the entry has no margin.
    """
    runs = {name: _with_finite_margin(run) for name, run in judgement.runs.items()}
    margin = max((run["margin"] for run in runs.values() if "margin" in run), default=None)
    return {
        "rule": rule.number,
        "level": rule.level,
        "title": rule.title,
        "verdict": str(judgement.verdict),
        **({"reason": judgement.reason} if judgement.reason else {}),
        "checks": judgement.checks,
        **({"margin": margin} if margin is not None else {}),
        "runs": runs,
    }


def _with_finite_margin(run: Mapping[str, Any]) -> dict[str, Any]:
    margin = run.get("margin")
    is_finite = margin is not None and math.isfinite(margin)
    return {key: value for key, value in run.items() if key != "margin" or is_finite}


def kit_identity() -> dict[str, Any]:
    """Return the identity of this kit: its version, and the digest of its golden list."""
    try:
        version = metadata.version("ddp-conformance")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return {"version": version, "golden_list": hashlib.sha256(GOLDEN.read_bytes()).hexdigest()}

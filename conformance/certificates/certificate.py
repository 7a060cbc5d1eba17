"""The certificate: what ran, under which claims and profile, with which margins; and nothing more.

It is given only when every MUST rule of the golden list was judged in this session and holds, at
every world size that the golden list asks for. Everything else is a development run, and the reason
is said.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from conformance.errors import CERTIFIED, KIT_ERROR, NO_RULES, NOT_CERTIFIED, REFUSED
from conformance.judging.rule import AT_SCALE, GOLDEN, MUST, Rule, golden_list
from conformance.judging.verdict import INSTEAD, NOT_CLAIMED, Judgement, Verdict
from conformance.subjects.kinds import HOOK

REQUIRED_WORLDS = (1, 2, 3, 4)
SCHEMA = "https://ddp-conformance.invalid/certificate/v1"


@dataclass
class Conclusion:
    """What a whole session comes to.

    Attributes:
        exit_code: as listed in ``errors.py``.
        verdict: one word for people: certified, refused, not certified, kit error.
        reasons: why there is no certificate, one line each.
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
        header: what the certificate says of subject, of this ``kind``, and profile.
        interrupted: runs that were cut short and done again: whose doing that was is not known, so nothing is certified.
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
    reasons = [*interrupted, *_what_is_missing(judgements, worlds, golden)]
    if reasons:
        return Conclusion(NOT_CERTIFIED, "not certified", reasons)
    return Conclusion(CERTIFIED, "certified", certificate=_certificate(rules, judgements, header))


def _what_is_missing(
    judgements: Mapping[str, Judgement], worlds: tuple[int, ...], golden: list[str]
) -> list[str]:
    absent = [number for number in golden if number not in judgements]
    not_run = [
        j for number, j in judgements.items() if number in golden and j.verdict is Verdict.NOT_RUN
    ]
    sizes = [str(world) for world in REQUIRED_WORLDS if world not in worlds]
    reasons = []
    if absent:
        reasons.append(
            f"{len(absent)} of {len(golden)} MUST rules were left out of this run: {', '.join(absent)}"
        )
    for why in dict.fromkeys(_without_run(j.reason) for j in not_run):
        numbers = [j.number for j in not_run if _without_run(j.reason) == why]
        reasons.append(
            f"{', '.join(numbers)} {'was' if len(numbers) == 1 else 'were'} not run: {why}"
        )
    if sizes:
        reasons.append(f"world size {', '.join(sizes)} was left out")
    return reasons


def _without_run(reason: str) -> str:
    """Return a reason without the run that it was seen in: of many rules that were not run the reason is often the same."""
    return re.sub(r"^\w+@\d+: ", "", reason)


def _certificate(
    rules: Mapping[str, Rule], judgements: Mapping[str, Judgement], header: Mapping[str, Any]
) -> dict[str, Any]:
    advice = [
        f"{j.number} {rules[j.number].title}: {j.reason}"
        for j in judgements.values()
        if j.verdict is Verdict.FAIL
    ]
    simulated = at_scale(rules, judgements)
    body = {
        "schema": SCHEMA,
        "certified": True,
        **header,
        "limits": limits(rules, judgements),
        "advice": advice,
        **({"at scale": {"simulated": True, "said": simulated}} if simulated else {}),
        "rules": [summary(rules[number], judgement) for number, judgement in judgements.items()],
    }
    return {**body, "digest": digest(body)}


def limits(rules: Mapping[str, Rule], judgements: Mapping[str, Judgement]) -> list[str]:
    """Return what the subject does not do and may leave out, one line for each rule; what it does not claim is none of these."""
    spared = (
        j
        for j in judgements.values()
        if j.verdict is Verdict.NOT_APPLICABLE and not j.reason.endswith((NOT_CLAIMED, INSTEAD))
    )
    return [f"{j.number} {rules[j.number].title}: {j.reason}" for j in spared]


def at_scale(rules: Mapping[str, Rule], judgements: Mapping[str, Judgement]) -> list[str]:
    """Return what was said of simulated ranks, one line for each kind of gradient; nothing where none could be simulated."""
    simulated = [
        judgement for number, judgement in judgements.items() if rules[number].section == AT_SCALE
    ]
    return [
        note
        for judgement in simulated
        for run in judgement.runs.values()
        for note in run.get("notes", ())
    ]


def summary(rule: Rule, judgement: Judgement) -> dict[str, Any]:
    """Return one rule's line, as certificate and report have it."""
    return {
        "rule": rule.number,
        "level": rule.level,
        "title": rule.title,
        "verdict": str(judgement.verdict),
        **({"reason": judgement.reason} if judgement.reason else {}),
        "checks": judgement.checks,
        **({"margin": judgement.margin} if judgement.margin is not None else {}),
        "runs": judgement.runs,
    }


def digest(body: Mapping[str, Any]) -> str:
    """Return the digest that shows an edited or truncated certificate: sha256 of its canonical JSON."""
    plain = {key: value for key, value in body.items() if key != "digest"}
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def kit_identity() -> dict[str, Any]:
    """Return what identifies this kit: its version and the golden list that it judges by."""
    try:
        version = metadata.version("ddp-conformance")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return {"version": version, "golden list": hashlib.sha256(GOLDEN.read_bytes()).hexdigest()}

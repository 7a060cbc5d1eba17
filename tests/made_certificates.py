"""Certificates for tests, without a run.

The kit itself concludes them from made judgements, so that they are as consistent as real ones.
``tests/test_ci.py`` passes a real certificate to the same commands.
"""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.certificates.certificate import REQUIRED_WORLDS, conclude, digest, kit_identity
from conformance.judging.rule import Rule
from conformance.judging.verdict import NOT_CLAIMED, Judgement, Verdict
from conformance.rules import book
from conformance.subjects.kinds import HOOK

Body = dict[str, Any]
NOT_CLAIMED_HERE = ("10.4", "11.2", "11.3", "13.1", "13.2", "13.3", "13.5", "13.8")
MARGINS = {"2.2": 0.3, "2.3": 0.24, "2.4": 0.31, "2.1": 0.0}


def header(
    name: str = "mypkg.hooks:half", claims: str = "rounded(float16)", kind: str = HOOK
) -> Body:
    """Return a session's entries on the subject and the profile."""
    named = {"hook": name, "target": None} if kind == HOOK else {"hook": None, "target": name}
    profile = {
        "name": "gloo-cpu",
        "backend": "gloo",
        "device": "cpu",
        "world sizes": list(REQUIRED_WORLDS),
        "torch": "2.13.0+cpu",
    }
    return {
        "kit": kit_identity(),
        "subject": {
            **named,
            "state": None,
            "setup": None,
            "kind": kind,
            "module": "mypkg.hooks",
            "sha256": {"mypkg.hooks": "ab" * 32},
        },
        "claims": {"text": claims, "said by": "--claims"},
        "profile": {**profile, "python": "3.11.7", "platform": "Linux"},
        "date": "2026-11-22T01:45:05+00:00",
        "command": f"--{kind} {name} --claims '{claims}'",
    }


def judged(rule: Rule) -> Judgement:
    """Return a judgement like a session's, with a run at every world size."""
    if rule.number in NOT_CLAIMED_HERE:
        return Judgement(rule.number, Verdict.NOT_APPLICABLE, NOT_CLAIMED)
    if rule.number == "13.7":  # it counts bytes, even if no ratio is claimed
        run = {
            "verdict": "not applicable",
            "reason": NOT_CLAIMED,
            "checks": 0,
            "traffic": {"largest": 0.5, "mean": 0.5},
        }
        return Judgement(
            rule.number,
            Verdict.NOT_APPLICABLE,
            f"ordered@2: {NOT_CLAIMED}",
            runs={"ordered@2": run},
        )
    margin = {"margin": MARGINS[rule.number]} if rule.number in MARGINS else {}
    runs = {
        f"values@{world}": {"verdict": "pass", "reason": "", "checks": 6, **margin}
        for world in REQUIRED_WORLDS
    }
    return Judgement(rule.number, Verdict.PASS, runs=runs)


def certificate(
    name: str = "mypkg.hooks:half", claims: str = "rounded(float16)", kind: str = HOOK
) -> Body:
    """Return the body of a certificate, as read from a file."""
    rules = book(kind)
    made = conclude(
        rules,
        {number: judged(rule) for number, rule in rules.items()},
        header(name, claims, kind),
        REQUIRED_WORLDS,
        kind,
    )
    assert made.certificate is not None
    read: Body = json.loads(json.dumps(made.certificate))
    return read


def changed(body: Mapping[str, Any], change: Callable[[Body], object]) -> Body:
    """Return a body with a change and a fitting digest, as if the kit had written it."""
    other = copy.deepcopy(dict(body))
    change(other)
    return {**other, "digest": digest(other)}


def rule_of(body: Body, number: str) -> Body:
    """Return the entry of a rule."""
    found: Body = next(rule for rule in body["rules"] if rule["rule"] == number)
    return found


def without(body: Body, number: str) -> None:
    """Remove a rule."""
    body["rules"] = [rule for rule in body["rules"] if rule["rule"] != number]


def ran(body: Body, number: str, run: str = "values@3", **changes: Any) -> None:
    """Change entries of a rule's run; the rule's verdict and checks follow from its runs."""
    rule = rule_of(body, number)
    rule["runs"][run] |= changes
    order = [str(verdict) for verdict in Verdict]
    rule["verdict"] = max((run["verdict"] for run in rule["runs"].values()), key=order.index)
    rule["checks"] = sum(run["checks"] for run in rule["runs"].values())


def written(path: Path, body: Mapping[str, Any]) -> Path:
    """Write a body like the kit, and return the path."""
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path

"""Certificates for tests, without a run.

The kit itself concludes them from made judgements, so that they are as consistent as real ones.
``tests/test_ci.py`` passes a real certificate to the same commands.
"""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.certificates.canonical import digest, digest_of_version_1
from conformance.certificates.certificate import (
    REQUIRED_WORLDS,
    advice_lines,
    conclude,
    kit_identity,
    limit_lines,
)
from conformance.certificates.reproduction import reproduce_commands
from conformance.certificates.versions import SCHEMA_1
from conformance.judging.rule import Rule
from conformance.judging.verdict import NOT_CLAIMED, NOTHING_TO_TRY, Judgement, Verdict
from conformance.rules import book
from conformance.scenarios.profiles import requested_profile, resolve_profile
from conformance.subjects.claims import Claims, default_claims, parse_claims
from conformance.subjects.kinds import HOOK
from conformance.subjects.spec import reference_of

Body = dict[str, Any]
# Rules that find out in their runs that they are not claimed.
NOT_CLAIMED_IN_RUNS = (
    *("13.1", "13.2", "13.3", "13.4", "13.5", "13.6"),
    *("16.16", "19.18", "23.3", "23.4", "23.5"),
)
MARGINS = {"2.2": 0.3, "2.3": 0.24, "2.4": 0.31, "2.1": 0.0}


def header(
    name: str = "mypkg.hooks:half", claims: str = "rounded(float16)", kind: str = HOOK
) -> Body:
    """Return a session's entries on the subject and the profile."""
    module = name.partition(":")[0]
    named = {"hook": name, "target": None} if kind == HOOK else {"hook": None, "target": name}
    profile = {
        "name": "gloo-cpu",
        "backend": "gloo",
        "device": "cpu",
        "world_sizes": list(REQUIRED_WORLDS),
        "torch": "2.13.0+cpu",
    }
    made = {
        "kit": {**kit_identity(), "source_sha256": "cd" * 32},
        "subject": {
            **named,
            "state": None,
            "setup": None,
            "kind": kind,
            "module": module,
            "distribution": None,
            "sha256": {module: "ab" * 32},
        },
        "claims": {"text": claims, "declared_by": "--claims"},
        "profile": {**profile, "python": "3.11.7", "platform": "Linux"},
        "environment": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        "seed": 12345,
        "date": "2026-11-22T01:45:05+00:00",
        "command": command(kind, name, claims),
        "coverage": coverage(name),
    }
    return {**made, "reproduce": reproduce_commands(made)}


def coverage(name: str) -> Body:
    """Return the entry of a subject in a file whose branches all ran."""
    file = f"{name.partition(':')[0].replace('.', '/')}.py"
    counts = {"lines": 9, "lines_ran": 9, "branches": 2, "branches_taken": 2}
    not_named = ("only_raise", "at_import", "functions_not_used", "files_only_imported")
    return {
        "measured": True,
        "required": False,
        "files": [{"file": file, "sha256": "ab" * 32, **counts}],
        "untaken": [],
        "never_called": [],
        "not_named": dict.fromkeys(not_named, 0),
        "probes": [],
        "out_of_reach": [],
    }


def set_variables(body: Body) -> None:
    """Set the environment variables that the profile of a certificate needs."""
    entries = body["profile"]
    requested = requested_profile(entries["backend"], entries["device"])
    needed = dict(resolve_profile(requested, entries, entries["world_sizes"]).environment)
    if needed:
        entries["environment"] = needed
        body["environment"] |= needed


def command(kind: str, name: str, claims: str) -> str:
    """Return the command line of a session."""
    return f"--{kind} {name} --claims '{claims}'"


def claims_of(kind: str) -> str:
    """Return claims that a subject of a kind can make: those of the kind's reference."""
    return str(default_claims(kind, reference_of(kind).arguments))


def judged(rule: Rule, claims: Claims) -> Judgement:
    """Return a judgement like a session's, with a run at every world size."""
    if rule.claimed and not claims.has(rule.claimed):
        return Judgement(rule.number, Verdict.NOT_APPLICABLE, NOT_CLAIMED)
    if rule.number in NOT_CLAIMED_IN_RUNS:
        run = {"verdict": "not applicable", "reason": NOT_CLAIMED, "checks": 0}
        reason = f"values@2: {NOT_CLAIMED}"
        return Judgement(rule.number, Verdict.NOT_APPLICABLE, reason, runs={"values@2": run})
    if rule.probes:
        reason = f"no code of the subject {NOTHING_TO_TRY}"
        return Judgement(rule.number, Verdict.NOT_APPLICABLE, reason)
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
    parsed = parse_claims(claims, kind)
    made = conclude(
        rules,
        {number: judged(rule, parsed) for number, rule in rules.items()},
        header(name, claims, kind),
        REQUIRED_WORLDS,
        kind,
    )
    assert made.certificate is not None
    read: Body = json.loads(json.dumps(made.certificate))
    return read


def forged(body: Mapping[str, Any], change: Callable[[Body], object]) -> Body:
    """Return a body with a change and a fitting digest; the other entries stay."""
    other = copy.deepcopy(dict(body))
    change(other)
    return {**other, "digest": digest(other)}


def changed(body: Mapping[str, Any], change: Callable[[Body], object]) -> Body:
    """Return a body with a change, as if the kit had written it: other entries follow from it."""

    def change_all(other: Body) -> None:
        change(other)
        other["limits"] = limit_lines(other["rules"])
        other["advice"] = advice_lines(other["rules"])
        for rule in other["rules"]:
            margins = [run["margin"] for run in rule["runs"].values() if "margin" in run]
            rule |= {"margin": max(margins)} if margins else {}
        subject = other["subject"]
        name = subject["target"] or subject["hook"]
        other["command"] = command(subject["kind"], name, other["claims"]["text"])
        if subject["state"]:
            other["command"] += f" --state {subject['state']}"
        other["reproduce"] = reproduce_commands(other)
        for file in other["coverage"]["files"]:
            file["sha256"] = subject["sha256"].get(subject["module"], file["sha256"])

    return forged(body, change_all)


def of_version_1(body: Mapping[str, Any]) -> Body:
    """Return a certificate as kits wrote it before version 2 of its format."""
    old = copy.deepcopy(dict(body))
    for name in ("environment", "reproduce"):
        del old[name]
    old["schema"] = SCHEMA_1
    old["kit"] = {"version": old["kit"]["version"], "golden list": old["kit"]["golden_list"]}
    old["claims"] = {"text": old["claims"]["text"], "said by": old["claims"]["declared_by"]}
    old["profile"]["world sizes"] = old["profile"].pop("world_sizes")
    if "at_scale" in old:
        old["at scale"] = {"simulated": True, "said": old.pop("at_scale")["notes"]}
    return {**old, "digest": digest_of_version_1(old)}


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

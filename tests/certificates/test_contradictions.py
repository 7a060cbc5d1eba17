"""Tests that entries of a certificate that do not fit together are found."""

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.certificates.contradictions import CLAIMED_RULES, contradictions
from conformance.certificates.reader import CertificateFile
from conformance.certificates.reproduction import reproduce_commands
from conformance.errors import ProfileError, UsageError
from conformance.rules import book
from conformance.subjects.kinds import KINDS
from conformance.torch_versions.tested import OLDEST
from tests.made_certificates import (
    Body,
    certificate,
    claims_of,
    ran,
    rule_of,
    set_variables,
)

ROOT = Path(__file__).resolve().parent.parent.parent


def found(body: Body) -> list[str]:
    return list(contradictions(CertificateFile(Path("c.json"), body)))


def forged(body: Body, change: Callable[[Body], object]) -> Body:
    """Return a body with a change; the other entries stay, and the digest is not read here."""
    other = copy.deepcopy(body)
    change(other)
    return other


def on(name: str, backend: str, device: str, **entries: Any) -> Callable[[Body], object]:
    """Return the edit to a profile that was judged on a backend."""

    def change(b: Body) -> None:
        b["profile"].update(name=name, backend=backend, device=device, **entries)
        if device == "cuda":
            b["profile"]["torch"] = "2.13.0+cu126"
        with contextlib.suppress(ProfileError, UsageError):
            set_variables(b)
        b["command"] += f" --backend {backend} --device {device}"
        if "imports" in entries:
            b["command"] += f" --backend-import {entries['imports']}"
        b["reproduce"] = reproduce_commands(b)

    return change


def larger_world(b: Body) -> None:
    b["profile"]["world_sizes"].append(8)
    b["reproduce"] = reproduce_commands(b)


@pytest.fixture(scope="module")
def body() -> Body:
    return certificate()


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_of_the_kit_has_none(kind: str) -> None:
    assert found(certificate("mypkg:subject", claims_of(kind), kind)) == []


@pytest.mark.parametrize(
    "claims",
    [
        "exact",
        "sum, rounded(bfloat16), world_only",
        "exact, chained, checkpointable, min_world_size(2)",
        "rounded(float16), backends(gloo), devices(cpu)",
    ],
)
def test_claims_decide_which_rules_apply(claims: str) -> None:
    made = certificate(claims=claims)
    if "chained" in claims:
        made["profile"]["name"] = "gloo-serialised"
    assert found(made) == []


def test_claimed_rules_are_those_of_the_rule_book() -> None:
    rules = [rule for kind in KINDS for rule in book(kind).values()]
    assert {rule.number: rule.claimed for rule in rules if rule.claimed} == CLAIMED_RULES


def test_rules_of_own_numbers_are_those_of_the_rule_book() -> None:
    for name, kind in KINDS.items():
        assert kind.probes is not None
        assert [number for number, rule in book(name).items() if rule.probes] == [kind.probes.rule]


def test_the_oldest_torch_is_that_of_the_package() -> None:
    (required,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert ".".join(map(str, OLDEST)) == required


@pytest.mark.parametrize(
    "change",
    [
        on("nccl", "nccl", "cuda", devices=4, nccl=[2, 21, 5]),
        on("nccl-shared-gpu", "nccl", "cuda", devices=1, nccl=[2, 30, 7]),
        on("gloo-cuda", "gloo", "cuda", devices=1),
        on("mpi-cpu", "mpi", "cpu"),
        on("other-cpu", "other", "cpu", imports="mypkg.backend"),
        on("gloo-cuda", "gloo", "cuda", devices=1, names=["H200", "H200"]),
        larger_world,
        lambda b: b["profile"].update(torch="2.6.0a0+git1234"),
    ],
)
def test_profiles_of_the_kit_are_accepted(change: Callable[[Body], object], body: Body) -> None:
    assert found(forged(body, change)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            on("nccl", "nccl", "cpu"),
            "it was judged on a profile that no machine runs: profile nccl-cpu: not run: nccl "
            "takes tensors on cuda alone",
        ),
        (on("nccl", "nccl", "cuda", nccl=[2, 30, 7]), "profile nccl: not run: no CUDA device"),
        (on("nccl", "nccl", "cuda", devices=4), "is nccl, but it names no version of NCCL"),
        (
            on("nccl", "nccl", "cuda", devices=1, nccl=[2, 30, 7]),
            "its profile is called nccl, but nccl on cuda, ranks share GPUs is the profile "
            "nccl-shared-gpu",
        ),
        (
            on("nccl-shared-gpu", "nccl", "cuda", devices=4, nccl=[2, 30, 7]),
            "its profile is called nccl-shared-gpu, but nccl on cuda is the profile nccl",
        ),
        (
            on("nccl-shared-gpu", "nccl", "cuda", devices=1, nccl=[2, 21, 5]),
            "ranks can share one from NCCL 2.30 on, this is 2.21.5",
        ),
        (on("gloo-cpu", "gloo", "cuda", devices=1), "gloo on cuda is the profile gloo-cuda"),
        (
            lambda b: b["profile"].update(name="gloo-serialised"),
            "its profile is called gloo-serialised, but gloo on cpu is the profile gloo-cpu",
        ),
        (
            lambda b: b.update(command=f"{b['command']} --backend nccl"),
            "its command line selects nccl on cpu, but its profile has gloo on cpu",
        ),
        (
            lambda b: b["claims"].update(text="rounded(float16), devices(cuda)"),
            "it claims rounded(float16), devices(cuda), but its profile is gloo on cpu",
        ),
        (lambda b: b["profile"].update(torch="new"), "has a version of torch that cannot be read"),
        (
            on("gloo-cuda", "gloo", "cuda", devices=2, names=["H200"]),
            "it has 2 devices, but 1 names of devices",
        ),
        (
            lambda b: b["profile"].update(name="gloo-cuda", device="cuda", devices=1),
            "it was judged on cuda, but torch 2.13.0+cpu has no CUDA",
        ),
        (lambda b: b["profile"].update(gloo=False), "its torch was built without gloo"),
        (
            lambda b: b["profile"].update(nodes=[{"host": "a", "slots": 1}]),
            "its nodes run 1 ranks, but its largest world size is 4",
        ),
        (
            lambda b: b["profile"].update(environment={"NCCL_MAX_CTAS": "1"}),
            "its profile sets other variables than gloo on cpu needs",
        ),
        (
            lambda b: b["profile"].update(world_sizes=[1, 2, 3, 4, 8]),
            "the commands that reproduce it are of another run",
        ),
        (lambda b: b.update(seed=1), "the commands that reproduce it are of another run"),
        (
            lambda b: b.update(environment={"NCCL_ALGO": "Tree"}),
            "the commands that reproduce it are of another run",
        ),
        (
            lambda b: b.update(steps=1200, requested_steps=5000),
            "its long run has 1200 steps, but 5000 were requested",
        ),
        (
            lambda b: b["subject"].update(sha256={"mypkg.hooks": "ef" * 32}),
            "the mypkg/hooks.py that ran is not the file of its module mypkg.hooks",
        ),
        (
            lambda b: b.update(at_scale={"simulated": True, "notes": ["all is well"]}),
            "its notes on simulated ranks are not those of its rules",
        ),
        (
            lambda b: rule_of(b, "2.3")["runs"].update({"values@8": {"verdict": "pass"}}),
            "it has runs at world size 8, which its profile does not list",
        ),
    ],
)
def test_other_profiles_are_found(
    change: Callable[[Body], object], expected: str, body: Body
) -> None:
    lines = found(forged(body, change))
    assert any(expected in line for line in lines), lines


@pytest.mark.parametrize(
    ("date", "expected"),
    [
        ("0001-01-01T00:00:00+14:00", "has a date before the first version of this kit"),
        ("9999-12-31T23:59:59-14:00", "has a date in the future"),
        ("later", "has a date that cannot be read: 'later'"),
        ("2026-11-22T01:45:05", "has a date that cannot be read: '2026-11-22T01:45:05'"),
        ("2025-01-01T00:00:00+00:00", "has a date before the first version of this kit"),
        ("2999-01-01T00:00:00+00:00", "has a date in the future"),
    ],
)
def test_dates_without_a_session_are_found(date: str, expected: str, body: Body) -> None:
    (line,) = found(forged(body, lambda b: b.update(date=date)))
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: ran(b, "2.2", margin=-0.1), "a margin in values@3 that is no fraction of a"),
        (lambda b: ran(b, "2.2", margin=float("nan")), "that is no fraction of a bound: nan"),
        (lambda b: ran(b, "2.2", margin=0.7), "the margin 0.3, but the largest of its runs is 0.7"),
        (lambda b: rule_of(b, "2.2").pop("margin"), "has the margin None, but the largest of its"),
        (lambda b: rule_of(b, "1.1").update(margin=0.1), "the largest of its runs is None"),
        (lambda b: ran(b, "2.3", checks=0), "has 0 checks in values@3, with the verdict 'pass'"),
        (
            lambda b: rule_of(b, "2.8").update(
                verdict="not applicable", reason="it refuses", checks=0, runs={}
            ),
            "missing in its limits: 2.8 Averages or refuses complex parameters: it refuses",
        ),
        (lambda b: b.update(limits=["2.8 x: y"]), "in its limits, but not in its rules: 2.8 x"),
        (lambda b: b.update(advice=["2.8 x: y"]), "in its advice, but not in its rules: 2.8 x"),
    ],
)
def test_rules_and_their_summaries_are_compared(
    change: Callable[[Body], object], expected: str, body: Body
) -> None:
    lines = found(forged(body, change))
    assert any(expected in line for line in lines), lines


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ("everything", "has claims that cannot be read: --claims: 'everything' is not a claim of"),
        ("exact, sum", "has claims that cannot be read: --claims: 'exact, sum': exact contradicts"),
        ("rounded(float16), checkpointable", "11.2 Resumes with the same bits was not judged, but"),
        ("compressed", "13.10 "),
        ("compressed", "13.1 "),
        ("rounded(float16, ratio=0.5)", "13.7 Sends no more than it claims was not judged, but"),
    ],
)
def test_claims_that_the_rules_contradict_are_found(claims: str, expected: str, body: Body) -> None:
    lines = found(forged(body, lambda b: b["claims"].update(text=claims)))
    assert any(expected in line for line in lines), lines


def test_a_rule_that_passed_without_its_claim_is_found(body: Body) -> None:
    made = certificate(claims="rounded(float16), checkpointable")
    lines = found(forged(made, lambda b: b["claims"].update(text="rounded(float16)")))
    assert any("passed, but does not apply under rounded(float16)" in line for line in lines), lines


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda b: b.update(command="--hook 'mypkg"),
            "has a command line that cannot be read",
        ),
        (lambda b: b.update(command="--hook"), "has a command line that cannot be read"),
        (
            lambda b: b.update(command=f"{b['command']} --rule 2.3"),
            "its command line selects rules: --rule 2.3",
        ),
        (
            lambda b: b["subject"].update(state="mypkg:made"),
            "its command line has --state (none), but its subject has mypkg:made",
        ),
        (
            lambda b: b.update(command=f"{b['command']} --averager mypkg:other"),
            "its command line has --averager mypkg:other, but its subject has none",
        ),
        (
            lambda b: b.update(command="--hook mypkg.hooks:half"),
            "its claims are from --claims, which its command line does not have",
        ),
        (
            lambda b: b["subject"].update(module="other"),
            "it certifies mypkg.hooks:half, but its module is other",
        ),
    ],
)
def test_the_command_line_is_compared(
    change: Callable[[Body], object], expected: str, body: Body
) -> None:
    lines = found(forged(body, change))
    assert any(expected in line for line in lines), lines

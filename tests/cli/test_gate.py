"""Tests of the gate, which refuses invalid certificates and those worse than their baseline."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.judging.rule import golden_list
from conformance.judging.verdict import Found
from conformance.subjects.kinds import KINDS
from tests.made_certificates import (
    Body,
    certificate,
    changed,
    claims_of,
    forged,
    ran,
    rule_of,
    without,
    written,
)

MUST = len(golden_list())
NOT_SIGNED = "not checked: unsigned: no signature was given (--signature FILE)"
COVERED = "note: every branch of the subject's own code (1 file) ran"
NOT_CHECKED = f"{NOT_SIGNED}; the subject's sources were not compared (--sources DIR)"


@pytest.fixture(scope="module")
def body() -> Body:
    return certificate()


@pytest.fixture
def gate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str]]]:
    """Run the command; return its exit code and the lines that it prints."""

    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(*arguments: object) -> tuple[int, list[str]]:
        code = main(["gate", *map(str, arguments)])
        printed = capsys.readouterr()
        # Every made certificate has this note.
        lines = (printed.out + printed.err).splitlines()
        return code, [line for line in lines if line != COVERED]

    return run


def both(tmp_path: Path, old: Body, new: Body) -> tuple[object, ...]:
    return "--baseline", written(tmp_path / "old.json", old), written(tmp_path / "new.json", new)


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_passes(kind: str, tmp_path: Path, gate: Any) -> None:
    claims = claims_of(kind)
    path = written(tmp_path / "c.json", certificate("mypkg:subject", claims, kind))
    holds = f"GATE HOLDS  mypkg:subject as {claims}, profile gloo-cpu"
    assert gate(path) == (0, [NOT_CHECKED, holds])
    assert gate("--baseline", path, path) == (0, [NOT_CHECKED, f"{holds}, no worse than {path}"])


@pytest.mark.parametrize("key", ["claims", "date", "certified", "limits", "rules", "profile"])
def test_an_edited_certificate_is_refused(key: str, body: Body, tmp_path: Path, gate: Any) -> None:
    if key in ("claims", "profile"):
        value = {**body[key], "text": "exact", "name": "nccl"}
    elif key == "rules":
        value = body[key][:-1]
    else:
        value = ["1"] if key == "limits" else "1"
    edited = {**body, key: value}
    code, lines = gate(written(tmp_path / "c.json", edited))
    assert code == 1
    assert "was edited: its digest is" in lines[0]


def test_white_space_is_no_edit(body: Body, tmp_path: Path, gate: Any) -> None:
    (tmp_path / "c.json").write_text(json.dumps(body))
    assert gate(tmp_path / "c.json")[0] == 0


def test_a_certificate_that_was_cut_short_anywhere_is_refused(
    body: Body, tmp_path: Path, gate: Any
) -> None:
    text = json.dumps(body, indent=1)
    path = tmp_path / "c.json"
    for length in [0, 1, 2, *range(7, len(text), 211), len(text) - 1]:
        path.write_text(text[:length])
        code, lines = gate(path)
        assert (code, lines[0]) == (1, f"refused: {path}: is cut short: copy it again"), length


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "is no certificate: it is not a JSON object"),
        ("hello", "is no certificate: it is not JSON"),
        ('{"a": nonsense}', "is no certificate: it is not JSON"),
        (
            '{"schema": "https://example.org/other"}',
            "is no certificate: its schema is 'https://example.org/other'",
        ),
        ('{"claims": 1, "claims": 2}', "is no certificate: a key occurs twice in an object"),
        ("[" * 100_000, "is no certificate"),
    ],
)
def test_other_files_are_refused(text: str, expected: str, tmp_path: Path, gate: Any) -> None:
    (tmp_path / "c.json").write_text(text)
    code, lines = gate(tmp_path / "c.json")
    assert code == 1
    assert expected in lines[0]


def test_binary_files_are_refused(tmp_path: Path, gate: Any) -> None:
    (tmp_path / "c.json").write_bytes(b"\x80\x81{}")
    code, lines = gate(tmp_path / "c.json")
    assert code == 1
    assert "it is not text" in lines[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b.update(rules={}), "rules is not a list"),
        (lambda b: b.pop("profile"), "profile is missing"),
        (
            lambda b: b["profile"].update({"world_sizes": ["1"]}),
            "profile.world_sizes[0] is not an integer",
        ),
        (lambda b: b["subject"].update(sha256=["x"]), "subject.sha256 is not an object"),
        (lambda b: b["profile"].update(devices="8"), "profile.devices is not an integer"),
        (lambda b: b["profile"].update(nccl="2.27"), "profile.nccl is not a list"),
        (lambda b: b.pop("date"), "date is missing"),
        (lambda b: b.update(advice="none"), "advice is not a list"),
        (lambda b: b["rules"][0]["runs"].update({"values@1": 3}), "values@1 is not an object"),
        (
            lambda b: b["rules"][0]["runs"]["values@1"].update(margin="low"),
            "rules[0].runs.values@1.margin is not a number",
        ),
        (
            lambda b: b["rules"][0]["runs"]["values@1"].update(
                traffic={"largest": 1, "mean": "low"}
            ),
            "rules[0].runs.values@1.traffic.mean is not a number",
        ),
        (lambda b: b["kit"].update(golden_list="x"), "kit.golden_list: 'x' does not match"),
        (lambda b: b.update(extra=1), "the certificate has entries that the schema does not have"),
        (lambda b: b["rules"][0].update(verdict="fine"), "rules[0].verdict is 'fine', and not one"),
        (lambda b: b["coverage"].pop("files"), "coverage.files is missing"),
        (lambda b: b.pop("certified"), "certified is missing"),
    ],
)
def test_entries_of_the_wrong_type_are_refused(
    change: Callable[[Body], object], expected: str, body: Body, tmp_path: Path, gate: Any
) -> None:
    code, lines = gate(written(tmp_path / "c.json", forged(body, change)))
    assert code == 1
    assert expected in lines[0]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9007199254740993"])
def test_numbers_without_a_canonical_form_are_refused(
    number: str, body: Body, tmp_path: Path, gate: Any
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**body, "steps": "here"}).replace('"here"', number))
    code, lines = gate(path)
    assert code == 1
    assert "is no certificate: it has no canonical JSON by RFC 8785" in lines[0]


def test_another_golden_list_is_refused(body: Body, tmp_path: Path, gate: Any) -> None:
    other = changed(body, lambda b: b["kit"].update({"golden_list": "00" * 32, "version": "0.0.9"}))
    code, lines = gate(written(tmp_path / "c.json", other))
    assert code == 1
    assert (
        "was judged by the golden list 0000000000000000 of kit 0.0.9; "
        "the golden list of this kit is" in lines[0]
    )
    assert lines[0].endswith("; certify again with this kit, or gate with the kit that wrote it")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b.update(certified=False), "it is not marked as certified"),
        (lambda b: without(b, "2.3"), f"1 of {MUST} MUST rules are missing: 2.3"),
        (lambda b: b.update(rules=[]), f"{MUST} of {MUST} MUST rules are missing: 1.1, 1.2"),
        (
            lambda b: rule_of(b, "2.3").update(verdict="not run", checks=0, runs={}),
            "2.3 Gives the mean of gradients from 1e-30",
        ),
        (lambda b: ran(b, "2.3", verdict="fail"), "has the verdict 'fail'"),
        (lambda b: b["profile"].update({"world_sizes": [1, 2, 4]}), "world size 3 was left out"),
    ],
)
def test_a_development_run_is_refused(
    change: Callable[[Body], object], expected: str, body: Body, tmp_path: Path, gate: Any
) -> None:
    code, lines = gate(written(tmp_path / "c.json", changed(body, change)))
    assert code == 1
    assert any("is from a development run" in line and expected in line for line in lines), lines


def test_a_world_size_that_is_listed_but_was_not_run_is_missing(
    body: Body, tmp_path: Path, gate: Any
) -> None:
    def leave_out(b: Body) -> None:
        for rule in b["rules"]:
            if rule["runs"].pop("values@4", None):
                rule["checks"] -= 6

    code, lines = gate(written(tmp_path / "c.json", changed(body, leave_out)))
    assert code == 1
    assert "world size 4 was left out" in lines[0]


def test_world_sizes_below_the_claimed_minimum_are_not_missing(tmp_path: Path, gate: Any) -> None:
    body = certificate(claims="rounded(float16), min_world_size(2)")

    def take_two(b: Body) -> None:
        for rule in b["rules"]:
            if rule["runs"].pop("values@1", None):
                rule["checks"] -= 6

    assert gate(written(tmp_path / "c.json", changed(body, take_two)))[0] == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b["rules"].append(b["rules"][0]), "rule 1.1 is listed more than once"),
        (
            lambda b: rule_of(b, "2.3").update(level="SHOULD"),
            "has the level 'SHOULD'",
        ),
        (
            lambda b: rule_of(b, "2.3")["runs"]["values@1"].update(verdict="fail"),
            "has the verdict 'pass', but its runs have 'fail'",
        ),
        (lambda b: rule_of(b, "2.3").update(checks=1000), "has 1000 checks, but its runs have 24"),
        (
            lambda b: rule_of(b, "2.3").update(checks=0, runs={}),
            "has the verdict 'pass', but no checks",
        ),
        (
            lambda b: b["subject"].update(kind="daemon"),
            "has a kind of subject that this kit does not know: 'daemon'",
        ),
    ],
)
def test_contradictions_are_refused(
    change: Callable[[Body], object], expected: str, body: Body, tmp_path: Path, gate: Any
) -> None:
    code, lines = gate(written(tmp_path / "c.json", changed(body, change)))
    assert code == 1
    assert any(expected in line for line in lines), lines


def test_the_report_of_a_development_run_is_refused(body: Body, tmp_path: Path, gate: Any) -> None:
    report = {key: body[key] for key in ("kit", "subject", "claims", "profile", "rules")}
    path = written(
        tmp_path / "report.json",
        {**report, "verdict": "not certified", "reasons": ["world sizes 1, 3 were left out"]},
    )
    flaw = (
        "is the report of a session, not a certificate "
        "(not certified; world sizes 1, 3 were left out); give certificate.json, which a certified "
        "run writes beside it"
    )
    assert gate(path) == (1, [f"refused: {path}: {flaw}", f"GATE REFUSES  {path}"])


def test_another_profile_than_the_required_one_is_refused(
    body: Body, tmp_path: Path, gate: Any
) -> None:
    path = written(tmp_path / "c.json", body)
    code, lines = gate("--require-profile", "nccl", path)
    assert code == 1
    assert lines[0] == f"refused: {path}: has the profile gloo-cpu, but nccl is required"
    assert gate("--require-profile", "gloo-cpu", path)[0] == 0


WORSE: dict[str, tuple[Callable[[Body], object], str]] = {
    "rule gone": (lambda b: without(b, "9.8"), "lost rule: 9.8 "),
    "rule not applicable": (
        lambda b: rule_of(b, "2.8").update(
            verdict="not applicable", reason="it refuses", checks=0, runs={}
        ),
        "lost rule: 2.8 Averages or refuses complex parameters: passed before, "
        "not applicable (it refuses) now",
    ),
    "rule not run": (
        lambda b: rule_of(b, "10.1").update(verdict="not run", reason="no time", checks=0, runs={}),
        "lost rule: 10.1 ",
    ),
    "advice": (
        lambda b: ran(b, "10.1", verdict="fail", reason="it waits"),
        "lost rule: 10.1 Returns without waiting for its communication: passed before, fail",
    ),
    "margin": (
        lambda b: ran(b, "2.2", margin=0.61),
        "worse margin: 2.2 Gives the mean of random gradients within the bound of a sum "
        "[values@3]: 0.3 of the bound before, 0.61 now: "
        "more than 2 times as much",
    ),
    "margin of an exact result": (
        lambda b: ran(b, "2.1", margin=0.11),
        "0 of the bound before, 0.11 now: more than 2 times as much, counting margins",
    ),
    "compression": (
        lambda b: ran(b, "13.7", "ordered@2", traffic={"largest": 1.0, "mean": 0.5}),
        "lower compression: 13.7 Sends no more than it claims [ordered@2]: "
        "sends a larger share of its bytes, "
        "in the step that sends most: 0.5 before, 1 now",
    ),
    "compression in the mean": (
        lambda b: ran(b, "13.7", "ordered@2", traffic={"largest": 0.5, "mean": 0.51}),
        "in all steps together: 0.5 before",
    ),
    "compression not counted": (
        lambda b: rule_of(b, "13.7")["runs"]["ordered@2"].pop("traffic"),
        "bytes were counted before, and are not now",
    ),
    "claim": (
        lambda b: b["claims"].update(text="exact"),
        "changed claim: rounded(float16) before, exact now",
    ),
    "name": (
        lambda b: b["subject"].update(hook="mypkg.hooks:other"),
        "changed subject: hook mypkg.hooks:half before, mypkg.hooks:other now",
    ),
    "state": (
        lambda b: b["subject"].update(state="mypkg:made,rank=4"),
        "changed subject: state none before, mypkg:made,rank=4 now",
    ),
    "golden list": (
        lambda b: b["kit"].update({"golden_list": "00" * 32}),
        "now; renew the baseline: gate --baseline FILE --renew NEW",
    ),
    "profile": (
        lambda b: b["profile"].update(name="gloo-serialised"),
        "changed profile: gloo-cpu before, gloo-serialised now",
    ),
}


@pytest.mark.parametrize("difference", WORSE)
def test_a_worse_certificate_is_refused(
    difference: str, body: Body, tmp_path: Path, gate: Any
) -> None:
    change, expected = WORSE[difference]
    code, lines = gate(*both(tmp_path, body, changed(body, change)))
    assert code == 1
    assert any(line.startswith("refused: ") and expected in line for line in lines), lines
    assert lines[-1].startswith("GATE REFUSES")


def test_a_changed_kind(tmp_path: Path, gate: Any) -> None:
    code, lines = gate(
        *both(
            tmp_path,
            certificate("mypkg:x", "exact"),
            certificate("mypkg:x", claims_of("wrapper"), "wrapper"),
        )
    )
    assert code == 1
    assert "refused: changed subject: a hook before, a wrapper now" in lines


def test_fewer_world_sizes(body: Body, tmp_path: Path, gate: Any) -> None:
    code, lines = gate(
        *both(tmp_path, changed(body, lambda b: b["profile"]["world_sizes"].append(8)), body)
    )
    assert (code, lines[0]) == (1, "refused: fewer world sizes: 8 before, but not now")


def test_a_run_of_a_rule_that_no_longer_passes_there(body: Body, tmp_path: Path, gate: Any) -> None:
    """A rule that one run rightly refuses is not applicable, in both certificates."""
    refused = {"verdict": "not applicable", "reason": "refused", "checks": 1}
    then = changed(body, lambda b: ran(b, "2.8", "values@2", **refused))
    now = changed(then, lambda b: ran(b, "2.8", "values@3", **refused))
    assert gate(*both(tmp_path, then, then))[0] == 0
    code, lines = gate(*both(tmp_path, then, now))
    assert code == 1
    assert lines[0].endswith("[values@3]: passed before, not applicable (refused) now")


def test_all_differences_are_printed(body: Body, tmp_path: Path, gate: Any) -> None:
    def change(b: Body) -> None:
        for difference in ("claim", "name", "margin", "compression", "advice"):
            WORSE[difference][0](b)

    code, lines = gate(*both(tmp_path, body, changed(body, change)))
    assert code == 1
    assert {line.split(":")[1] for line in lines if line.startswith("refused")} == {
        " changed claim", " changed subject", " worse margin", " lower compression", " lost rule",
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda b: ran(b, "2.2", margin=0.6),  # twice 0.3
        lambda b: ran(b, "2.2", margin=0.0),
        lambda b: ran(b, "2.1", margin=0.1),  # twice the floor
        lambda b: ran(b, "13.7", "ordered@2", traffic={"largest": 0.505, "mean": 0.4}),
        lambda b: b.update(date="2026-11-23T00:00:00+00:00"),
        lambda b: b["rules"].append({**b["rules"][0], "rule": "99.1", "level": "SHOULD"}),
    ],
)
def test_an_equal_or_better_certificate_passes(
    change: Callable[[Body], object], body: Body, tmp_path: Path, gate: Any
) -> None:
    code, lines = gate(*both(tmp_path, body, changed(body, change)))
    assert (code, lines[0], len(lines)) == (0, NOT_CHECKED, 2), lines


def test_other_variables_are_noted_and_pass(body: Body, tmp_path: Path, gate: Any) -> None:
    def set_variables(b: Body) -> None:
        b["environment"] = {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring"}

    code, lines = gate(*both(tmp_path, body, changed(body, set_variables)))
    assert (code, lines[:2]) == (
        0,
        [
            "note: variable GLOO_SOCKET_IFNAME: lo before, (not set) now",
            "note: variable NCCL_ALGO: (not set) before, Ring now",
        ],
    )


def test_other_source_is_noted_and_passes(body: Body, tmp_path: Path, gate: Any) -> None:
    code, lines = gate(
        *both(
            tmp_path,
            body,
            changed(body, lambda b: b["subject"]["sha256"].update({"mypkg.hooks": "cd" * 32})),
        )
    )
    assert (code, lines[0]) == (0, "note: the subject's source has changed: mypkg.hooks")


def test_the_factors_are_options(body: Body, tmp_path: Path, gate: Any) -> None:
    margin = both(tmp_path, body, changed(body, WORSE["margin"][0]))
    assert gate("--margin-factor", 3, *margin)[0] == 0
    assert gate("--margin-floor", 0.5, *margin)[0] == 0
    assert (
        gate("--traffic-factor", 2, *both(tmp_path, body, changed(body, WORSE["compression"][0])))[
            0
        ]
        == 0
    )


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--margin-factor", "-1", "'-1' is not a number of at least 1"),
        ("--margin-factor", "many", "'many' is not a number of at least 1"),
        ("--traffic-factor", "nan", "'nan' is not a number of at least 1"),
        ("--margin-floor", "0", "'0' is not a number above 0, at most 1"),
    ],
)
def test_a_wrong_factor_is_a_usage_error(
    option: str, value: str, expected: str, tmp_path: Path, gate: Any
) -> None:
    line = f"gate: argument {option}: {expected}; see python -m conformance gate --help"
    assert gate(option, value, tmp_path / "c.json") == (4, [line])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-20],
        lambda text: text.replace("rounded(float16)", "exact"),
        lambda text: "{}",
    ],
)
def test_an_invalid_baseline_is_refused(
    spoil: Callable[[str], str], body: Body, tmp_path: Path, gate: Any
) -> None:
    _, old, new = both(tmp_path, body, body)
    assert isinstance(old, Path)
    old.write_text(spoil(old.read_text()))
    code, lines = gate("--baseline", old, new)
    assert code == 1
    assert lines[0].startswith(f"refused: the baseline {old}: ")


def test_a_baseline_of_a_development_run(body: Body, tmp_path: Path, gate: Any) -> None:
    code, lines = gate(*both(tmp_path, changed(body, lambda b: without(b, "2.3")), body))
    assert code == 1
    assert "the baseline" in lines[0]
    assert "is from a development run" in lines[0]


def test_a_baseline_is_made_and_renewed(body: Body, tmp_path: Path, gate: Any) -> None:
    base = tmp_path / "kept" / "base.json"
    new = written(tmp_path / "new.json", body)
    code, lines = gate("--baseline", base, new)
    assert (code, lines) == (
        4,
        [f"gate: {base}: there is no such baseline; --renew makes {new} the baseline"],
    )
    assert gate("--baseline", base, "--renew", new)[0] == 0
    assert base.read_bytes() == new.read_bytes()
    worse = written(tmp_path / "worse.json", changed(body, WORSE["claim"][0]))
    assert gate("--baseline", base, worse)[0] == 1
    code, lines = gate("--baseline", base, "--renew", worse)
    assert code == 0
    assert lines[:2] == [
        "note: changed claim: rounded(float16) before, exact now",
        f"note: {base} is the baseline from now on",
    ]
    assert gate("--baseline", base, worse)[0] == 0


def test_an_invalid_certificate_is_made_no_baseline(body: Body, tmp_path: Path, gate: Any) -> None:
    base = tmp_path / "base.json"
    new = written(tmp_path / "new.json", changed(body, lambda b: without(b, "2.3")))
    assert gate("--baseline", base, "--renew", new)[0] == 1
    assert not base.exists()


def test_a_baseline_without_traffic_is_noted(body: Body, tmp_path: Path, gate: Any) -> None:
    old = changed(body, WORSE["compression not counted"][0])
    code, lines = gate(*both(tmp_path, old, body))
    assert code == 0
    assert (
        lines[0]
        == "note: the baseline has no count of bytes sent; renew it to have compression compared"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("missing.json",),
        ("--renew", "c.json"),
        ("--what", "c.json"),
        ("c.json", "d.json"),
        ("--summary", "/dev/null/s.md", "c.json"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    arguments: tuple[str, ...], body: Body, tmp_path: Path, gate: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "c.json", body)
    code, lines = gate(*arguments)
    assert (code, len(lines)) == (4, 1)
    assert lines[0].startswith("gate: ")


def test_control_characters_do_not_reach_the_terminal(
    body: Body, tmp_path: Path, gate: Any
) -> None:
    now = changed(
        body,
        lambda b: rule_of(b, "2.8").update(
            verdict="not applicable", reason="\x1b[2Jno\nGATE HOLDS", checks=0, runs={}
        ),
    )
    code, lines = gate(*both(tmp_path, body, now))
    assert code == 1
    assert lines[0].endswith("not applicable (\\x1b[2Jno GATE HOLDS) now")
    assert sum(line.startswith("GATE") for line in lines) == 1


# ---- The subject's sources


@pytest.mark.parametrize(
    "place", ["mypkg/hooks.py", "src/mypkg/hooks.py", "mypkg/hooks/__init__.py"]
)
def test_sources_are_compared(place: str, body: Body, tmp_path: Path, gate: Any) -> None:
    source = tmp_path / "project" / place
    source.parent.mkdir(parents=True)
    source.write_text("def half(state, bucket): ...\n")
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    new = written(
        tmp_path / "new.json",
        changed(body, lambda b: b["subject"].update(sha256={"mypkg.hooks": sha256})),
    )
    options = ("--sources", tmp_path / "project", new)
    code, lines = gate(*options)
    assert (code, lines[0]) == (0, NOT_SIGNED)
    source.write_text("def half(state, bucket): pass\n")
    code, lines = gate(*options)
    assert code == 1
    found = hashlib.sha256(source.read_bytes()).hexdigest()
    assert lines[0] == (
        f"refused: {new}: was made for another mypkg.hooks: its digest is {sha256[:16]}, but "
        f"{source} has {found[:16]}"
    )
    source.unlink()
    code, lines = gate(*options)
    assert code == 1
    assert lines[0] == (
        f"refused: {new}: was made for the module mypkg.hooks, which is not in "
        f"{tmp_path / 'project'}"
    )


def test_sources_may_be_in_several_folders(body: Body, tmp_path: Path, gate: Any) -> None:
    digests = {}
    for name in ("mypkg.hooks", "other.setups"):
        path = tmp_path / name.partition(".")[0] / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True)
        path.write_text(f"# {name}\n")
        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    new = written(
        tmp_path / "new.json", changed(body, lambda b: b["subject"].update(sha256=digests))
    )
    code, lines = gate("--sources", tmp_path / "mypkg", new)
    assert code == 1
    assert "the module other.setups, which is not in" in lines[0]
    code, _ = gate("--sources", tmp_path / "mypkg", "--sources", tmp_path / "other", new)
    assert code == 0


def test_a_certificate_without_digests_has_no_sources(
    body: Body, tmp_path: Path, gate: Any
) -> None:
    new = written(tmp_path / "c.json", forged(body, lambda b: b["subject"].update(sha256={})))
    code, lines = gate("--sources", tmp_path, new)
    assert code == 1
    assert "has no digest of the subject's module mypkg.hooks" in lines[0]


def test_the_name_of_a_module_does_not_lead_out_of_the_folder(
    body: Body, tmp_path: Path, gate: Any
) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("")
    sha256 = hashlib.sha256(b"").hexdigest()
    sources = {"/../outside": sha256, "..outside": sha256}
    new = written(tmp_path / "c.json", forged(body, lambda b: b["subject"].update(sha256=sources)))
    (tmp_path / "project").mkdir()
    code, lines = gate("--sources", tmp_path / "project", new)
    assert code == 1
    assert sum("which is not in" in line for line in lines) == 2


def test_sources_need_a_folder(body: Body, tmp_path: Path, gate: Any) -> None:
    new = written(tmp_path / "c.json", body)
    line = f"gate: --sources {tmp_path / 'none'}: there is no such folder"
    assert gate("--sources", tmp_path / "none", new) == (4, [line])


def test_bytes_are_shares_of_those_without_compression() -> None:
    found = Found()
    assert found.traffic is None
    found.sends(100, 400)
    found.sends(400, 400)
    assert found.traffic == {"largest": 1.0, "mean": 0.625}


@pytest.mark.ranks
def test_it_needs_no_torch(body: Body, tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", body)
    blocked = "import sys; sys.modules.update(torch=None, numpy=None, jinja2=None, pytest=None)"
    commands = " or ".join(
        f"main({arguments!r})"
        for arguments in (["gate", "--baseline", str(path), str(path)], ["summary", str(path)])
    )
    statement = f"main(['statement', {str(path)!r}])"
    script = (
        f"{blocked}\nfrom conformance.__main__ import main\nsys.exit({commands} or {statement})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "GATE HOLDS" in done.stdout

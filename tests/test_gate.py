"""What the gate refuses: certificates that are none, and such as are worse than the one before."""

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
from conformance.subjects.kinds import HOOK, KINDS
from tests.certificates import Body, certificate, changed, ran, rule_of, without, written

MUST = len(golden_list())


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
        said = capsys.readouterr()
        return code, (said.out + said.err).splitlines()

    return run


def both(tmp_path: Path, old: Body, new: Body) -> tuple[object, ...]:
    return "--baseline", written(tmp_path / "old.json", old), written(tmp_path / "new.json", new)


@pytest.mark.parametrize("kind", [HOOK, *KINDS])
def test_a_certificate_passes(kind: str, tmp_path: Path, gate: Any) -> None:
    path = written(tmp_path / "c.json", certificate("mypkg:subject", "exact", kind))
    assert gate(path) == (0, ["GATE HOLDS  mypkg:subject as exact, profile gloo-cpu"])
    assert gate("--baseline", path, path) == (
        0,
        [f"GATE HOLDS  mypkg:subject as exact, profile gloo-cpu, no worse than {path}"],
    )


@pytest.mark.parametrize("key", ["claims", "date", "certified", "limits", "rules", "profile"])
def test_one_that_was_edited(key: str, body: Body, tmp_path: Path, gate: Any) -> None:
    edited = {
        **body,
        key: body[key][:-1]
        if isinstance(body[key], list) and body[key]
        else {**body, "x": 1}.get("x"),
    }
    if key in ("claims", "profile"):
        edited[key] = {**body[key], "text": "exact", "name": "nccl"}
    code, lines = gate(written(tmp_path / "c.json", edited))
    assert code == 1
    assert "was edited: its digest is" in lines[0]


def test_white_space_is_no_edit(body: Body, tmp_path: Path, gate: Any) -> None:
    (tmp_path / "c.json").write_text(json.dumps(body))
    assert gate(tmp_path / "c.json")[0] == 0


def test_one_that_was_cut_short_anywhere(body: Body, tmp_path: Path, gate: Any) -> None:
    text = json.dumps(body, indent=1)
    path = tmp_path / "c.json"
    for length in [0, 1, 2, *range(7, len(text), 211), len(text) - 1]:
        path.write_text(text[:length])
        code, lines = gate(path)
        assert (code, lines[0]) == (1, f"refused: {path}: is cut short"), length


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is no certificate: it holds no object"),
        ("hello", "is no certificate: it is not JSON"),
        ('{"a": nonsense}', "is no certificate: it is not JSON"),
        (
            '{"schema": "https://example.org/other"}',
            "is no certificate: its schema is 'https://example.org/other'",
        ),
        ('{"claims": 1, "claims": 2}', "is no certificate: it says something twice"),
        ("[" * 100_000, "is no certificate"),
    ],
)
def test_what_is_no_certificate(text: str, said: str, tmp_path: Path, gate: Any) -> None:
    (tmp_path / "c.json").write_text(text)
    code, lines = gate(tmp_path / "c.json")
    assert code == 1
    assert said in lines[0]


def test_what_is_no_text(tmp_path: Path, gate: Any) -> None:
    (tmp_path / "c.json").write_bytes(b"\x80\x81{}")
    code, lines = gate(tmp_path / "c.json")
    assert code == 1
    assert "it is not text" in lines[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b.update(rules={}), "rules is no list"),
        (lambda b: b.pop("profile"), "profile is no object"),
        (
            lambda b: b["profile"].update({"world sizes": ["1"]}),
            "one of world sizes of profile is no int",
        ),
        (lambda b: b["subject"].update(sha256=["x"]), "sha256 of subject cannot be read"),
        (lambda b: b["rules"][0]["runs"].update({"values@1": 3}), "cannot be read"),
        (lambda b: b["rules"][0]["runs"]["values@1"].update(margin="low"), "cannot be read"),
        (
            lambda b: b["rules"][0]["runs"]["values@1"].update(traffic={"mean": "low"}),
            "cannot be read",
        ),
    ],
)
def test_what_has_another_shape(
    change: Callable[[Body], object], said: str, body: Body, tmp_path: Path, gate: Any
) -> None:
    code, lines = gate(written(tmp_path / "c.json", changed(body, change)))
    assert code == 1
    assert said in lines[0]


def test_another_golden_list(body: Body, tmp_path: Path, gate: Any) -> None:
    other = changed(body, lambda b: b["kit"].update({"golden list": "00" * 32, "version": "0.0.9"}))
    code, lines = gate(written(tmp_path / "c.json", other))
    assert code == 1
    assert (
        "was judged by the golden list 0000000000000000 of kit 0.0.9; that of this kit is"
        in lines[0]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b.update(certified=False), "it does not say that it is certified"),
        (lambda b: b.pop("certified"), "it does not say that it is certified"),
        (lambda b: without(b, "2.3"), f"1 of {MUST} MUST rules are not in it: 2.3"),
        (lambda b: b.update(rules=[]), f"{MUST} of {MUST} MUST rules are not in it: 1.1, 1.2"),
        (
            lambda b: rule_of(b, "2.3").update(verdict="not run", checks=0, runs={}),
            "2.3 gradients from 1e-30 to 1e30 in one bucket",
        ),
        (lambda b: ran(b, "2.3", verdict="fail"), "is a MUST rule and said to be 'fail'"),
        (lambda b: b["profile"].update({"world sizes": [1, 2, 4]}), "world size 3 was left out"),
    ],
)
def test_a_development_run(
    change: Callable[[Body], object], said: str, body: Body, tmp_path: Path, gate: Any
) -> None:
    code, lines = gate(written(tmp_path / "c.json", changed(body, change)))
    assert code == 1
    assert any("is of a development run" in line and said in line for line in lines), lines


def test_a_world_size_that_is_listed_and_was_not_run(body: Body, tmp_path: Path, gate: Any) -> None:
    def leave_out(b: Body) -> None:
        for rule in b["rules"]:
            if rule["runs"].pop("values@4", None):
                rule["checks"] -= 6

    code, lines = gate(written(tmp_path / "c.json", changed(body, leave_out)))
    assert code == 1
    assert "world size 4 was left out" in lines[0]


def test_fewer_ranks_than_it_takes_are_not_missed(body: Body, tmp_path: Path, gate: Any) -> None:
    def take_two(b: Body) -> None:
        b["claims"]["text"] += ", min_world_size(2)"
        for rule in b["rules"]:
            if rule["runs"].pop("values@1", None):
                rule["checks"] -= 6

    assert gate(written(tmp_path / "c.json", changed(body, take_two)))[0] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b["rules"].append(b["rules"][0]), "rule 1.1 is in it twice"),
        (
            lambda b: rule_of(b, "2.3").update(level="SHOULD"),
            "is a MUST rule, and said to be 'SHOULD'",
        ),
        (
            lambda b: rule_of(b, "2.3")["runs"]["values@1"].update(verdict="fail"),
            "is said to be 'pass', and by its runs it is 'fail'",
        ),
        (lambda b: rule_of(b, "2.3").update(checks=1000), "said to have made 1000 checks"),
        (
            lambda b: rule_of(b, "2.3").update(checks=0, runs={}),
            "is said to hold, and nothing was checked",
        ),
        (
            lambda b: b["subject"].update(kind="daemon"),
            "a kind of subject that this kit does not know: 'daemon'",
        ),
    ],
)
def test_what_contradicts_itself(
    change: Callable[[Body], object], said: str, body: Body, tmp_path: Path, gate: Any
) -> None:
    code, lines = gate(written(tmp_path / "c.json", changed(body, change)))
    assert code == 1
    assert any(said in line for line in lines), lines


def test_the_report_of_a_development_run(body: Body, tmp_path: Path, gate: Any) -> None:
    report = {key: body[key] for key in ("kit", "subject", "claims", "profile", "rules")}
    path = written(
        tmp_path / "report.json",
        {**report, "verdict": "not certified", "reasons": ["world size 1, 3 was left out"]},
    )
    said = "is the report of a session, which is no certificate (not certified; world size 1, 3 was left out)"
    assert gate(path) == (1, [f"refused: {path}: {said}", f"GATE REFUSES  {path}"])


def test_another_profile_than_is_required(body: Body, tmp_path: Path, gate: Any) -> None:
    path = written(tmp_path / "c.json", body)
    code, lines = gate("--require-profile", "nccl", path)
    assert code == 1
    assert lines[0] == f"refused: {path}: is of the profile gloo-cpu, and nccl is required"
    assert gate("--require-profile", "gloo-cpu", path)[0] == 0


WORSE: dict[str, tuple[Callable[[Body], object], str]] = {
    "rule gone": (lambda b: without(b, "9.8"), "lost rule: 9.8 "),
    "rule not applicable": (
        lambda b: rule_of(b, "2.8").update(
            verdict="not applicable", reason="it refuses", checks=0, runs={}
        ),
        "lost rule: 2.8 complex parameters, or a clear refusal: passed then, not applicable (it refuses) now",
    ),
    "rule not run": (
        lambda b: rule_of(b, "10.1").update(verdict="not run", reason="no time", checks=0, runs={}),
        "lost rule: 10.1 ",
    ),
    "advice": (
        lambda b: ran(b, "10.1", verdict="fail", reason="it waits"),
        "lost rule: 10.1 does not wait inside the hook: passed then, fail",
    ),
    "margin": (
        lambda b: ran(b, "2.2", margin=0.61),
        "worse margin: 2.2 random gradients give the mean within the bound of a sum [values@3]: 0.3 of the bound then, 0.61 now: "
        "more than 2 times as much",
    ),
    "margin of what was exact": (
        lambda b: ran(b, "2.1", margin=0.11),
        "0 of the bound then, 0.11 now: more than 2 times as much, where less",
    ),
    "margin that is no number": (
        lambda b: ran(b, "2.2", margin=float("nan")),
        "worse margin: 2.2 ",
    ),
    "compression": (
        lambda b: ran(b, "13.7", "ordered@2", traffic={"largest": 1.0, "mean": 0.5}),
        "lower compression: 13.7 it sends no more than it says [ordered@2]: sends more of its bytes, "
        "in the step that sends most: 0.5 then, 1 now",
    ),
    "compression in the mean": (
        lambda b: ran(b, "13.7", "ordered@2", traffic={"largest": 0.5, "mean": 0.51}),
        "in all steps together: 0.5 then",
    ),
    "compression not counted": (
        lambda b: rule_of(b, "13.7")["runs"]["ordered@2"].pop("traffic"),
        "bytes were counted then, and are not now",
    ),
    "claim": (
        lambda b: b["claims"].update(text="exact"),
        "changed claim: rounded(float16) then, exact now",
    ),
    "name": (
        lambda b: b["subject"].update(hook="mypkg.hooks:other"),
        "changed subject: hook mypkg.hooks:half then, mypkg.hooks:other now",
    ),
    "state": (
        lambda b: b["subject"].update(state="mypkg:made,rank=4"),
        "changed subject: state none then, mypkg:made,rank=4 now",
    ),
    "golden list": (lambda b: b["kit"].update({"golden list": "00" * 32}), "renew the baseline"),
    "profile": (
        lambda b: b["profile"].update(name="gloo-serialised"),
        "another profile: gloo-cpu then, gloo-serialised now",
    ),
}


@pytest.mark.parametrize("what", WORSE)
def test_what_is_worse(what: str, body: Body, tmp_path: Path, gate: Any) -> None:
    change, said = WORSE[what]
    code, lines = gate(*both(tmp_path, body, changed(body, change)))
    assert code == 1
    assert any(line.startswith("refused: ") and said in line for line in lines), lines
    assert lines[-1].startswith("GATE REFUSES")


def test_a_changed_kind(tmp_path: Path, gate: Any) -> None:
    code, lines = gate(
        *both(tmp_path, certificate("mypkg:x", "exact"), certificate("mypkg:x", "exact", "wrapper"))
    )
    assert code == 1
    assert "refused: changed subject: a hook then, a wrapper now" in lines


def test_fewer_world_sizes(body: Body, tmp_path: Path, gate: Any) -> None:
    code, lines = gate(
        *both(tmp_path, changed(body, lambda b: b["profile"]["world sizes"].append(8)), body)
    )
    assert (code, lines[0]) == (1, "refused: fewer world sizes: 8 is not among those now")


def test_a_run_of_a_rule_that_no_longer_passes_there(body: Body, tmp_path: Path, gate: Any) -> None:
    """Both are certificates: of a rule that is refused by right in one of its runs, the verdict is "not applicable" both times."""
    refused = {"verdict": "not applicable", "reason": "refused", "checks": 1}
    then = changed(body, lambda b: ran(b, "2.8", "values@2", **refused))
    now = changed(then, lambda b: ran(b, "2.8", "values@3", **refused))
    assert gate(*both(tmp_path, then, then))[0] == 0
    code, lines = gate(*both(tmp_path, then, now))
    assert code == 1
    assert lines[0].endswith("[values@3]: passed then, not applicable (refused) now")


def test_all_differences_are_said(body: Body, tmp_path: Path, gate: Any) -> None:
    def change(b: Body) -> None:
        for what in ("claim", "name", "margin", "compression", "advice"):
            WORSE[what][0](b)

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
        lambda b: b.update(date="later"),
        lambda b: b["rules"].append({**b["rules"][0], "rule": "99.1", "level": "SHOULD"}),
    ],
)
def test_what_is_no_worse(
    change: Callable[[Body], object], body: Body, tmp_path: Path, gate: Any
) -> None:
    code, lines = gate(*both(tmp_path, body, changed(body, change)))
    assert (code, len(lines)) == (0, 1), lines


def test_other_source_is_said_and_passes(body: Body, tmp_path: Path, gate: Any) -> None:
    code, lines = gate(
        *both(
            tmp_path,
            body,
            changed(body, lambda b: b["subject"]["sha256"].update({"mypkg.hooks": "cd" * 32})),
        )
    )
    assert (code, lines[0]) == (0, "note: the subject's source is another: mypkg.hooks")


def test_the_factors_are_the_callers(body: Body, tmp_path: Path, gate: Any) -> None:
    margin = both(tmp_path, body, changed(body, WORSE["margin"][0]))
    assert gate("--margin-factor", 3, *margin)[0] == 0
    assert gate("--margin-floor", 0.5, *margin)[0] == 0
    assert (
        gate("--traffic-factor", 2, *both(tmp_path, body, changed(body, WORSE["compression"][0])))[
            0
        ]
        == 0
    )
    for wrong in (
        ("--margin-factor", "0.5"),
        ("--margin-floor", "0"),
        ("--traffic-factor", "nan"),
        ("--margin-factor", "many"),
    ):
        assert gate(*wrong, *margin)[0] == 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-20],
        lambda text: text.replace("rounded(float16)", "exact"),
        lambda text: "{}",
    ],
)
def test_a_baseline_that_is_none(
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
    assert "is of a development run" in lines[0]


def test_a_baseline_is_made_and_renewed(body: Body, tmp_path: Path, gate: Any) -> None:
    base, new = tmp_path / "kept" / "base.json", written(tmp_path / "new.json", body)
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
        "note: changed claim: rounded(float16) then, exact now",
        f"note: {base} is the baseline from now on",
    ]
    assert gate("--baseline", base, worse)[0] == 0


def test_no_baseline_is_made_of_what_is_no_certificate(
    body: Body, tmp_path: Path, gate: Any
) -> None:
    base, new = (
        tmp_path / "base.json",
        written(tmp_path / "new.json", changed(body, lambda b: without(b, "2.3"))),
    )
    assert gate("--baseline", base, "--renew", new)[0] == 1
    assert not base.exists()


def test_a_baseline_without_traffic_is_said_to_be_old(
    body: Body, tmp_path: Path, gate: Any
) -> None:
    old = changed(body, WORSE["compression not counted"][0])
    code, lines = gate(*both(tmp_path, old, body))
    assert code == 0
    assert (
        lines[0]
        == "note: the baseline does not say how many bytes were sent: renew it to have compression compared"
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
def test_what_cannot_be_run_as_written(
    arguments: tuple[str, ...], body: Body, tmp_path: Path, gate: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "c.json", body)
    code, lines = gate(*arguments)
    assert (code, len(lines)) == (4, 1)
    assert lines[0].startswith("gate: ")


def test_what_it_prints_does_not_steer_the_terminal(body: Body, tmp_path: Path, gate: Any) -> None:
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


def test_bytes_are_shares_of_those_without_compression() -> None:
    found = Found()
    assert found.traffic is None
    found.sends(100, 400)
    found.sends(400, 400)
    assert found.traffic == {"largest": 1.0, "mean": 0.625}


def test_it_needs_no_torch(body: Body, tmp_path: Path) -> None:
    path = written(tmp_path / "c.json", body)
    blocked = "import sys; sys.modules.update(torch=None, numpy=None, jinja2=None, pytest=None)"
    commands = " or ".join(
        f"main({arguments!r})"
        for arguments in (["gate", "--baseline", str(path), str(path)], ["summary", str(path)])
    )
    script = f"{blocked}\nfrom conformance.__main__ import main\nsys.exit({commands} or main(['statement', {str(path)!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "GATE HOLDS" in done.stdout

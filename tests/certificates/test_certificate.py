"""Tests that a certificate certifies nothing that was not run."""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from conformance.certificates.canonical import digest
from conformance.certificates.certificate import REQUIRED_WORLDS, conclude
from conformance.certificates.versions import SCHEMA
from conformance.errors import (
    CERTIFIED,
    KIT_ERROR,
    NO_RULES,
    NOT_CERTIFIED,
    REFUSED,
    KitError,
    UsageError,
)
from conformance.judging.rule import Rule, golden_list
from conformance.judging.verdict import Judgement, Verdict
from conformance.records.files import write_json
from conformance.session.certify import certify
from conformance.session.options import Options
from conformance.session.results import (
    ResultPaths,
    require_writable,
    results_folder,
    set_aside,
)
from conformance.subjects.spec import SubjectSpec


def judgements(rules: dict[str, Rule], **changed: Verdict) -> dict[str, Judgement]:
    verdicts = {
        number.replace("_", "."): verdict
        for number, verdict in ((key[1:], value) for key, value in changed.items())
    }
    return {number: Judgement(number, verdicts.get(number, Verdict.PASS)) for number in rules}


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, CERTIFIED),
        ({"_2_8": Verdict.NOT_APPLICABLE}, CERTIFIED),
        ({"_8_6": Verdict.FAIL}, CERTIFIED),  # SHOULD
        ({"_2_8": Verdict.NOT_RUN}, NOT_CERTIFIED),
        ({"_2_8": Verdict.FAIL}, REFUSED),
        ({"_2_8": Verdict.FAIL, "_2_9": Verdict.NOT_RUN}, REFUSED),
        ({"_2_8": Verdict.FAIL, "_2_9": Verdict.KIT_ERROR}, KIT_ERROR),
        ({"_8_6": Verdict.KIT_ERROR}, KIT_ERROR),
    ],
)
def test_the_worst_verdict_decides(
    rules: dict[str, Rule], changed: dict[str, Verdict], code: int
) -> None:
    conclusion = conclude(rules, judgements(rules, **changed), {}, REQUIRED_WORLDS)
    assert conclusion.exit_code == code
    assert (conclusion.certificate is not None) == (code == CERTIFIED)


def test_every_golden_rule_must_have_been_judged(rules: dict[str, Rule]) -> None:
    for number in golden_list():
        some = judgements(rules)
        del some[number]
        conclusion = conclude(rules, some, {}, REQUIRED_WORLDS)
        assert conclusion.exit_code == NOT_CERTIFIED
        assert number in conclusion.reasons[0]


def test_every_required_world_size_must_have_been_run(rules: dict[str, Rule]) -> None:
    conclusion = conclude(rules, judgements(rules), {}, (2, 4))
    assert conclusion.exit_code == NOT_CERTIFIED
    assert conclusion.reasons == ["world sizes 1, 3 were left out"]
    assert conclude(rules, judgements(rules), {}, (1, 2, 3, 4, 8)).exit_code == CERTIFIED


def test_a_session_that_was_interrupted_certifies_nothing(rules: dict[str, Rule]) -> None:
    """A subject that takes a node down now and then must not be certified by trying again."""
    reason = "values@4 was interrupted: node 1 (bert), ranks 2, 3: its process ended"
    conclusion = conclude(rules, judgements(rules), {}, REQUIRED_WORLDS, interrupted=[reason])
    assert (conclusion.exit_code, conclusion.certificate, conclusion.reasons) == (
        NOT_CERTIFIED,
        None,
        [reason],
    )
    assert (
        conclude(
            rules, judgements(rules, _2_8=Verdict.FAIL), {}, REQUIRED_WORLDS, interrupted=[reason]
        ).exit_code
        == REFUSED
    )


def test_a_session_without_rules_has_no_verdict(rules: dict[str, Rule]) -> None:
    assert conclude(rules, {}, {}, REQUIRED_WORLDS).exit_code == NO_RULES


def test_an_edit_changes_the_digest(rules: dict[str, Rule]) -> None:
    certificate = conclude(
        rules, judgements(rules), {"claims": {"text": "sum"}}, REQUIRED_WORLDS
    ).certificate
    assert certificate is not None
    again = json.loads(json.dumps(certificate))
    assert digest(again) == again["digest"]
    again["claims"]["text"] = "exact"
    assert digest(again) != again["digest"]


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    with pytest.raises(TypeError):
        write_json(path, {"not": object()})
    assert not path.exists()
    with pytest.raises(KitError, match="cannot write"):
        write_json(tmp_path / "missing" / "certificate.json", {})


def test_only_files_of_the_kit_are_set_aside(tmp_path: Path) -> None:
    mine, previous, other = (
        tmp_path / name for name in ("mine.json", "mine.previous.json", "other.json")
    )
    for day in ("monday", "tuesday"):
        mine.write_text(json.dumps({"schema": SCHEMA, "date": day}))
        assert set_aside(ResultPaths(mine, tmp_path / "reports")) == [
            f"the certificate of an earlier run is now {previous}"
        ]
        assert not mine.exists()
        assert json.loads(previous.read_text())["date"] == day
    other.write_text(json.dumps({"precious": True}))
    for path in (other, tmp_path / "absent.json", tmp_path, Path("/dev/full")):
        assert set_aside(ResultPaths(path, tmp_path / "reports")) == []
    assert other.exists()
    mine.write_text(json.dumps({"schema": SCHEMA}))
    previous.write_text("precious")
    with pytest.raises(UsageError, match="is in the way"):
        set_aside(ResultPaths(mine, tmp_path / "reports"))
    assert previous.read_text() == "precious"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/proc/c.json", "cannot be written (in /proc: No such file or directory)"),
        ("/proc/x/c.json", "the folder /proc/x cannot be made (No such file or directory)"),
        ("file/x/c.json", "cannot be written ({}/file is not a folder)"),
        ("file/c.json", "cannot be written ({}/file is not a folder)"),
        ("folder", "cannot be written (it is a folder)"),
        ("/dev/full", "cannot be written (it is no regular file)"),
        (f"{'n' * 300}/c.json", "cannot be written (File name too long)"),
        (f"new/{'n' * 300}.json", "cannot be written (in {}: File name too long)"),
        (f"{'n' * 300}.json", "cannot be written (File name too long)"),
    ],
)
def test_the_reason_why_a_certificate_cannot_be_written(
    tmp_path: Path, place: str, reason: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    path = tmp_path / place
    assert set_aside(ResultPaths(path, tmp_path / "reports")) == []
    with pytest.raises(UsageError) as caught:
        require_writable(path)
    assert str(caught.value) == (
        f"--certificate {path}: {reason.format(tmp_path)}; choose another path with --certificate"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


def test_a_place_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "folder" / "c.json")
    require_writable(tmp_path / "c.json")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_has_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = SimpleNamespace(f_blocks=100, f_bavail=0)
    monkeypatch.setattr("os.statvfs", lambda _: space)
    with pytest.raises(UsageError, match="no space left"):
        require_writable(tmp_path / "c.json")
    space.f_blocks = 0  # such a file system counts nothing
    require_writable(tmp_path / "c.json")


def test_editors_know_the_options_of_certify() -> None:
    parameters = inspect.signature(certify).parameters
    own = {"hook", "options", "results"}
    given = {name: one for name, one in parameters.items() if name not in own}
    assert list(given) == [option.name for option in fields(Options)][1:]
    hints = get_type_hints(Options)
    for option in fields(Options)[1:]:
        assert given[option.name].default == option.default
        assert given[option.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert get_type_hints(certify)[option.name] == hints[option.name]


def test_a_misspelt_option_of_certify_is_named() -> None:
    given: dict[str, Any] = {"clams": "sum"}
    with pytest.raises(TypeError, match=r"certify\(\) got an unexpected keyword argument 'clams'"):
        certify("mypkg:mean", **given)


def unknown_world_size() -> None:
    certify("mypkg:mean", world_size="two")


def nameless() -> None:
    certify(lambda state, bucket: None)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (unknown_world_size, "--world-size two: not a list of numbers, e.g. 1,2,3,4"),
        (nameless, "has no name that ranks could import; pass 'module:attribute'"),
    ],
)
def test_a_failed_call_of_certify_shows_the_callers_line(
    call: Callable[[], None], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        call()
    assert text in str(caught.value)
    assert caught.value.__cause__ is None
    shown = caught.traceback.filter(caught)
    assert [entry.path.name for entry in shown] == [Path(__file__).name] * 2


def test_each_combination_of_settings_has_a_folder() -> None:
    def folder(target: str, state: str | None = None, claims: str | None = None) -> str:
        return results_folder(SubjectSpec(hook=target, state=state), claims).name

    assert folder("mypkg.hooks:my_hook") == "mypkg.hooks_my_hook"
    assert folder("mypkg:half", claims="sum") == "mypkg_half-sum"
    assert re.fullmatch(
        r"mypkg_half-pg-rounded_float16_-[0-9a-f]{8}",
        folder("mypkg:half", "pg", "rounded(float16)"),
    )
    alike = [
        ("a:b,c=(1,2)",),
        ("a:b,c=[1,2]",),
        ("a:b", "m:f,c=1"),
        ("a:b", "m:f,c_1"),
        ("a:b,c=1",),
        ("a:b", None, "c=1"),
        ("a:b",),
    ]
    long = [
        ("a:" + "b" * 300,),
        ("a:" + "b" * 301,),
        ("a:b", "m:" + "f" * 300),
        ("a:b", "m:" + "f" * 301),
    ]
    names = [folder(*given) for given in alike + long]
    assert len(set(names)) == len(names)
    assert max(len(name) for name in names) < 250

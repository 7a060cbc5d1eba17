"""A certificate says no more than what was run."""

import json
from pathlib import Path

import pytest

from conformance.certificates.certificate import REQUIRED_WORLDS, SCHEMA, conclude, digest, remove_stale
from conformance.errors import CERTIFIED, KIT_ERROR, NO_RULES, NOT_CERTIFIED, REFUSED, KitError
from conformance.judging.rule import Rule, golden_list
from conformance.judging.verdict import Judgement, Verdict
from conformance.records.files import write_json


def judgements(rules: dict[str, Rule], **changed: Verdict) -> dict[str, Judgement]:
    verdicts = {number.replace("_", "."): verdict for number, verdict in ((key[1:], value) for key, value in changed.items())}
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
def test_the_worst_verdict_decides(rules: dict[str, Rule], changed: dict[str, Verdict], code: int) -> None:
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
    assert conclusion.reasons == ["world size 1, 3 was left out"]
    assert conclude(rules, judgements(rules), {}, (1, 2, 3, 4, 8)).exit_code == CERTIFIED


def test_a_session_that_was_interrupted_certifies_nothing(rules: dict[str, Rule]) -> None:
    """Though all of it was judged in the end: a subject that takes a node down now and then must not be certified by trying again."""
    said = "values@4 was interrupted: node 1 (bert), ranks 2, 3: its process ended"
    conclusion = conclude(rules, judgements(rules), {}, REQUIRED_WORLDS, interrupted=[said])
    assert (conclusion.exit_code, conclusion.certificate, conclusion.reasons) == (NOT_CERTIFIED, None, [said])
    assert conclude(rules, judgements(rules, _2_8=Verdict.FAIL), {}, REQUIRED_WORLDS, interrupted=[said]).exit_code == REFUSED


def test_nothing_judged_is_nothing(rules: dict[str, Rule]) -> None:
    assert conclude(rules, {}, {}, REQUIRED_WORLDS).exit_code == NO_RULES


def test_an_edit_shows(rules: dict[str, Rule]) -> None:
    certificate = conclude(rules, judgements(rules), {"claims": {"text": "sum"}}, REQUIRED_WORLDS).certificate
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


def test_only_its_own_stale_certificate_is_removed(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    mine.write_text(json.dumps({"schema": SCHEMA}))
    other.write_text(json.dumps({"precious": True}))
    assert remove_stale(mine)
    assert not mine.exists()
    assert not remove_stale(other)
    assert other.exists()
    assert not remove_stale(tmp_path / "absent.json")

"""Tests of `compare`: several results side by side."""

import json
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.certificates.matrix import as_html, as_markdown, as_text, matrix_of
from conformance.errors import CertificateError, UsageError
from tests.made_certificates import Body, certificate, forged


def refused(body: Body, number: str) -> Body:
    """Return the report of a subject that fails a rule."""

    def fail(other: Body) -> None:
        other["verdict"] = "refused"
        rule = next(rule for rule in other["rules"] if rule["rule"] == number)
        rule["verdict"] = "fail"

    return forged(body, fail)


HALF = certificate()
EXACT = certificate("mypkg.hooks:exact", "exact")
WRONG = refused(certificate("mypkg.hooks:<b>wrong</b>|", "exact"), "2.1")


def test_only_differences_are_shown() -> None:
    text = as_text(matrix_of([HALF, EXACT, WRONG]), all_rules=False)
    lines = text.splitlines()
    assert lines[:3] == [
        "[1] mypkg.hooks:half",
        "[2] mypkg.hooks:exact",
        "[3] mypkg.hooks:<b>wrong</b>|",
    ]
    [verdict] = [line.split() for line in lines if line.startswith("verdict")]
    assert verdict == ["verdict", "CERTIFIED", "CERTIFIED", "REFUSED"]
    [failed] = [line.split() for line in lines if line.startswith("2.1 ")]
    assert failed == ["2.1", "holds", "holds", "FAILS"]
    assert not any(line.startswith("1.1 ") for line in lines)
    assert "rules in which the subjects do not differ are left out (--all)" in lines[-1]


def test_all_rules_are_shown_if_asked_for() -> None:
    matrix = matrix_of([HALF, EXACT])
    assert any(line.startswith("1.1 ") for line in as_text(matrix, all_rules=True).splitlines())
    assert len(matrix.shown(all_rules=True)) == len(HALF["rules"])


def test_a_margin_stands_beside_the_verdict_and_is_no_difference() -> None:
    row = next(row for row in matrix_of([HALF, EXACT]).rules if row.label == "2.2")
    assert row.cells == ("holds 0.3", "holds 0.3")
    assert not row.differs


def test_a_subjects_name_is_no_markup() -> None:
    matrix = matrix_of([WRONG, HALF])
    page = as_html(matrix, all_rules=True)
    assert "<b>wrong" not in page
    assert "&lt;b&gt;wrong" in page
    assert "`mypkg.hooks:<b>wrong</b>\\|`" in as_markdown(matrix, all_rules=True)


def test_the_command_reads_certificates_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    report = {key: value for key, value in WRONG.items() if key not in ("schema", "digest")}
    for name, body in (("a", EXACT), ("b", report)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(body))
        paths.append(str(path))
    assert main(["compare", *paths]) == 0
    assert "2.1" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["compare", *paths, "--format", "html", "--output", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")


def test_a_file_that_is_no_result_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no.json"
    path.write_text("{}")
    assert main(["compare", str(path)]) == CertificateError.exit_code
    assert main(["compare", str(tmp_path / "none.json")]) == UsageError.exit_code
    assert main(["compare"]) == UsageError.exit_code
    assert len(capsys.readouterr().err.strip().splitlines()) == 3

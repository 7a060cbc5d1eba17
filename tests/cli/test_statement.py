"""Tests of the in-toto statement.

Statements are parsed by the specification's own protocol buffers, so that every field has to be one
of the specification's, and nothing is added.
"""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.test_result.v0.test_result_pb2 import TestResult as Predicate
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementPb

from conformance.__main__ import main
from conformance.certificates.certificate import kit_identity
from conformance.certificates.in_toto import PREDICATE_TYPE
from tests.cli.test_summary import report
from tests.made_certificates import Body, certificate, changed, ran, rule_of, written

RESULTS = ("PASSED", "WARNED", "FAILED")
LISTS = ("passedTests", "warnedTests", "failedTests")


def state(path: Path, capsys: Any, *options: object) -> Body:
    assert main(["statement", str(path), *map(str, options)]) == 0
    made: Body = json.loads(capsys.readouterr().out)
    return made


def lint(made: Body) -> None:
    """Check a statement by spec/v1/statement.md and spec/predicates/test-result.md.

    Raises:
        ValueError, json_format.ParseError: it does not follow the specification.
    """
    # Parsing refuses fields that the protocol buffers do not have, and values of other types.
    Statement.copy_from_pb(json_format.ParseDict(made, StatementPb())).validate()
    predicate = json_format.ParseDict(made["predicate"], Predicate())
    for described in predicate.configuration:
        ResourceDescriptor.copy_from_pb(described).validate()
    names = [subject.get("name") for subject in made["subject"]]
    required = {
        "the type of the predicate": made["predicateType"]
        == "https://in-toto.io/attestation/test-result/v0.1",
        "a result": made["predicate"].get("result") in RESULTS,
        "a configuration": isinstance(made["predicate"].get("configuration"), list),
        "uri, digest or content in each descriptor": all(
            {"uri", "digest", "content"} & one.keys() for one in made["predicate"]["configuration"]
        ),
        "unique names": len(names) == len(set(names)),
        "digests in hex": all(
            re.fullmatch("[0-9a-f]{64}", one["digest"]["sha256"]) for one in made["subject"]
        ),
    }
    if missing := [name for name, holds in required.items() if not holds]:
        raise ValueError(f"no {missing}")


def test_a_certificate(tmp_path: Path, capsys: Any) -> None:
    body = certificate()
    path = written(tmp_path / "certificate.json", body)
    made = state(path, capsys, "--url", "https://ci.example.org/runs/7")
    lint(made)
    predicate = made["predicate"]
    assert made["subject"] == [{"name": "mypkg.hooks", "digest": {"sha256": "ab" * 32}}]
    assert predicate["result"] == "PASSED"
    assert predicate["url"] == "https://ci.example.org/runs/7"
    assert predicate["passedTests"][0] == "1.1 Registers as it is"
    assert len(predicate["passedTests"]) == sum(rule["verdict"] == "pass" for rule in body["rules"])
    assert not predicate["warnedTests"] + predicate["failedTests"]
    file, golden, run = predicate["configuration"]
    assert file == {
        "name": "certificate.json",
        "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "mediaType": "application/json",
    }
    assert golden["digest"]["sha256"] == kit_identity()["golden_list"]
    content = base64.b64decode(run["content"])
    assert len(content) < 1024  # the limit of the specification
    assert run["digest"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert json.loads(content)["claims"]["text"] == "rounded(float16)"


def test_advice_is_a_warning(tmp_path: Path, capsys: Any) -> None:
    body = changed(certificate(), lambda b: ran(b, "10.1", verdict="fail"))
    made = state(written(tmp_path / "c.json", body), capsys)
    lint(made)
    assert made["predicate"]["result"] == "WARNED"
    warned = made["predicate"]["warnedTests"]
    assert warned == ["10.1 Returns without waiting for its communication"]


def test_a_refusal(tmp_path: Path, capsys: Any) -> None:
    made = state(written(tmp_path / "report.json", report(certificate())), capsys)
    lint(made)
    assert made["predicate"]["result"] == "FAILED"
    assert made["predicate"]["failedTests"] == [
        "2.2 Gives the mean of random gradients within the bound of a sum"
    ]


def test_tested_files_are_the_subjects(tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "c.json", certificate())
    wheel = tmp_path / "x.whl"
    other = tmp_path / "sub" / "x.whl"
    other.parent.mkdir()
    wheel.write_bytes(b"wheel")
    other.write_bytes(b"other")
    made = state(path, capsys, "--subject-file", wheel)
    lint(made)
    assert made["subject"] == [
        {"name": "x.whl", "digest": {"sha256": hashlib.sha256(b"wheel").hexdigest()}}
    ]
    both = state(path, capsys, "--subject-file", wheel, "--subject-file", other)
    lint(both)
    assert [one["name"] for one in both["subject"]] == [str(wheel), str(other)]


def test_the_parts_that_a_signer_takes(tmp_path: Path, capsys: Any) -> None:
    """actions/attest makes the statement itself, from the predicate and the subjects.

    It reads the subjects in the format of sha256sum.
    """
    path = written(tmp_path / "c.json", certificate())
    whole = state(path, capsys)
    files = {name: tmp_path / "made" / name for name in ("output", "predicate", "checksums")}
    assert (
        main(
            [
                "statement",
                str(path),
                *(word for name, file in files.items() for word in (f"--{name}", str(file))),
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == ""
    assert json.loads(files["output"].read_text()) == whole
    assert json.loads(files["predicate"].read_text()) == whole["predicate"]
    assert files["checksums"].read_text() == f"{'ab' * 32}  mypkg.hooks\n"


@pytest.mark.parametrize(
    ("body", "code", "expected"),
    [
        (lambda: {**certificate(), "date": "never"}, 1, "was edited"),
        (
            lambda: changed(certificate(), lambda b: b["rules"].pop(0)),
            1,
            "is from a development run",
        ),
        (
            lambda: report(
                certificate(), verdict="not certified", reasons=["world size 1 was left out"]
            ),
            1,
            "nothing to state: the verdict is 'not cert",
        ),
        (
            lambda: report(certificate(), verdict="kit error"),
            1,
            "nothing to state: the verdict is 'kit error'",
        ),
        (
            lambda: report(certificate(), verdict="certified"),
            1,
            "is a report; state the certificate instead",
        ),
        (
            lambda: changed(certificate(), lambda b: b["subject"].update(sha256={})),
            4,
            "name the tested files with --subject-file",
        ),
    ],
)
def test_other_results_are_not_stated(
    body: Any, code: int, expected: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["statement", str(written(tmp_path / "c.json", body()))]) == code
    assert expected in capsys.readouterr().err


def test_a_missing_file_is_a_usage_error(tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "c.json", certificate())
    assert main(["statement", str(path), "--subject-file", str(tmp_path / "no.whl")]) == 4
    assert "no.whl: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "spoil",
    [
        lambda made: made.update(_type="https://in-toto.io/Statement/v0.1"),
        lambda made: made.update(subject=[]),
        lambda made: made["subject"][0].pop("digest"),
        lambda made: made.update(predicateType="https://in-toto.io/attestation/test-result/v1"),
        lambda made: made["predicate"].update(result="CERTIFIED"),
        lambda made: made["predicate"].update(margins={}),
        lambda made: made["predicate"].update(passedTests="all"),
        lambda made: made["predicate"].pop("configuration"),
        lambda made: made["predicate"]["configuration"].append({"annotations": {"a": 1}}),
    ],
)
def test_the_lint_finds_broken_statements(spoil: Any, tmp_path: Path, capsys: Any) -> None:
    made = state(written(tmp_path / "c.json", certificate()), capsys)
    lint(made)
    spoil(made)
    with pytest.raises((ValueError, KeyError, json_format.ParseError)):
        lint(made)


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, None),
        (
            {
                "GITHUB_SERVER_URL": "https://github.com",
                "GITHUB_REPOSITORY": "a/b",
                "GITHUB_RUN_ID": "7",
            },
            "https://github.com/a/b/actions/runs/7",
        ),
        ({"CI_JOB_URL": "https://gitlab.com/a/b/-/jobs/7"}, "https://gitlab.com/a/b/-/jobs/7"),
        (
            {"BUILDKITE_BUILD_URL": "https://buildkite.com/a/b/builds/7"},
            "https://buildkite.com/a/b/builds/7",
        ),
    ],
)
def test_the_url_is_that_of_the_job(
    environment: dict[str, str], url: str | None, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    for name in ("GITHUB_RUN_ID", "CI_JOB_URL", "BUILDKITE_BUILD_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert state(written(tmp_path / "c.json", certificate()), capsys)["predicate"].get("url") == url


def test_names() -> None:
    assert PREDICATE_TYPE == "https://in-toto.io/attestation/test-result/v0.1"
    assert rule_of(certificate(), "1.1")["title"] == "Registers as it is"

"""Tests that certificates fit their JSON Schema, real ones among them."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from conformance.__main__ import main
from conformance.certificates.canonical import digest, portable
from conformance.certificates.flaws import flaws
from conformance.certificates.reader import read_certificate
from conformance.certificates.schema import FILE, misfit
from conformance.certificates.versions import SCHEMA, upgraded, version_of
from conformance.errors import CertificateError
from conformance.scenarios.environment import KIT_ENVIRONMENT, relevant_environment
from conformance.session.options import add_options, options_of
from conformance.session.request import read_request
from conformance.subjects.kinds import KINDS
from tests import ROOT
from tests.made_certificates import Body, certificate, claims_of, forged, of_version_1, written

CONTENT = json.loads(FILE.read_text(encoding="utf-8"))


# ---- The schema itself


def objects(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema of an object, with its place."""
    if isinstance(schema, dict):
        if "properties" in schema and "type" in schema:
            yield place, schema
        for key, inner in schema.items():
            yield from objects(inner, f"{place}/{key}")


def test_the_schema_is_valid_and_has_the_id_of_certificates() -> None:
    Draft202012Validator.check_schema(CONTENT)
    assert CONTENT["$id"] == SCHEMA == CONTENT["properties"]["schema"]["const"]


def test_every_object_is_closed_and_every_entry_is_described() -> None:
    for place, schema in objects(CONTENT):
        assert schema["additionalProperties"] is False, place
        assert set(schema["required"]) <= set(schema["properties"]), place
        for name, entry in schema["properties"].items():
            assert name == name.lower(), (place, name)
            assert " " not in name, (place, name)
            assert entry.get("description"), (place, name)


def test_the_page_describes_every_entry() -> None:
    page = (ROOT / "docs" / "certificate.md").read_text(encoding="utf-8")
    missing = [name for name in CONTENT["properties"] if f"`{name}`" not in page]
    assert missing == []


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == CONTENT


# ---- Made certificates


@pytest.mark.parametrize("kind", KINDS)
def test_certificates_of_every_kind_fit(kind: str) -> None:
    assert misfit(certificate("mypkg:subject", claims_of(kind), kind)) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b["kit"].pop("source_sha256"), "kit.source_sha256 is missing"),
        (lambda b: b["subject"].update(sha256={"m": "ab"}), "subject.sha256.m: 'ab' does not"),
        (lambda b: b["profile"].update(world_sizes=[2, 2]), "profile.world_sizes: [2, 2] has non"),
        (lambda b: b.update(seed=-1), "seed: -1 is less than the minimum of 0"),
        (lambda b: b.update(seed=True), "seed is not an integer"),
        (lambda b: b["coverage"].update(measured=False), "coverage.reason is missing"),
        (lambda b: b["subject"].update(state=3), "subject.state is not a string or null"),
        (
            lambda b: b["claims"].update({"said by": "me"}),
            "claims has entries that the schema does not have: 'said by'",
        ),
    ],
)
def test_misfits_are_named(change: Callable[[Body], object], expected: str) -> None:
    found = misfit(forged(certificate(), change))
    assert found is not None
    assert found.startswith(expected)


# ---- Real certificates

REAL = {
    "averager": ("--averager", "hooks_ref:PeriodicModelAverager,period=4"),
    # Certificates of compressors have the same entries, and take some minutes longer.
    "rounding hook": (
        *("--hook", "hooks_ref:fp16_compress_hook"),
        *("--claims", "rounded(float16, ratio=0.5)"),
    ),
}


# test_command_line.py holds the certificate of a hook to the schema in every run.
@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.rarely) for name in REAL]
)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of a subject, from a whole run."""
    folder = tmp_path_factory.mktemp("real")
    variables = {"NCCL_DEBUG": "WARN", "TORCH_API_TOKEN": "secret", "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "conformance", "certify", *REAL[request.param]),
            *("--certificate", "c.json", "--deadline", "600", "-p", "no:cacheprovider"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        text=True,
        check=False,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "c.json"


@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_real_certificates_fit(real: Path) -> None:
    body = json.loads(real.read_text(encoding="utf-8"))
    assert list(Draft202012Validator(CONTENT).iter_errors(body)) == []
    assert body["digest"] == digest(body)
    assert flaws(read_certificate(real)) == []
    # What the user set, and what ranks had: the kit gives each rank one thread.
    environment = body["environment"]
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "secret" not in real.read_text(encoding="utf-8")
    assert {*environment} >= {name for name in KIT_ENVIRONMENT if not name.startswith("PYTHON")}


@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_the_commands_repeat_the_run(real: Path) -> None:
    body = json.loads(real.read_text(encoding="utf-8"))
    (command,) = body["reproduce"]
    before, _, options = command.partition(" pytest --pyargs conformance ")
    assert "NCCL_DEBUG=WARN" in before
    assert "OMP_NUM_THREADS" not in before
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument)
    request = read_request(options_of(parser.parse_args(shlex.split(options))))
    assert request.seed == body["seed"]
    assert list(request.world_sizes) == body["profile"]["world_sizes"]
    assert str(request.claims) == body["claims"]["text"]
    assert request.profile.backend == body["profile"]["backend"]
    assert request.subject.kind == body["subject"]["kind"]


# ---- Version 1


def test_a_real_certificate_of_version_1_is_read() -> None:
    path = Path(__file__).parent / "version_1.json"
    read = read_certificate(path)
    assert read.version == 1
    assert read.worlds == (1, 2, 3, 4)
    assert read.body["claims"]["declared_by"] == "the arguments of the target"
    assert read.body["schema"] == SCHEMA


@pytest.mark.parametrize("command", ["gate", "summary", "compare", "statement"])
def test_every_command_reads_version_1(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    path = written(tmp_path / "c.json", of_version_1(certificate()))
    assert main([command, str(path)]) == 0
    printed = capsys.readouterr()
    note = "the certificate has the format of version 1"
    assert note in (printed.out if command == "gate" else printed.err)


def test_both_versions_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "old.json", of_version_1(certificate()))
    new = written(tmp_path / "new.json", certificate())
    assert main(["gate", "--baseline", str(old), str(new)]) == 0
    assert main(["gate", "--baseline", str(new), str(old)]) == 0


def test_an_edit_of_version_1_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = of_version_1(certificate())
    body["claims"]["text"] = "exact"
    assert main(["gate", str(written(tmp_path / "c.json", body))]) == 1
    assert "was edited: its digest is" in capsys.readouterr().out


def test_upgrading_leaves_version_2_alone() -> None:
    body = certificate()
    assert upgraded(body) == body
    assert (version_of(body), version_of(of_version_1(body))) == (2, 1)


def test_a_later_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = forged(certificate(), lambda b: b.update(schema="urn:ddp-conformance:certificate:3"))
    assert main(["gate", str(written(tmp_path / "c.json", body))]) == 1
    assert "but this kit reads versions 1 and 2" in capsys.readouterr().out


# ---- Digests and environments


def test_the_digest_is_of_canonical_json() -> None:
    body = {"b": [1.0, 1e21, "é"], "a": None, "digest": "other"}
    assert digest(body) == digest({"a": None, "b": [1, 10**21 * 1.0, "\u00e9"]})
    with pytest.raises(CertificateError, match="no canonical JSON"):
        digest({"a": float("nan")})
    with pytest.raises(CertificateError, match="no canonical JSON"):
        digest({"a": "\ud800"})


def test_every_text_and_number_becomes_portable() -> None:
    given = {"a": ("\udcff", 2**60, float("inf"), True, 3)}
    assert portable(given) == {"a": ["\\udcff", str(2**60), "inf", True, 3]}
    digest(portable(given))


def test_the_environment_has_no_secrets() -> None:
    given = {
        "NCCL_ALGO": "Ring",
        "TORCH_API_TOKEN": "t",
        "NCCL_PROXY": "http://me:word@host",
        "CUDA_VISIBLE_DEVICES": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "HOME": "/root",
    }
    assert relevant_environment(given) == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_ALGO": "Ring"}

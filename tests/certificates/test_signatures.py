"""Tests that the gate takes a signature of a trusted signer only, and of this certificate only."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from tests.gpg_keys import Signer, made_signer
from tests.made_certificates import certificate, changed, ran, written
from tests.made_sigstore import IDENTITY, ISSUER, Sigstore

Gate = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def stranger() -> Iterator[Signer]:
    """A key that nobody trusts."""
    with made_signer("Stranger") as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "certificate.json", certificate())


@pytest.fixture
def gate(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Run the gate on the certificate; return its exit code and the lines it prints."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(*options: object) -> tuple[int, list[str]]:
        code = main(["gate", *map(str, options), str(path)])
        printed = capsys.readouterr()
        return code, (printed.out + printed.err).splitlines()

    return run


def stated(path: Path) -> Path:
    """Write the in-toto statement of a certificate."""
    statement = path.with_name("statement.json")
    assert main(["statement", "--output", str(statement), str(path)]) == 0
    return statement


# ---- GnuPG


def test_a_signature_by_a_trusted_key_is_accepted(path: Path, signer: Signer, gate: Gate) -> None:
    code, lines = gate("--signature", signer.sign(path), "--key", signer.public_key)
    assert code == 0
    assert any(line.startswith("note: signed by Kit <kit@example.org>, key ") for line in lines)
    assert not any("unsigned" in line for line in lines)


def test_a_keyring_is_trusted(path: Path, signer: Signer, gate: Gate) -> None:
    keyring = signer.home / "pubring.kbx"
    assert gate("--signature", signer.sign(path), "--keyring", keyring)[0] == 0


def test_a_signature_by_another_key_is_refused(
    path: Path, signer: Signer, stranger: Signer, gate: Gate
) -> None:
    signature = stranger.sign(path)
    code, lines = gate("--signature", signature, "--key", signer.public_key)
    assert code == 1
    reason = "signature error, no public key"
    assert lines[0] == f"refused: {signature}: is no trusted signature of {path}: {reason}"


def test_a_signature_of_another_file_is_refused(path: Path, signer: Signer, gate: Gate) -> None:
    signature = signer.sign(path)
    path.write_text(path.read_text() + "\n")
    code, lines = gate("--signature", signature, "--key", signer.public_key)
    assert code == 1
    assert lines[0].endswith("certificate.json: signature bad")


def test_one_bad_signature_among_several_is_refused(
    path: Path, signer: Signer, stranger: Signer, gate: Gate
) -> None:
    signature = signer.sign(path)
    good = signature.read_text()
    signature.write_text(stranger.sign(path).read_text() + good)
    assert gate("--signature", signature, "--key", signer.public_key)[0] == 1


def test_a_file_that_is_no_signature_is_refused(path: Path, signer: Signer, gate: Gate) -> None:
    signature = path.with_name("c.asc")
    signature.write_text("hello")
    code, lines = gate("--signature", signature, "--key", signer.public_key)
    assert code == 1
    assert "is no trusted signature of" in lines[0]


def test_a_signed_file_that_is_no_certificate_is_refused(
    path: Path, signer: Signer, gate: Gate
) -> None:
    path.write_text("{}")
    code, lines = gate("--signature", signer.sign(path), "--key", signer.public_key)
    assert code == 1
    assert lines[0].endswith("is no certificate: its schema is None")


def test_a_signed_statement_is_accepted(path: Path, signer: Signer, gate: Gate) -> None:
    statement = stated(path)
    signature = signer.sign(statement)
    options = ("--signature", signature, "--statement", statement, "--key", signer.public_key)
    assert gate(*options)[0] == 0


def test_a_statement_of_another_certificate_is_refused(
    path: Path, signer: Signer, gate: Gate
) -> None:
    statement = stated(path)
    signature = signer.sign(statement)
    other = changed(certificate(), lambda b: ran(b, "2.2", margin=0.31))
    written(path, other)
    options = ("--signature", signature, "--statement", statement, "--key", signer.public_key)
    code, lines = gate(*options)
    assert code == 1
    assert "statement.json: is the statement of another certificate: none of" in lines[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.update(predicateType="other"), "is not the in-toto statement of a test"),
        (lambda s: s["predicate"].update(result="FAILED"), "of a certified subject"),
        (lambda s: s["predicate"].update(configuration=3), "of another certificate"),
        (lambda s: s["predicate"].update(configuration=[3, {"digest": 3}]), "another certificate"),
    ],
)
def test_a_statement_of_something_else_is_refused(
    change: Callable[[Any], object], expected: str, path: Path, signer: Signer, gate: Gate
) -> None:
    statement = stated(path)
    body = json.loads(statement.read_text())
    change(body)
    statement.write_text(json.dumps(body))
    signature = signer.sign(statement)
    options = ("--signature", signature, "--statement", statement, "--key", signer.public_key)
    code, lines = gate(*options)
    assert code == 1
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "name the trusted key with --key FILE, or a keyring with --keyring FILE"),
        (("--key", "missing"), "gate: missing: cannot be read (No such file or directory)"),
        (("--key", "c.asc"), "gate: --key c.asc: holds no public key of GnuPG"),
    ],
)
def test_a_signature_needs_a_key(
    options: tuple[str, ...],
    expected: str,
    path: Path,
    signer: Signer,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(path.parent)
    signer.sign(path).rename("c.asc")
    code, lines = gate("--signature", "c.asc", *options)
    assert (code, len(lines)) == (4, 1)
    assert expected in lines[0]


# ---- Sigstore


@pytest.fixture(scope="module")
def sigstore() -> Sigstore:
    return Sigstore()


@pytest.fixture
def trusted(sigstore: Sigstore, path: Path) -> tuple[object, ...]:
    """The options that trust the instance, and its signer."""
    root = sigstore.write_trusted_root(path.with_name("root.json"))
    return "--identity", IDENTITY, "--issuer", ISSUER, "--trusted-root", root


def test_a_bundle_of_the_certificate_is_accepted(
    path: Path, sigstore: Sigstore, trusted: tuple[object, ...], gate: Gate
) -> None:
    code, lines = gate("--signature", sigstore.sign(path), *trusted)
    assert code == 0
    assert f"note: signed by {IDENTITY}, identified by {ISSUER}" in lines


def test_a_bundle_of_the_statement_is_accepted(
    path: Path, sigstore: Sigstore, trusted: tuple[object, ...], gate: Gate
) -> None:
    """GitHub's attestations have this form: the bundle contains the statement."""
    assert gate("--signature", sigstore.attest(stated(path)), *trusted)[0] == 0


def test_a_bundle_of_a_statement_as_a_file_is_accepted(
    path: Path, sigstore: Sigstore, trusted: tuple[object, ...], gate: Gate
) -> None:
    statement = stated(path)
    bundle = sigstore.sign(statement)
    assert gate("--signature", bundle, "--statement", statement, *trusted)[0] == 0


def test_a_bundle_of_another_certificate_is_refused(
    path: Path, sigstore: Sigstore, trusted: tuple[object, ...], gate: Gate
) -> None:
    bundles = [sigstore.sign(path), sigstore.attest(stated(path))]
    written(path, changed(certificate(), lambda b: ran(b, "2.2", margin=0.31)))
    expected = ["is no trusted signature of", "is the statement of another certificate"]
    for bundle, reason in zip(bundles, expected, strict=True):
        code, lines = gate("--signature", bundle, *trusted)
        assert code == 1
        assert reason in lines[0]


@pytest.mark.parametrize(
    ("option", "value"), [("--identity", "other@example.org"), ("--issuer", "https://other.org")]
)
def test_a_bundle_of_another_signer_is_refused(
    option: str,
    value: str,
    path: Path,
    sigstore: Sigstore,
    trusted: tuple[object, ...],
    gate: Gate,
) -> None:
    code, lines = gate("--signature", sigstore.sign(path), *trusted, option, value)
    assert code == 1
    assert "is no trusted signature of" in lines[0]


def test_a_bundle_of_another_instance_is_refused(
    path: Path, trusted: tuple[object, ...], gate: Gate
) -> None:
    code, lines = gate("--signature", Sigstore().sign(path), *trusted)
    assert code == 1
    assert "is no trusted signature of" in lines[0]


def test_without_a_trusted_root_the_public_instance_is_trusted(
    path: Path, sigstore: Sigstore, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has the root of the public instance, which did not sign this bundle."""
    monkeypatch.setenv("HOME", str(path.parent))
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    options = ("--identity", IDENTITY, "--issuer", ISSUER)
    code, lines = gate("--signature", sigstore.sign(path), *options)
    assert code == 1
    assert "is no trusted signature of" in lines[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b.clear(), "is no Sigstore bundle"),
        (lambda b: b.update(mediaType="other"), "is no Sigstore bundle"),
        (
            lambda b: b["verificationMaterial"]["tlogEntries"][0].update(integratedTime="9"),
            "is no trusted signature of",
        ),
        (lambda b: b["messageSignature"].update(signature="AAAA"), "is no trusted signature of"),
    ],
)
def test_a_damaged_bundle_is_refused(
    change: Callable[[Any], object],
    expected: str,
    path: Path,
    sigstore: Sigstore,
    trusted: tuple[object, ...],
    gate: Gate,
) -> None:
    bundle = sigstore.sign(path)
    body = json.loads(bundle.read_text())
    change(body)
    bundle.write_text(json.dumps(body))
    code, lines = gate("--signature", bundle, *trusted)
    assert code == 1
    assert expected in lines[0]


def test_an_envelope_of_something_else_is_refused(
    path: Path, sigstore: Sigstore, trusted: tuple[object, ...], gate: Gate
) -> None:
    code, lines = gate("--signature", sigstore.attest(path, "text/plain"), *trusted)
    assert code == 1
    assert "signs 'text/plain', which is no in-toto statement" in lines[0]


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"mediaType": "other"}'])
def test_a_trusted_root_that_cannot_be_used_is_a_usage_error(
    content: str | None,
    path: Path,
    sigstore: Sigstore,
    trusted: tuple[object, ...],
    gate: Gate,
) -> None:
    root = path.with_name("other.json")
    if content is not None:
        root.write_text(content)
    code, lines = gate("--signature", sigstore.sign(path), *trusted, "--trusted-root", root)
    assert (code, len(lines)) == (4, 1)


# ---- The command line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--signature", "none.asc"), "gate: none.asc: cannot be read (No such file"),
        (("--key", "k.asc"), "gate: --key: name the signature too, with --signature FILE"),
        (("--trusted-root", "r"), "gate: --trusted-root: name the signature too, with --signature"),
        (("--signature", "b.json"), "is a Sigstore bundle; name the trusted signer with"),
        (("--signature", "b.json", "--identity", "me"), "name the trusted signer with --identity"),
    ],
)
def test_usage_errors_have_one_line(
    options: tuple[str, ...],
    expected: str,
    path: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(path.parent)
    (path.parent / "b.json").write_text("{}")
    code, lines = gate(*options)
    assert (code, len(lines)) == (4, 1)
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("module", "content", "options"),
    [
        ("gnupg", "signature", ("--key", "c.json")),
        ("sigstore", "{}", ("--identity", "me", "--issuer", "https://example.org")),
    ],
)
@pytest.mark.ranks
def test_a_missing_library_is_named(
    module: str, content: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    written(tmp_path / "c.json", certificate())
    (tmp_path / "s").write_text(content)
    script = (
        f"import sys; sys.modules.update({module}=None, torch=None)\n"
        "from conformance.__main__ import main\n"
        f"sys.exit(main(['gate', '--signature', 's', *{options!r}, 'c.json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    install = "python -m pip install '/path/to/the/clone[sign]'"
    assert f"is not installed; install it with: {install}" in done.stderr

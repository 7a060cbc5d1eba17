"""Signatures of certificates: GnuPG's detached ones, and Sigstore's bundles.

The digest in a certificate reveals an accident. Only a signature proves the origin, and only to a
reader who names the trusted signer: a key for GnuPG, an identity and its issuer for Sigstore. The
libraries ``python-gnupg`` and ``sigstore`` verify; the kit's extra ``sign`` installs them, and
they are imported on use. This module imports no torch.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.certificates.in_toto import PASSED, PREDICATE_TYPE, STATEMENT_TYPE, WARNED
from conformance.errors import CertificateError, UsageError

_INSTALL = "install it with: python -m pip install '/path/to/the/clone[sign]'"
# The media type of in-toto statements in a Sigstore bundle.
_IN_TOTO = "application/vnd.in-toto+json"


@dataclass(frozen=True)
class Trust:
    """The signers that a reader trusts.

    Attributes:
        keys: files with public keys of GnuPG.
        keyring: a keyring of GnuPG, whose keys are all trusted.
        identity: the signer of a Sigstore bundle: an address of e-mail, or of a CI workflow.
        issuer: the OpenID Connect provider that vouches for the identity.
        root: a file with Sigstore's trusted root; without it the public good instance is trusted,
            as the library's own cache has it.
    """

    keys: tuple[Path, ...] = ()
    keyring: Path | None = None
    identity: str | None = None
    issuer: str | None = None
    root: Path | None = None


def verify_signature(
    certificate: Path, signature: Path, trust: Trust, statement: Path | None = None
) -> str:
    """Verify the signature of a certificate, or of an in-toto statement of the certificate.

    Args:
        certificate: the file of the certificate.
        signature: a detached signature of GnuPG, or a Sigstore bundle.
        trust: the trusted signers.
        statement: the signed statement, if the signature is of a statement. A Sigstore bundle of
            a statement contains the statement.

    Returns:
        The signer, in words.

    Raises:
        UsageError: a file cannot be read, a library is missing, or no signer is trusted.
        CertificateError: the signature is not a trusted signer's, or not of this certificate.
    """
    signed = statement or certificate
    content = _read(signature)
    if content.lstrip().startswith(b"{"):
        signer = _verify_bundle(certificate, signed, content, signature, trust)
    else:
        signer = _verify_gpg(signed, signature, trust)
    if statement is not None:
        _require_statement_of(certificate, _json_object(_read(statement), statement), statement)
    return signer


# ---- GnuPG


def _verify_gpg(signed: Path, signature: Path, trust: Trust) -> str:
    if not trust.keys and not trust.keyring:
        raise UsageError(
            f"--signature {signature}: is a signature of GnuPG; name the trusted key with "
            "--key FILE, or a keyring with --keyring FILE"
        )
    try:
        import gnupg
    except ImportError as error:
        raise UsageError(f"--signature: python-gnupg is not installed; {_INSTALL}") from error
    for path in (signed, *trust.keys, *([trust.keyring] if trust.keyring else [])):
        _read(path)
    with tempfile.TemporaryDirectory(prefix="conformance-gpg-") as home:
        # A home of its own: keys that this machine's user trusts for mail are not trusted here.
        try:
            gpg = gnupg.GPG(
                gnupghome=home, keyring=str(trust.keyring.absolute()) if trust.keyring else None
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"--signature: gpg cannot be run ({error})") from error
        for key in trust.keys:
            if not gpg.import_keys_file(str(key)).fingerprints:
                raise UsageError(f"--key {key}: holds no public key of GnuPG")
        with open(signature, "rb") as file:
            verified = gpg.verify_file(file, str(signed.absolute()), close_file=False)
    # A file may hold several signatures: one bad signature among them is a reason to refuse.
    if not verified.valid or not verified.fingerprint or verified.problems:
        reasons = [str(problem["status"]) for problem in verified.problems]
        reason = ", ".join(reasons) or str(verified.status or "it is no signature")
        raise CertificateError(f"{signature}: is no trusted signature of {signed}: {reason}")
    return f"{verified.username}, key {verified.pubkey_fingerprint or verified.fingerprint}"


# ---- Sigstore


def _verify_bundle(
    certificate: Path, signed: Path, content: bytes, path: Path, trust: Trust
) -> str:
    if not trust.identity or not trust.issuer:
        raise UsageError(
            f"--signature {path}: is a Sigstore bundle; name the trusted signer with --identity "
            "and --issuer"
        )
    try:
        from sigstore.errors import Error
        from sigstore.models import Bundle, InvalidBundle, TrustedRoot
        from sigstore.verify import Verifier
        from sigstore.verify.policy import Identity
    except ImportError as error:
        raise UsageError(f"--signature: sigstore is not installed; {_INSTALL}") from error
    # The library warns whenever it is used without a network, which is the rule here.
    logging.getLogger("sigstore").setLevel(logging.ERROR)
    body = _read(signed)
    try:
        bundle = Bundle.from_json(content)
    except InvalidBundle as error:
        raise CertificateError(f"{path}: is no Sigstore bundle: {_first_line(error)}") from error
    try:
        if trust.root:
            _read(trust.root)
            verifier = Verifier(trusted_root=TrustedRoot.from_file(str(trust.root)))
        else:
            verifier = Verifier.production(offline=True)
    except (Error, ValueError, OSError) as error:
        raise UsageError(f"--trusted-root: cannot be used: {_first_line(error)}") from error
    policy = Identity(identity=trust.identity, issuer=trust.issuer)
    # A bundle holds a signed statement in an envelope, or the signature of a file.
    has_envelope = "dsseEnvelope" in json.loads(content)
    try:
        if has_envelope:
            media_type, payload = verifier.verify_dsse(bundle, policy)
        else:
            verifier.verify_artifact(body, bundle, policy)
    except (Error, ValueError) as error:
        reason = _first_line(error)
        raise CertificateError(f"{path}: is no trusted signature of {signed}: {reason}") from error
    if has_envelope:
        if media_type != _IN_TOTO:
            raise CertificateError(f"{path}: signs {media_type!r}, which is no in-toto statement")
        _require_statement_of(certificate, _json_object(payload, path), path)
    return f"{trust.identity}, identified by {trust.issuer}"


# ---- Statements


def _require_statement_of(certificate: Path, statement: Mapping[str, Any], path: Path) -> None:
    """Refuse a statement of another result, or of another certificate.

    Raises:
        CertificateError: the statement does not name the certificate, or is no test result.
    """
    if statement.get("_type") != STATEMENT_TYPE or statement.get("predicateType") != PREDICATE_TYPE:
        raise CertificateError(f"{path}: is not the in-toto statement of a test result")
    predicate = statement.get("predicate")
    if not isinstance(predicate, Mapping) or predicate.get("result") not in (PASSED, WARNED):
        raise CertificateError(f"{path}: is not the statement of a certified subject")
    expected = hashlib.sha256(_read(certificate)).hexdigest()
    configuration = predicate.get("configuration")
    entries = configuration if isinstance(configuration, list) else []
    if not any(_sha256_of(entry) == expected for entry in entries):
        raise CertificateError(
            f"{path}: is the statement of another certificate: none of its files has the digest "
            f"{expected[:16]} of {certificate}"
        )


def _sha256_of(entry: Any) -> Any:
    """Return the digest in a resource descriptor; None if there is none."""
    digests = entry.get("digest") if isinstance(entry, Mapping) else None
    return digests.get("sha256") if isinstance(digests, Mapping) else None


# ---- Files


def _json_object(content: bytes, path: Path) -> dict[str, Any]:
    try:
        read = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{path}: holds no JSON") from error
    if not isinstance(read, dict):
        raise CertificateError(f"{path}: holds no JSON object")
    return read


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

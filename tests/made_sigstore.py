"""A Sigstore instance in memory: a certificate authority and two logs, without a network.

It signs as Fulcio and Rekor do, so that the library ``sigstore`` verifies its bundles against the
trusted root that this module writes. Sources: RFC 6962 (timestamps of certificates and hashes of
leaves), github.com/secure-systems-lab/dsse (envelopes), and github.com/sigstore/protobuf-specs.
"""

import base64
import datetime
import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
ROOT = "application/vnd.dev.sigstore.trustedroot+json;version=0.1"
IN_TOTO = "application/vnd.in-toto+json"
IDENTITY = "ci@example.org"
ISSUER = "https://issuer.example.org"
ORIGIN = "log.example.org"

_OIDC_ISSUER = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_TIMESTAMPS = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_BEGIN = datetime.datetime(2026, 11, 22, tzinfo=datetime.timezone.utc)
_DAY = datetime.timedelta(days=1)


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass
class Sigstore:
    """An instance with an authority, a log of certificates, and a log of signatures."""

    authority_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    certificates_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    signatures_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)

    def __post_init__(self) -> None:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        public = self.authority_key.public_key()
        self.authority = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .serial_number(1)
            .not_valid_before(_BEGIN - _DAY)
            .not_valid_after(_BEGIN + 3650 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.authority_key, hashes.SHA256())
        )

    def write_trusted_root(self, path: Path) -> Path:
        """Write the file that makes the instance trusted."""
        start = {"start": (_BEGIN - _DAY).isoformat()}
        chain = [{"rawBytes": _base64(_der(self.authority))}]
        authority = {
            "subject": {"organization": "example.org", "commonName": "authority"},
            "uri": "https://authority.example.org",
            "certChain": {"certificates": chain},
            "validFor": start,
        }
        root = {
            "mediaType": ROOT,
            "tlogs": [_log(self.signatures_key, start)],
            "certificateAuthorities": [authority],
            "ctlogs": [_log(self.certificates_key, start)],
        }
        path.write_text(json.dumps(root))
        return path

    def sign(self, path: Path, identity: str = IDENTITY) -> Path:
        """Write the bundle of a file's signature beside the file."""
        content = path.read_bytes()
        key = _key()
        certificate = self._issue(key, identity)
        signature = _sign(key, content)
        digest = hashlib.sha256(content)
        public_key = {"content": _base64(_pem(certificate))}
        entry = {
            "data": {"hash": {"algorithm": "sha256", "value": digest.hexdigest()}},
            "signature": {"content": _base64(signature), "publicKey": public_key},
        }
        message = {
            "messageDigest": {"algorithm": "SHA2_256", "digest": _base64(digest.digest())},
            "signature": _base64(signature),
        }
        return self._write(path, certificate, "hashedrekord", entry, {"messageSignature": message})

    def attest(self, path: Path, payload_type: str = IN_TOTO) -> Path:
        """Write the bundle of a statement beside the statement; the bundle contains it."""
        payload = path.read_bytes()
        key = _key()
        certificate = self._issue(key, IDENTITY)
        kind = payload_type.encode()
        encoded = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
        signature = _base64(_sign(key, encoded))
        envelope = {
            "payload": _base64(payload),
            "payloadType": payload_type,
            "signatures": [{"sig": signature}],
        }
        hashed = {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()}
        signed = {"signature": signature, "verifier": _base64(_pem(certificate))}
        entry = {"envelopeHash": hashed, "payloadHash": hashed, "signatures": [signed]}
        return self._write(path, certificate, "dsse", entry, {"dsseEnvelope": envelope})

    def _issue(self, key: ec.EllipticCurvePrivateKey, identity: str) -> x509.Certificate:
        """Return a certificate for an identity, with the timestamp of the log of certificates."""
        public = key.public_key()
        authority = self.authority_key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.authority.subject)
            .public_key(public)
            .serial_number(2)
            .not_valid_before(_BEGIN)
            .not_valid_after(_BEGIN + _DAY)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(identity)]), critical=True)
            .add_extension(
                x509.UnrecognizedExtension(_OIDC_ISSUER, ISSUER.encode()), critical=False
            )
        )
        before = builder.sign(self.authority_key, hashes.SHA256()).tbs_certificate_bytes
        timestamps = x509.UnrecognizedExtension(_TIMESTAMPS, self._timestamps(before))
        return builder.add_extension(timestamps, critical=False).sign(
            self.authority_key, hashes.SHA256()
        )

    def _timestamps(self, certificate: bytes) -> bytes:
        """Return the list of one signed timestamp, as an octet string in DER."""
        time = int(_BEGIN.timestamp() * 1000)
        issuer = hashlib.sha256(_public(self.authority_key)).digest()
        entry = issuer + struct.pack("!I", len(certificate))[1:] + certificate
        signed = struct.pack("!BBQH", 0, 0, time, 1) + entry + struct.pack("!H", 0)
        signature = _sign(self.certificates_key, signed)
        log = hashlib.sha256(_public(self.certificates_key)).digest()
        # SHA-256 is hash 4, ECDSA is signature 3.
        head = struct.pack("!B32sQHBBH", 0, log, time, 0, 4, 3, len(signature))
        one = struct.pack("!H", len(head + signature)) + head + signature
        content = struct.pack("!H", len(one)) + one
        # In DER, lengths below 128 take one byte, and this one is below 256.
        length = [len(content)] if len(content) < 128 else [0x81, len(content)]
        return bytes([0x04, *length]) + content

    def _write(
        self,
        path: Path,
        certificate: x509.Certificate,
        kind: str,
        spec: dict[str, Any],
        content: dict[str, Any],
    ) -> Path:
        """Enter a signature in the log, and write its bundle."""
        body = rfc8785.dumps({"apiVersion": "0.0.1", "kind": kind, "spec": spec})
        log = hashlib.sha256(_public(self.signatures_key)).digest()
        time = int(_BEGIN.timestamp()) + 60
        promise = rfc8785.dumps(
            {
                "body": _base64(body),
                "integratedTime": time,
                "logID": log.hex(),
                "logIndex": 0,
            }
        )
        # The log has this entry alone.
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"{ORIGIN}\n1\n{_base64(root)}\n"
        signed_note = _base64(log[:4] + _sign(self.signatures_key, note.encode()))
        checkpoint = f"{note}\n— {ORIGIN} {signed_note}\n"
        entry = {
            "logIndex": "0",
            "logId": {"keyId": _base64(log)},
            "kindVersion": {"kind": kind, "version": "0.0.1"},
            "integratedTime": str(time),
            "inclusionPromise": {
                "signedEntryTimestamp": _base64(_sign(self.signatures_key, promise))
            },
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": _base64(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": checkpoint},
            },
            "canonicalizedBody": _base64(body),
        }
        material = {
            "certificate": {"rawBytes": _base64(_der(certificate))},
            "tlogEntries": [entry],
        }
        bundle = {"mediaType": BUNDLE, "verificationMaterial": material, **content}
        written = path.with_name(f"{path.name}.sigstore.json")
        written.write_text(json.dumps(bundle))
        return written


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _log(key: ec.EllipticCurvePrivateKey, valid_for: dict[str, str]) -> dict[str, Any]:
    public = _public(key)
    return {
        "baseUrl": f"https://{ORIGIN}",
        "hashAlgorithm": "SHA2_256",
        "publicKey": {
            "rawBytes": _base64(public),
            "keyDetails": "PKIX_ECDSA_P256_SHA_256",
            "validFor": valid_for,
        },
        "logId": {"keyId": _base64(hashlib.sha256(public).digest())},
    }


def _sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    return key.sign(content, ec.ECDSA(hashes.SHA256()))


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.DER, form)


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()

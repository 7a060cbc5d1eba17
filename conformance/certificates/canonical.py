"""The digest of a certificate's content.

The digest is the sha256 of the canonical JSON by RFC 8785: keys sorted, no white space, one way to
write each number and each string. It reveals a file that was edited or cut short. This module
imports no torch.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import rfc8785

from conformance.errors import CertificateError

# Beyond it an integer is not a number of RFC 8785, because some readers keep numbers as doubles.
_LARGEST_INTEGER = 2**53 - 1


def digest(body: Mapping[str, Any]) -> str:
    """Return the digest of a certificate's content; the entry ``digest`` itself is left out.

    Raises:
        CertificateError: the content is no JSON by RFC 8785, for example because of a NaN.
    """
    try:
        canonical = rfc8785.dumps(_without_digest(body))
    except rfc8785.CanonicalizationError as error:
        raise CertificateError(f"it has no canonical JSON by RFC 8785: {error}") from error
    return hashlib.sha256(canonical).hexdigest()


def digest_of_version_1(body: Mapping[str, Any]) -> str:
    """Return the digest by the first version of the certificate, which used Python's own JSON."""
    canonical = json.dumps(_without_digest(body), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def portable(value: Any) -> Any:
    """Return a value that every reader of JSON reads alike.

    Texts of a subject may hold bytes that are no UTF-8, and numbers in its code may be larger than
    a double's exact integers; both would leave the certificate without a canonical form.
    """
    if isinstance(value, Mapping):
        return {portable(str(key)): portable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable(inner) for inner in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        return str(value)
    return value


def _without_digest(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "digest"}

"""The two versions of the certificate's format, and the conversion of the first to the second.

Version 1 had keys with spaces in them; its digest is of the file as it is, so that a file is
converted after its digest was compared. Reports and headers of records have the same entries, and
are converted too. This module imports no torch.
"""

import copy
from collections.abc import Mapping
from typing import Any

SCHEMA_1 = "https://ddp-conformance.invalid/certificate/v1"
SCHEMA = "urn:ddp-conformance:certificate:2"

NOTE_ON_VERSION_1 = (
    "the certificate has the format of version 1, which names neither the environment variables "
    "nor the command that reproduces it; a new run writes version 2"
)

# The entries whose keys have changed, and for each the keys of version 1 with those of version 2.
# "" is the certificate itself.
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "": {
        "at scale": "at_scale",
        "pytest plugins": "pytest_plugins",
        "requested steps": "requested_steps",
        "replayed from records of": "replayed_from",
    },
    "kit": {"golden list": "golden_list"},
    "claims": {"said by": "declared_by"},
    "profile": {"world sizes": "world_sizes", "nccl of torch": "nccl_of_torch"},
    "at_scale": {"said": "notes"},
}


def version_of(body: Mapping[str, Any]) -> int | None:
    """Return the version of a certificate's format; None for anything else."""
    versions = {SCHEMA_1: 1, SCHEMA: 2}
    schema = body.get("schema")
    return versions.get(schema) if isinstance(schema, str) else None


def upgraded(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a certificate, a report or a header with the keys of version 2.

    Entries that version 1 does not have stay absent.
    """
    converted = copy.deepcopy(dict(body))
    if version_of(body) == 1:
        converted["schema"] = SCHEMA
    for name, renamed in _RENAMED.items():
        entry = converted.get(name) if name else converted
        if isinstance(entry, dict):
            for old, new in renamed.items():
                if old in entry and new not in entry:
                    entry[new] = entry.pop(old)
    return converted

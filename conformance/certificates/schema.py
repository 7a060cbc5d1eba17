"""The JSON Schema of certificates, and the first entry of a certificate that does not fit it.

The schema is the file ``certificate-2.schema.json`` beside this module. ``jsonschema`` validates.
This module imports no torch.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

FILE = Path(__file__).parent / "certificate-2.schema.json"

# Entries that certificates of version 1 need not have.
_NEW_IN_2 = {
    *("certified", "environment", "reproduce", "seed", "coverage", "source_sha256"),
    *("declared_by", "hook", "target", "state", "setup", "module", "sha256"),
    *("python", "platform", "required", "not_named"),
}
_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "object": "an object",
    "array": "a list",
    "boolean": "true or false",
    "null": "null",
}


def misfit(body: Mapping[str, Any], version: int = 2) -> str | None:
    """Return which entry of a certificate does not fit the schema; None if all do.

    Args:
        body: the content, with the keys of version 2.
        version: the version in which the file was written. Version 1 had no schema, so that it
            may lack entries, and have others.
    """
    error = next(iter(_validator(version).iter_errors(body)), None)
    return _line(error) if error is not None else None


@functools.cache
def _validator(version: int) -> Draft202012Validator:
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    return Draft202012Validator(schema if version == 2 else _open(schema))


def _open(schema: Any) -> Any:
    """Return a schema that takes other entries too, and does not require those of version 2."""
    if isinstance(schema, list):
        return [_open(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    opened = {
        key: _open(value)
        for key, value in schema.items()
        if not (key == "additionalProperties" and value is False)
    }
    required = opened.get("required")
    if isinstance(required, list):
        opened["required"] = [name for name in required if name not in _NEW_IN_2]
    return opened


def _line(error: ValidationError) -> str:
    """Return an error in one line: the entry, and its defect."""
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path
    ).removeprefix(".")
    if error.validator == "required":
        present = error.instance
        missing = next(name for name in error.validator_value if name not in present)
        return f"{path}.{missing} is missing".removeprefix(".")
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        others = ", ".join(repr(name)[:80] for name in sorted(set(error.instance) - set(known))[:5])
        return f"{path or 'the certificate'} has entries that the schema does not have: {others}"
    if error.validator == "type":
        types = error.validator_value
        names = [types] if isinstance(types, str) else types
        return f"{path} is not {' or '.join(_NAMES[name] for name in names)}"
    if error.validator in ("enum", "const"):
        allowed = error.validator_value
        listed = ", ".join(map(repr, allowed if isinstance(allowed, list) else [allowed]))
        return f"{path} is {str(error.instance)[:80]!r}, and not one of {listed}"
    return f"{path}: {error.message[:200]}"

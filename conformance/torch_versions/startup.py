"""The check at startup: the private parts that this torch lacks, and the faults that it has."""

import importlib
import sys

from conformance.torch_versions.names import OF_THE_KIT, PrivateName
from conformance.torch_versions.tested import release


def missing_parts(version: str) -> list[str]:
    """Return the private names that a version should have, and that this torch lacks.

    Names of objects, and those in which builds differ, are left out.
    """
    return [
        one.name for one in OF_THE_KIT if _should_be_in(one, version) and not has_part(one.name)
    ]


def has_part(name: str) -> bool:
    """Whether this torch has an attribute or a module by a dotted name.

    A name that ends with an underscore is the beginning of the names of a table.
    """
    owner_name, _, last = name.rpartition(".")
    owner: object = importlib.import_module("torch")
    path = "torch"
    for part in owner_name.split(".")[1:]:
        path = f"{path}.{part}"
        owner = getattr(owner, part, None) or sys.modules.get(path)
    if last.endswith("_"):
        return any(other.startswith(last) for other in dir(owner))
    if hasattr(owner, last) or name in sys.modules:
        return True
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _should_be_in(one: PrivateName, version: str) -> bool:
    if one.of_instances or one.of_builds:
        return False
    here = release(version)
    since = release(one.since) if one.since else here
    until = release(one.until) if one.until else here
    return since <= here <= until

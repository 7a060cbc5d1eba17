"""The versions of torch that the kit supports, and the messages for all others.

Importing this module needs no torch.
"""

import importlib.metadata
import re

# docs/torch-versions.md shows the results of each.
OLDEST = (2, 4)
NEWEST = (2, 15)

INSTALL = (
    "pip install 'torch>=2.4' installs one; for a machine without GPUs there is a smaller one: "
    "pip install torch --index-url https://download.pytorch.org/whl/cpu"
)


LACKS = "private names that torch lacks"
"""The key under which a host describes a torch that is not as ``names.py`` promises."""


def installed_version() -> str | None:
    """Return the version of torch that is installed, or None; torch is not imported."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int]:
    """Return the release of a version of torch: (2, 13) for ``2.13.0+cpu``.

    A version that cannot be read counts as newer than all others.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (10**6, 0)


def reason_unsupported(version: str | None) -> str | None:
    """Return why the kit cannot run with a torch, with a command to install one; None if it can.

    Args:
        version: of torch; None if it is not installed.
    """
    if version is None:
        return f"torch is not installed. {INSTALL}"
    if release(version) < OLDEST:
        return f"torch {version} is older than {_text(OLDEST)}, the oldest supported one. {INSTALL}"
    return None


def note_untested(version: str) -> str | None:
    """Return a note about a torch that is newer than the tested ones, or None."""
    if release(version) <= NEWEST:
        return None
    return (
        f"torch {version} is newer than the tested versions, {_text(OLDEST)} to {_text(NEWEST)}: a "
        "kit error may be due to that"
    )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))

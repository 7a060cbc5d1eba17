"""The files that the subject's code was imported from, with their digests.

A certificate names the code that was judged. A set-up imports more than its own file: the hook, the
factory of its state, and modules that a step needs first. So each rank records, at its end, every
module that was imported since the subject was loaded. The session chooses those that belong to the
subject (``session/subject_files.py``).
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Iterable
from typing import Any

from conformance.records.digests import sha256_of_file

# The kit and torch have versions of their own in the certificate.
_NOT_OF_SUBJECT = frozenset({"conformance", "torch", "__main__", *sys.stdlib_module_names})


_last_of_host = ""


def note_last_module() -> None:
    """Note the last module that a host imports before it forks."""
    global _last_of_host
    _last_of_host = next(reversed(sys.modules))


def imported_modules() -> frozenset[str]:
    """Return the names of the modules that this process has imported, without those of its host.

    ``sys.modules`` is in the order of imports, so that the host's are the first. Their names are
    not looked at, as in ``forgotten_modules.py``.
    """
    try:
        return frozenset(itertools.takewhile(_last_of_host.__ne__, reversed(sys.modules)))
    except RuntimeError:  # another thread has imported a module in the meantime
        return frozenset(sys.modules)


def source_files(before: frozenset[str], always: Iterable[str] = ()) -> dict[str, dict[str, str]]:
    """Return by module the ``file`` and its ``sha256``.

    Args:
        before: the modules that were there before the subject was loaded.
        always: modules of the subject's own objects, which are listed even if they were there.
    """
    later = {
        name
        for name in imported_modules() - before
        if name.partition(".")[0] not in _NOT_OF_SUBJECT
    }
    found = {}
    for name in sorted(later.union(always)):
        file = getattr(sys.modules.get(name), "__file__", None)
        digest = _digest(file) if file else None
        if file and digest:
            found[name] = {"file": file, "sha256": digest}
    return found


def module_of(made: Any) -> str | None:
    """Return the module of a function, a callable object or a state, if it has one on file."""
    function = inspect.unwrap(_innermost(made)) if callable(made) else made
    module = getattr(function, "__module__", None) or type(function).__module__
    return module if getattr(sys.modules.get(module), "__file__", None) else None


def qualified_name(hook: Any) -> str:
    """Return the module and the qualified name of a hook; of its class, if it has no name."""
    function = _innermost(hook)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _digest(file: str) -> str | None:
    try:
        return sha256_of_file(file)
    except OSError:
        return None  # a module in an archive has no file of its own

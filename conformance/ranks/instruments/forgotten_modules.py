"""Forgets an imported package, so that a process imports it anew."""

import sys

import torch

_NOTED: dict[str, list[str]] = {}


def note_modules(package: str) -> None:
    """Note the modules of a package that is to be forgotten in processes that are forked later.

    Such a process would have to look at the names of all modules, which lie in some thousand pages.
    To look at an object of Python's writes to it, and then its page is copied.
    """
    _NOTED[package] = _modules_of(package)


def forget_package(package: str) -> None:
    """Forget the modules of a package, and their classes that ``torch.load`` is told to take.

    Of two classes of the same name ``torch.load(weights_only=True)`` takes any one. Objects of the
    forgotten class would be no instances of the class that the package has from now on.
    """
    for name in _NOTED.get(package) or _modules_of(package):
        sys.modules.pop(name, None)
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(
        [one for one in known if not _is_of(getattr(one, "__module__", None) or "", package)]
    )


def _modules_of(package: str) -> list[str]:
    return [name for name in sys.modules if _is_of(name, package)]


def _is_of(name: str, package: str) -> bool:
    return name.partition(".")[0] == package

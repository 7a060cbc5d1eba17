"""Forgets an imported package, so that a process imports it anew."""

import sys

import torch


def forget_package(package: str) -> None:
    """Forget the modules of a package, and their classes that ``torch.load`` is told to take.

    Of two classes of the same name ``torch.load(weights_only=True)`` takes any one. Objects of the
    forgotten class would be no instances of the class that the package has from now on.
    """
    for name in list(sys.modules):
        if _is_of(name, package):
            del sys.modules[name]
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(
        [one for one in known if not _is_of(getattr(one, "__module__", None) or "", package)]
    )


def _is_of(name: str, package: str) -> bool:
    return name.partition(".")[0] == package

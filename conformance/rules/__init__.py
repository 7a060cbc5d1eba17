"""The rule book: one file for each section, with rules and nothing else."""

import functools
import importlib
import pkgutil

from conformance.judging.rule import Rule, registered_rules


def book(kind: str = "", device: str = "") -> dict[str, Rule]:
    """Return the rules by number, in order.

    Args:
        kind: return only the rules of this kind of subject.
        device: return only the rules that apply to this type of device.
    """
    _import_sections()
    return {
        number: rule
        for number, rule in registered_rules().items()
        if kind in ("", rule.kind) and (not device or rule.device in ("", device))
    }


@functools.cache
def _import_sections() -> None:
    """Import the files of this package, which register their rules."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

"""The rules, one file per section of the rule book."""

import importlib
import pkgutil

from conformance.judging.rule import _BOOK, Rule


def book(kind: str = "", device: str = "") -> dict[str, Rule]:
    """Return all rules by number, in order; those that speak of one kind of subject, or of one type of device, if it is named."""
    import conformance.rules as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"conformance.rules.{module.name}")
    every = sorted(_BOOK.items(), key=lambda item: item[1].order)
    return {number: rule for number, rule in every if kind in ("", rule.kind) and (not device or rule.device in ("", device))}

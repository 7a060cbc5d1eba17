"""Broken subjects, each with one defect.

Every module covers one section of the rule book, or a part of one, and ends with ``MUTANTS``: its
mutants and the rules that must refuse them. :func:`catalogue` lists all of them, and imports all
modules whose name has no underscore in front. The modules import
little beyond torch, so that a rank loads a mutant quickly. A mutant's docstring names its defect.
"""

import importlib
import pkgutil
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mutant:
    """One broken subject and the rules that must refuse it.

    Attributes:
        name: the attribute of its module, with arguments if it is a factory.
        breaks: the rules that always fail; the mutant was written for the first of them. No MUST
            rule fails that is neither in ``breaks`` nor in ``because``.
        claims: the claims of the subject.
        state: the value of ``--state``.
        setup: whether the attribute is a set-up function.
        because: the reason why a further rule fails. A rule that is also in ``breaks`` always
            fails; any other may fail.
        worlds: the world sizes of the profile.
        hangs: whether the mutant hangs, so that a short deadline is enough. All mutants of
            ``process`` are judged with a short deadline.
        kind: the kind of subject. Any kind but the hook takes its claims from the target's
            arguments, unless ``claims`` adds more.
        device: the device type that the mutant needs, or '' for any. ``test_mutants.py`` judges
            the mutants that run on any device.
    """

    name: str
    breaks: tuple[str, ...]
    claims: str = "exact"
    state: str | None = None
    setup: bool = False
    because: dict[str, str] = field(default_factory=dict)
    worlds: tuple[int, ...] = (2,)
    hangs: bool = False
    kind: str = "hook"
    device: str = ""


# Reasons for Mutant.because.
ZEROS = dict.fromkeys(
    ("4.1", "7.1"), "a rank that leaves a parameter out, or has no input, adds zeros"
)


def catalogue() -> list[tuple[str, Mutant]]:
    """Return (module name, mutant) for every mutant; import the modules on this call only."""
    names = [name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [
        (module.__name__, mutant) for module in modules for mutant in getattr(module, "MUTANTS", ())
    ]

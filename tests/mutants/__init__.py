"""Hooks, and subjects of the other kinds, with one defect each. Every module is one section of the rule book, or a part of one;
:func:`catalogue` lists them all.

The modules import torch alone, so that a rank imports a mutant in no time. Each function's docstring
says what is wrong with it; each module ends with ``MUTANTS``, which says the rule that refuses it.
"""

import importlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mutant:
    """One broken subject and the rules that must refuse it.

    Attributes:
        name: attribute of its module.
        breaks: the MUST rules that fail; the first is the one that it was written for. No other MUST rule may fail.
        claims: what it claims of itself.
        state: as in ``--state``.
        setup: whether the attribute is a set-up function.
        because: why a further rule fails too: always, if it is in ``breaks``; else it may.
        worlds: world sizes of the profile that it is tried in.
        kind: of the subject; one of another kind than hook claims what its target's arguments say, unless it claims more.
        device: the type that it needs; '' is any. Others than those are judged by ``test_mutants.py``.
        hangs: it hangs where it is broken, and is judged with a short deadline, as are all of ``process``.
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


ZEROS = dict.fromkeys(
    ("4.1", "7.1"), "what a rank leaves out, or has no input for, is zeros"
)  # a reason: see Mutant.because

_SECTIONS = (
    "contract",
    "equivalence",
    "settings",
    "replicas",
    "training",
    "training_loops",
    "collectives",
    "poststep",
    "chained",
    "state",
    "special",
    "interference",
    "failure",
    "rounded",
    "feedback",
    "low_rank",
    "quantized",
    "at_random",
    "at_scale",
    "local",
    "optimizers",
    "process",
    "averagers",
    "optimizer_wrappers",
    "strategies",
    "joins",
    "quantized_collectives",
    "wrappers",
    "streams",
)


def catalogue() -> list[tuple[str, Mutant]]:
    """Return (module name, mutant) for every mutant; the modules are imported only when this is called."""
    modules = [importlib.import_module(f"{__name__}.{section}") for section in _SECTIONS]
    return [(module.__name__, mutant) for module in modules for mutant in module.MUTANTS]

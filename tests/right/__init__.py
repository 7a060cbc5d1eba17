"""Right hooks, and right subjects of the other kinds, in the shapes that they come in. The kit must certify every one
that :func:`catalogue` lists.

They differ in what they communicate, in where they divide, in what they leave out, in what kind of object they are, and in how
their state is made. None knows ``hooks_ref``, and none is a model of speed. Each module ends with ``RIGHT``.
"""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Right:
    """One right subject.

    Attributes:
        name: attribute of its module, with arguments if it is a factory.
        claims: what it claims of itself.
        state: as in ``--state``.
        setup: whether the attribute is a set-up function.
        kind: of the subject.
        sections: it differs from another of its module in what these speak of, and is judged by them alone; by all with --thorough.
    """

    name: str
    claims: str = "exact"
    state: str | None = None
    setup: bool = False
    sections: tuple[str, ...] = ()
    kind: str = "hook"


OBJECTS = ("1", "2", "9", "11")  # computes what another does, and is another kind of object
SENDS = (
    "1",
    "2",
    "3",
    "8",
    "9",
    "10",
    "12",
)  # sends otherwise what another does, and keeps nothing from step to step
ARITHMETIC = ("1", "2", "3", "8")  # divides or rounds otherwise, and sends the same
COMPRESSORS = ("1", "2", "3", "10", "13")  # compresses or mixes otherwise, in the same frame

_MODULES = (
    *(
        "exact",
        "sparse",
        "few_bits",
        "low_rank",
        "at_random",
        "local",
        "fused",
        "poststep",
        "chained",
    ),
    *(
        "averagers",
        "optimizer_wrappers",
        "strategies",
        "joins",
        "quantized_collectives",
        "wrappers",
    ),
)


def catalogue() -> list[tuple[str, Right]]:
    """Return (module name, right subject) for every one; the modules are imported only when this is called."""
    modules = [importlib.import_module(f"{__name__}.{name}") for name in _MODULES]
    return [(module.__name__, right) for module in modules for right in module.RIGHT]

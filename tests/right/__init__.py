"""Right subjects of every kind, in many shapes; the kit must certify all of them.

They differ in their collectives, in the place of the division, in their omissions, in their kind of
object and in the making of their state. None imports ``hooks_ref``, and none is optimised for
speed. Each module ends with ``RIGHT``; :func:`catalogue` lists all subjects.
"""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Right:
    """One right subject.

    Attributes:
        name: the attribute of its module, with arguments if it is a factory.
        claims: the claims of the subject.
        state: the value of ``--state``.
        setup: whether the attribute is a set-up function.
        sections: the sections of the rule book that judge it, if it differs from another subject of
            its module in those only. All sections judge it with --thorough.
        kind: the kind of subject.
    """

    name: str
    claims: str = "exact"
    state: str | None = None
    setup: bool = False
    sections: tuple[str, ...] = ()
    kind: str = "hook"


# Sections for a subject that differs from another of its module in one respect only.
# OBJECTS: the same computation as another kind of object.
OBJECTS = ("1", "2", "9", "11")
# SENDS: the same result by other collectives, without state from step to step.
SENDS = ("1", "2", "3", "8", "9", "10", "12")
# ARITHMETIC: another division or rounding, with the same collectives.
ARITHMETIC = ("1", "2", "3", "8")
# COMPRESSORS: another compression or mixture, in the same frame.
COMPRESSORS = ("1", "2", "3", "10", "13")

_MODULES = (
    "exact",
    "sparse",
    "training_sizes",
    "few_bits",
    "low_rank",
    "at_random",
    "local",
    "values",
    "kept_copies",
    "fused",
    "poststep",
    "chained",
    "lasting",
    "endurance",
    "hooks_of_steps",
    "evidence",
    "averagers",
    "averagers_of_trainers",
    "optimizer_wrappers",
    "optimizers_of_trainers",
    "optimizers_in_half",
    "optimizers_that_capture",
    "optimizers_of_layouts",
    "strategies",
    "strategies_in_passes",
    "strategies_of_windows",
    "joins",
    "joins_in_parts",
    "joins_of_trainers",
    "joins_of_old_values",
    "joins_of_nested_models",
    "quantized_collectives",
    "summing_collectives",
    "wrappers",
    "wrappers_of_shared_inputs",
    "clusters",
    "own_code",
    "own_code_of_kinds",
    "saved_numbers",
    "paths_of_groups",
    "bounded",
    "warm_ups",
    "wrappers_of_seldom_seen",
    "wrappers_of_written_inputs",
    "wrappers_of_parts",
    "collectives_on_other_paths",
    "collectives_with_plans",
    "collectives_in_pieces",
    "collectives_in_buffers",
    "collectives_of_uneven_parts",
    "states_of_each_rank",
    "sparse_rows",
)


def catalogue() -> list[tuple[str, Right]]:
    """Return (module name, subject) for every right subject; import the modules on this call."""
    modules = [importlib.import_module(f"{__name__}.{name}") for name in _MODULES]
    return [(module.__name__, right) for module in modules for right in module.RIGHT]

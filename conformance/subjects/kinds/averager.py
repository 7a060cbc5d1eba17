"""Averagers of parameters, which have ``average_parameters(params)``.

All ranks call it after every step of their optimizers. The arguments of the target imply a claim:
``PeriodicModelAverager,period=4`` claims ``periodic(period=4)``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conformance.scenarios.averager import (
    COLUMNS,
    DTYPES,
    FLAT,
    FORMS,
    INTEGERS,
    ORDERED,
    PLAIN,
    RANDOM,
    RESUMED,
    SAVED,
    SUBGROUPS,
    UNUSED,
)
from conformance.scenarios.averager_loops import ALL as LOOPS
from conformance.scenarios.averager_training import ALL as TRAINING
from conformance.scenarios.averaging_schedule import too_long
from conformance.scenarios.conditions_together import AVERAGER as TOGETHER
from conformance.scenarios.failing_collectives import AVERAGER as FAILING
from conformance.scenarios.hash_seeds import AVERAGER as HASH_SEEDS
from conformance.scenarios.kinds_in_clusters import AVERAGER as CLUSTERS
from conformance.scenarios.kinds_under_default_dtypes import AVERAGER as DEFAULT_DTYPES
from conformance.scenarios.probes_of_kinds import AVERAGER as PROBE
from conformance.scenarios.probes_of_kinds import maker_for
from conformance.subjects.arguments import write_call, write_named
from conformance.subjects.kinds._averager_schedule import adapt, largest_group, schedule_of
from conformance.subjects.kinds._claim import (
    Claim,
    Form,
    Reference,
    min_world_size,
    option_claim,
    option_flag,
    read_reference,
    table,
    whole_number,
    write_reference,
)
from conformance.subjects.kinds._kind import Kind

if TYPE_CHECKING:
    from conformance.subjects.claims import Claims


def _read_periodic(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if args or not {"period"} <= options.keys() <= {"period", "warmup_steps"}:
        raise ValueError("takes period=, and warmup_steps= if there are any: periodic(period=4)")
    return {
        "period": whole_number("period=", options["period"], 1),
        "warmup_steps": _read_warmup_steps(options),
    }


PERIODIC = option_claim(
    "periodic",
    Form(
        "periodic(period=4, warmup_steps=10)",
        "Parameters become the mean over the group at steps 10, 14, 18, ..., counted from 0, and "
        "stay as they are at other steps.",
        "14.1, 14.2",
    ),
    read=_read_periodic,
)


def _read_hierarchical(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    sizes = options.get("period_group_size_dict")
    unknown = options.keys() - {"period_group_size_dict", "warmup_steps"}
    if args or unknown or not isinstance(sizes, dict) or not sizes:
        raise ValueError(
            "takes period_group_size_dict=, group sizes by period, and warmup_steps= if there are "
            "any: hierarchical(period_group_size_dict={2: 2, 4: 4})"
        )
    for period, size in sizes.items():
        whole_number("periods", period, 1)
        whole_number("group sizes", size, 1)
    return {"period_group_size_dict": sizes, "warmup_steps": _read_warmup_steps(options)}


HIERARCHICAL = option_claim(
    "hierarchical",
    Form(
        "hierarchical(period_group_size_dict={2: 2, 4: 4}, warmup_steps=0)",
        "From step 0 on, parameters become the mean over groups of 4 neighbours every four steps "
        "and over groups of 2 every two; if two means are due the larger group counts, and the "
        "largest group is the whole group.",
        "14.1, 14.2",
    ),
    read=_read_hierarchical,
)


def _read_warmup_steps(options: Mapping[str, Any]) -> int:
    return whole_number("warmup_steps=", options.get("warmup_steps", 0), 0)


_NAMES = (
    "PeriodicModelAverager",
    "HierarchicalModelAverager",
    "DiLoCoModelAverager",
    "OuterStepModelAverager",
    "EMAModelAverager",
    "GossipModelAverager",
)
REFERENCES = {name: Reference(f"hooks_ref:{name}") for name in _NAMES}
_read_like_text = read_reference(REFERENCES)


def _read_like(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    return {"reference": _read_like_text(args, options)}


def _write_like(claims: "Claims") -> str | None:
    return write_reference(claims.reference) if "like" in claims.options else None


LIKE = Claim(
    "like",
    (
        Form(
            "like(DiLoCoModelAverager, period=4)",
            "Every step makes the same of the parameters as that averager of hooks_ref, made with "
            "these options.",
            "14.1 to 14.7, 14.10, 14.11, 14.12, 14.20",
        ),
    ),
    _read_like,
    _write_like,
)


def _contradiction(claimed: Mapping[str, Mapping[str, Any]]) -> str | None:
    schedule = schedule_of(claimed)
    return too_long(schedule) if schedule else None


def _missing_claim(options: Mapping[str, Any], size: int) -> str:
    largest = largest_group(options)
    if size >= largest:
        return ""
    return (
        f"the claims name groups of {largest} ranks, and a group of {size} has no such group: if "
        f"the averager is for {largest} ranks and more, add min_world_size({largest}) to --claims"
    )


def _default(arguments: Mapping[str, Any]) -> str:
    warmup = arguments.get("warmup_steps", 0)
    if "period_group_size_dict" in arguments:
        sizes = arguments["period_group_size_dict"]
        options = {"period_group_size_dict": sizes, "warmup_steps": warmup}
        claim = write_call("hierarchical", *write_named(options.items()))
        if not isinstance(sizes, dict) or not sizes:
            return claim  # parsing it raises the error
        # The largest group is the whole group, so a smaller world cannot be averaged.
        return f"{claim}, min_world_size({max(sizes.values())})"
    if "period" in arguments:
        options = {"period": arguments["period"], "warmup_steps": warmup}
        return write_call("periodic", *write_named(options.items()))
    raise ValueError(
        "no claims follow from its arguments; "
        'type e.g. --claims "periodic(period=4, warmup_steps=10)"'
    )


AVERAGER = Kind(
    "averager",
    "an averager of parameters, with average_parameters(params)",
    ("14",),
    reference="hooks_ref:PeriodicModelAverager,period=4,warmup_steps=10",
    scenarios=(
        *(PLAIN, RANDOM, FORMS, DTYPES, FLAT, COLUMNS, INTEGERS, UNUSED, SUBGROUPS, ORDERED),
        *(SAVED, RESUMED),
        *TRAINING,
        *LOOPS,
        *FAILING,
        *CLUSTERS,
        DEFAULT_DTYPES,
        HASH_SEEDS,
        *TOGETHER,
        PROBE,
    ),
    claims=table(
        PERIODIC,
        HIERARCHICAL,
        LIKE,
        option_flag(
            "world_only",
            "The averager takes no process group and always uses WORLD.",
            "14.6",
        ),
        min_world_size("14.13"),
    ),
    default_claims=_default,
    probes=maker_for("averager", "14.27"),
    contradiction=_contradiction,
    missing_claim=_missing_claim,
    adapt=adapt,
    references=REFERENCES,
)

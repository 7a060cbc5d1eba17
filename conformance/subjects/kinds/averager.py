"""Averagers of parameters: what has ``average_parameters(params)``, called by all ranks after every step of their optimizers.

    periodic(period=4, warmup_steps=10)
                                the mean over the group at steps 10, 14, 18, ..., counted from 0; nothing at others
    hierarchical(period_group_size_dict={2: 2, 4: 4}, warmup_steps=0)
                                from step 0 on, every four steps the mean over groups of 4 neighbours, every two over 2;
                                of two that are due the larger; the largest is the whole group
    like(DiLoCoModelAverager, period=4)
                                step by step what that averager of hooks_ref makes of the same parameters

Without claims it is what the arguments of the target say: ``PeriodicModelAverager,period=4`` is periodic(period=4).
"""

from collections.abc import Mapping
from typing import Any

from conformance.scenarios.averager import DTYPES, FORMS, ORDERED, PLAIN, RANDOM, RESUMED, SAVED, SUBGROUPS, UNUSED
from conformance.subjects.kinds._kind import Kind, like, whole


def _periodic(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if args or not {"period"} <= options.keys() <= {"period", "warmup_steps"}:
        raise ValueError("takes period=, and warmup_steps= if there are any")
    return {"period": whole("period=", options["period"], 1), "warmup_steps": whole("warmup_steps=", options.get("warmup_steps", 0), 0)}


def _hierarchical(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    sizes = options.get("period_group_size_dict")
    if args or not options.keys() <= {"period_group_size_dict", "warmup_steps"} or not isinstance(sizes, dict) or not sizes:
        raise ValueError("takes period_group_size_dict=, group sizes by period, and warmup_steps= if there are any")
    for period, size in sizes.items():
        whole("periods", period, 1), whole("group sizes", size, 1)
    return {"period_group_size_dict": sizes, "warmup_steps": whole("warmup_steps=", options.get("warmup_steps", 0), 0)}


def _default(arguments: Mapping[str, Any]) -> str:
    for name, first in (("hierarchical", "period_group_size_dict"), ("periodic", "period")):
        if first in arguments:
            smallest = f", min_world_size({max(arguments[first].values())})" if isinstance(arguments[first], dict) else ""
            return f"{name}({first}={arguments[first]!r}, warmup_steps={arguments.get('warmup_steps', 0)!r}){smallest}"
    raise ValueError('say when it averages: --claims "periodic(period=4, warmup_steps=10)"')


_REFERENCES = (*("PeriodicModelAverager", "HierarchicalModelAverager", "DiLoCoModelAverager", "EMAModelAverager", "GossipModelAverager"),)

AVERAGER = Kind(
    "averager",
    "an averager of parameters, with average_parameters(params)",
    ("14",),
    reference="hooks_ref:PeriodicModelAverager,period=4,warmup_steps=10",
    scenarios=(PLAIN, RANDOM, FORMS, DTYPES, UNUSED, SUBGROUPS, ORDERED, SAVED, RESUMED),
    claims={"periodic": _periodic, "hierarchical": _hierarchical, "like": like(*_REFERENCES)},
    default_claims=_default,
)

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
from dataclasses import replace
from typing import Any

from conformance.kinds._kind import Kind, like, whole
from conformance.scenario import Param, Scenario

STEPS = 30
_PARAMS = (Param((5, 3)), Param((7,)), Param((1,)), Param((4, 3, 2, 5), layout="channels_last"), Param((6, 5), layout="transposed"))

PLAIN = Scenario(
    "averager",
    f"{STEPS} steps; before each, every rank's parameters are set to values of its own",
    _PARAMS,
    ("crafted",) * STEPS,
    kind="averager",
    after="averager",
)
RANDOM = replace(PLAIN, name="averager_random", what="the same with random values", steps=("normal",) * STEPS, world_sizes=(3, 4))
FORMS = replace(
    PLAIN,
    name="averager_forms",
    what="in turn a list, an iterator, parameter groups and groups that share a parameter; one parameter is frozen",
    params=(*_PARAMS, Param((4, 4), frozen=True)),
    world_sizes=(2,),
    case="forms",
)
DTYPES = replace(
    PLAIN,
    name="averager_dtypes",
    what="four dtypes in one model; 0-d, empty and one-element parameters",
    params=(
        *(Param(shape, dtype) for dtype in ("float32", "float64", "float16", "bfloat16") for shape in ((11,), (3, 5))),
        *(Param(()), Param((0,)), Param((1,), "float64")),
    ),
    steps=tuple("crafted" if step % 8 < 4 else "normal" for step in range(STEPS)),
    world_sizes=(2,),
)
UNUSED = replace(
    PLAIN,
    name="averager_unused",
    what="in each step some ranks, or all, have no gradient for some parameters",
    params=(*_PARAMS, Param((11,)), Param((2, 3))),
    world_sizes=(2, 3),
    case="unused",
)
SUBGROUPS = replace(
    PLAIN,
    name="averager_subgroups",
    what="two averagers on two disjoint subgroups of WORLD; places in the group are not global ranks",
    groups=((1, 3), (0, 2)),
)
ORDERED = replace(
    PLAIN,
    name="averager_ordered",
    what="peers enter each call when rank 0 has left it, or waits for them",
    world_sizes=(2,),
    order="rank0_first",
)
SAVED = replace(PLAIN, name="averager_saved", what="its state is saved after 13 steps", world_sizes=(2,), saves_at=13)
RESUMED = replace(SAVED, name="averager_resumed", what="new processes go on from there", after="averager_saved", resumes=True)


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
    "14",
    reference="hooks_ref:PeriodicModelAverager,period=4,warmup_steps=10",
    machine=("14.1", "14.2"),
    scenarios=(PLAIN, RANDOM, FORMS, DTYPES, UNUSED, SUBGROUPS, ORDERED, SAVED, RESUMED),
    claims={"periodic": _periodic, "hierarchical": _hierarchical, "like": like(*_REFERENCES)},
    default=_default,
)

"""TODO: conformance/scenarios/collective.py."""

from collections.abc import Mapping
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

COLLECTIVES = ("all_gather", "all_to_all", "all_to_all_single", "scatter")


BLOCK = 128


# How the calls of ``collective_calls`` are made, in the order of its parameters; all collectives take the first two.
CALLS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(COLLECTIVES, ("positional", "keywords")),
    "all_to_all_single": ("positional", "keywords", "splits", "positional_splits"),
    "scatter": ("positional", "keywords", "group_src"),
}


PLAIN = Scenario(
    "collective",
    "matrices of float32; what each rank sends to each is its own",
    (Param((5, 3)), Param((20, 33))),
    ("crafted", "normal", "uneven"),
    kind="collective",
    prerequisite="collective",
)


SUBGROUPS = replace(
    PLAIN,
    name="collective_subgroups",
    summary="on two disjoint subgroups of WORLD; places in the group are not global ranks",
    groups=((1, 3), (0, 2)),
)


# Peers of a rank that refuses are not asked: they would wait for it.
ORDERED = replace(
    PLAIN,
    name="collective_ordered",
    summary="peers enter each call when rank 0 has left it, or waits for them; what is sent is on record",
    world_sizes=(2,),
    order="rank0_first",
)


FORMS = replace(
    ORDERED,
    name="collective_forms",
    summary="tensors of one to four dimensions, empty, of one element, not contiguous, of other dtypes",
    params=(
        *(
            Param(shape)
            for shape in ((7,), (131,), (1,), (0,), (0, 3), (1, 1), (2, 3, 4), (2, 3, 2, 5))
        ),
        *(Param((6, 5), layout="transposed"), Param((4, 3, 2, 5), layout="channels_last")),
        *(Param((5, 3), dtype) for dtype in ("float64", "float16", "bfloat16", "int32", "int64")),
    ),
    steps=("crafted",),
    world_sizes=(2, 3),
)


CALLED = replace(
    ORDERED,
    name="collective_calls",
    summary="on subgroups, its arguments by position, by keyword, and those that few use",
    params=(Param((4, 3)),) * 4,
    steps=("crafted",),
    groups=((1, 3), (0, 2)),
)


WAITED = replace(
    ORDERED,
    name="collective_waited",
    summary="async_op=True, two calls at a time, waited for in the opposite order",
    steps=("crafted", "normal"),
    world_sizes=(2, 3),
    variant="waited",
)


SPECIAL = replace(
    PLAIN,
    name="collective_special",
    summary="NaN, infinities, zeros, ties, subnormals, the largest values",
    params=(Param((5, 6)),),
    steps=("special",),
    world_sizes=(2,),
)


REPEATED = replace(
    PLAIN,
    name="collective_repeated",
    summary="the same values again and again",
    params=(Param((20, 33)),),
    steps=("constant",) * 24,
    world_sizes=(2,),
)

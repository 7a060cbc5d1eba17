"""TODO: conformance/scenarios/averager.py."""

from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

STEPS = 30


_PARAMS = (
    Param((5, 3)),
    Param((7,)),
    Param((1,)),
    Param((4, 3, 2, 5), layout="channels_last"),
    Param((6, 5), layout="transposed"),
)


PLAIN = Scenario(
    "averager",
    f"{STEPS} steps; before each, every rank's parameters are set to values of its own",
    _PARAMS,
    ("crafted",) * STEPS,
    kind="averager",
    prerequisite="averager",
)


RANDOM = replace(
    PLAIN,
    name="averager_random",
    summary="the same with random values",
    steps=("normal",) * STEPS,
    world_sizes=(3, 4),
)


FORMS = replace(
    PLAIN,
    name="averager_forms",
    summary="in turn a list, an iterator, parameter groups and groups that share a parameter; one parameter is frozen",
    params=(*_PARAMS, Param((4, 4), frozen=True)),
    world_sizes=(2,),
    variant="forms",
)


DTYPES = replace(
    PLAIN,
    name="averager_dtypes",
    summary="four dtypes in one model; 0-d, empty and one-element parameters",
    params=(
        *(
            Param(shape, dtype)
            for dtype in ("float32", "float64", "float16", "bfloat16")
            for shape in ((11,), (3, 5))
        ),
        *(Param(()), Param((0,)), Param((1,), "float64")),
    ),
    steps=tuple("crafted" if step % 8 < 4 else "normal" for step in range(STEPS)),
    world_sizes=(2,),
)


UNUSED = replace(
    PLAIN,
    name="averager_unused",
    summary="in each step some ranks, or all, have no gradient for some parameters",
    params=(*_PARAMS, Param((11,)), Param((2, 3))),
    world_sizes=(2, 3),
    variant="unused",
)


SUBGROUPS = replace(
    PLAIN,
    name="averager_subgroups",
    summary="two averagers on two disjoint subgroups of WORLD; places in the group are not global ranks",
    groups=((1, 3), (0, 2)),
)


ORDERED = replace(
    PLAIN,
    name="averager_ordered",
    summary="peers enter each call when rank 0 has left it, or waits for them",
    world_sizes=(2,),
    order="rank0_first",
)


SAVED = replace(
    PLAIN,
    name="averager_saved",
    summary="its state is saved after 13 steps",
    world_sizes=(2,),
    resume=replace(PLAIN.resume, saves_at=13),
)


RESUMED = replace(
    SAVED,
    name="averager_resumed",
    summary="new processes go on from there",
    prerequisite="averager_saved",
    resume=replace(SAVED.resume, resumes=True),
)

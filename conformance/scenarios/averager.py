"""The scenarios for averagers of parameters (section 14).

Before each step, the kit sets every parameter to a value that depends on the rank and the step.
The averager then has to leave the mean, or the value as it is if no averaging is due.
"""

import random
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

# Enough for several periods after a warm-up of ten steps.
STEPS = 30

# Two of the parameters are not contiguous: an averager that flattens parameters has to restore
# their memory layouts.
_PARAMS = (
    Param((5, 3)),
    Param((7,)),
    Param((1,)),
    Param((4, 3, 2, 5), layout="channels_last"),
    Param((6, 5), layout="transposed"),
)

PLAIN = Scenario(
    name="averager",
    summary=f"{STEPS} steps; before each, every rank sets its parameters to values of its own",
    params=_PARAMS,
    steps=("crafted",) * STEPS,
    kind="averager",
    prerequisite="averager",
)

RANDOM = replace(
    PLAIN,
    name="averager_random",
    summary="the scenario `averager` with random values",
    steps=("normal",) * STEPS,
    world_sizes=(3, 4),
)

FORMS = replace(
    PLAIN,
    name="averager_forms",
    summary="in turn a list, an iterator, parameter groups and groups that share a parameter; one "
    "parameter is frozen",
    params=(*_PARAMS, Param((4, 4), frozen=True)),
    world_sizes=(2,),
    variant="forms",
)

# Four crafted steps and four random ones alternate, so that a period of four meets both.
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
        Param(()),
        Param((0,)),
        Param((1,), "float64"),
    ),
    steps=tuple("crafted" if step % 8 < 4 else "normal" for step in range(STEPS)),
    world_sizes=(2,),
)

FLAT = replace(
    PLAIN,
    name="averager_flat",
    summary="parameters are views of one flat buffer for each dtype; their order, and the sizes of "
    "the gaps between them, are drawn; two have no elements; without the claim like, one parameter "
    "more shares the view of another",
    # Among views of one place, the one without elements comes first, or last.
    params=(
        Param((0, 3)),
        *_PARAMS,
        Param((5, 3)),
        Param((7,)),
        *(Param((9,), "bfloat16"),) * 2,
        Param((0,)),
    ),
    world_sizes=(2,),
    variant="flat",
)

# As some of the columns of a larger weight have them. Collectives refuse such tensors.
COLUMNS = replace(
    FLAT,
    name="averager_columns",
    summary="the scenario `averager_flat`, in which rows of a parameter have gaps of drawn sizes "
    "between them",
    variant="columns",
)

_DTYPES_OF_INTEGERS = ("int64", "int8", "int32", "uint8")

# As quantized weights, masks of pruned ones and tables of indices are: they cannot require grad.
# The number of ranks and the large sizes are drawn. A mean over two to five ranks of equal numbers,
# each divided first, is exact in floating point; over six or seven some are rounded.
INTEGERS = replace(
    PLAIN,
    name="averager_integers",
    summary="six or seven ranks; frozen parameters of integers, whose sums overflow, small and "
    "large, beside one of float32",
    params=(
        Param((5, 3), "uint8", frozen=True),
        Param((7,)),
        *(Param((4, 4), dtype, frozen=True) for dtype in _DTYPES_OF_INTEGERS),
    ),
    steps=("crafted",) * 2,
    world_sizes=(),
    size=7,
    nodes=(4, 3),
)


def large_integers(draw: random.Random) -> tuple[Param, ...]:
    """Return a large parameter of each dtype of integers: 2**8 to 2**17 elements, every size as
    likely as its double."""
    sizes = [round(2 ** draw.uniform(8, 17)) for _ in _DTYPES_OF_INTEGERS]
    made = [
        Param((size,), dtype, frozen=True)
        for size, dtype in zip(sizes, _DTYPES_OF_INTEGERS, strict=True)
    ]
    draw.shuffle(made)
    return tuple(made)


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
    summary="two averagers on two disjoint subgroups of WORLD; group ranks are not global ranks; "
    "one group makes more calls; then all make calls as on a rank outside of a group",
    groups=((1, 3), (0, 2)),
)

ORDERED = replace(
    PLAIN,
    name="averager_ordered",
    summary="peers enter each call after rank 0 has left it or waits for them",
    world_sizes=(2,),
    order="rank0_first",
)

# With a warm-up of ten steps and a period of four, steps 10 and 14 are due. The save comes between
# the two, so that a step count that is not restored shows.
SAVED = replace(
    PLAIN,
    name="averager_saved",
    summary="the state is saved after 13 steps",
    world_sizes=(2,),
    resume=replace(PLAIN.resume, saves_at=13),
)

RESUMED = replace(
    SAVED,
    name="averager_resumed",
    summary="new processes continue from the saved state",
    prerequisite="averager_saved",
    resume=replace(SAVED.resume, resumes=True),
)

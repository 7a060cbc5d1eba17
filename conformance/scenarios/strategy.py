"""The scenarios for sync strategies (section 16).

A step has one micro-batch or several, each in a context of its own (``strategy_schedule.py``).
"""

from dataclasses import replace

from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.scenarios.sparse import ROWS
from conformance.scenarios.strategy_uses import BY_GROUP

# 100 bytes, which is 25 elements of float32: a bucket holds a few of the small parameters.
_CAP = 100 / 2**20

# Eight parameters: ``uses`` has a pattern for each.
_PARAMS = (
    Param((5, 3)),
    Param((7,)),
    Param((1,)),
    Param((2, 3, 4)),
    Param((11,)),
    Param((3, 5)),
    Param((2, 2)),
    Param((13,)),
)

PLAIN = Scenario(
    name="strategy",
    summary="steps of one micro-batch; gradients arrive in a drawn order, and in some steps in "
    "another one on each rank",
    params=_PARAMS,
    steps=("crafted",) * 3,
    ddp=DDPOptions(bucket_cap_mb=_CAP),
    kind="strategy",
    prerequisite="strategy",
    initial_value=0.0,
)

ACCUMULATED = replace(
    PLAIN,
    name="strategy_accumulated",
    summary="steps of 2, 4, 1 and 2 micro-batches; in every other step gradients are cleared "
    "within the first context; they arrive in drawn orders, as in `strategy`",
    steps=("crafted",) * 4,
    variant="accumulated",
)

RANDOM = replace(
    ACCUMULATED,
    name="strategy_random",
    summary="the scenario `strategy_accumulated` with random values",
    steps=("normal",) * 4,
    world_sizes=(3, 4),
)

MICROBATCHES = replace(
    PLAIN,
    name="strategy_microbatches",
    summary="one step of four micro-batches that use different parameters, the same on all ranks",
    steps=("crafted",),
    world_sizes=(2, 3),
    variant="microbatches",
    prerequisite="strategy_accumulated",
)

# All parameters have one shape, and every rank uses the same number of them. If a subject pairs the
# gradients of different parameters, the collectives still match and raise no error.
RANKS = replace(
    PLAIN,
    name="strategy_ranks",
    summary="each rank leaves out a different one of several parameters of one shape; all ranks "
    "leave out the last one",
    params=(Param((5, 3)),) * 6,
    # A rank leaves out the same one again after five steps.
    steps=("crafted",) * 7,
    world_sizes=(2, 3),
    variant="ranks",
    prerequisite="strategy_accumulated",
)

VIEWS = replace(
    PLAIN,
    name="strategy_views",
    summary="gradients are views of DDP's buckets",
    ddp=replace(PLAIN.ddp, gradient_as_bucket_view=True),
    world_sizes=(2,),
    variant="two",
    prerequisite="strategy_accumulated",
)

COMBINED = replace(
    PLAIN,
    name="strategy_combined",
    summary="find_unused_parameters and views; ranks and micro-batches use different parameters, "
    "some of which one rank alone uses",
    world_sizes=(2, 3),
    ddp=replace(PLAIN.ddp, gradient_as_bucket_view=True, find_unused_parameters=True),
    variant="combined",
    prerequisite="strategy_ranks",
)

SHARED = replace(
    VIEWS,
    name="strategy_shared",
    summary="two optimizers, an SGD with momentum and one of a drawn class, share a parameter; "
    "their groups are not in the model's order, and rest at a learning rate of 0: all of them in "
    "the first step, as a warm-up begins, and some in drawn later ones",
    steps=("crafted",) * 9,
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    world_sizes=(2, 3),
    variant="shared",
)

KEPT = replace(
    VIEWS,
    name="strategy_kept",
    summary="gradients are cleared before every other step only",
    steps=("crafted",) * 4,
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    variant="kept",
)

FORMS = replace(
    VIEWS,
    name="strategy_forms",
    summary="four dtypes in one model; channels_last, transposed, 0-d, empty and one-element "
    "parameters, and a frozen one; drawn submodules have them, and two have one of them",
    params=(
        *(
            Param(shape, dtype)
            for dtype in ("float32", "float64", "float16", "bfloat16")
            for shape in ((11,), (3, 5))
        ),
        Param((4, 3, 2, 5), layout="channels_last"),
        Param((6, 5), layout="transposed"),
        Param((4, 4), frozen=True),
        Param(()),
        Param((0,)),
        Param((1,), "float64"),
    ),
    steps=("crafted", "normal"),
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    variant="forms",
)

FLAT = replace(
    VIEWS,
    name="strategy_flat",
    summary="parameters, and their gradients, are views of one flat buffer for each dtype; their "
    "order, and the sizes of the gaps between them, are drawn; two have no elements",
    # Among views of one place, the one without elements comes first, or last.
    params=(
        Param((0, 3)),
        *_PARAMS,
        Param((6, 5), layout="transposed"),
        Param((7,)),
        *(Param((9,), "bfloat16"),) * 2,
        Param((0,)),
    ),
    steps=("crafted", "normal"),
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    variant="flat",
)

SPARSE = replace(
    VIEWS,
    name="strategy_sparse",
    summary="two sparse embeddings beside dense parameters, one of more than 2**16 rows",
    # A sparse gradient cannot be a view of a bucket.
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    params=(
        Param((10, 3), layout="sparse"),
        Param((ROWS[0], 1), layout="sparse"),
        Param((7,)),
        Param((2, 3)),
    ),
)

SUBGROUPS = replace(
    PLAIN,
    name="strategy_subgroups",
    summary="two models on two disjoint subgroups of WORLD; group ranks are not global ranks; in "
    "drawn steps one group leaves out drawn parameters, or both do, or one rank of a group",
    steps=("crafted",) * 6,
    groups=((1, 3), (0, 2)),
    variant=BY_GROUP,
    observe=replace(PLAIN.observe, collectives=True),
)

ORDERED = replace(
    VIEWS,
    name="strategy_ordered",
    summary="peers begin each micro-batch after rank 0 has finished it or waits for them",
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    order="rank0_first",
)

RAISES = replace(
    VIEWS,
    name="strategy_raises",
    summary="in twelve steps all ranks raise an exception inside the context, before a backward or "
    "after the last: an error, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit and "
    "BaseException",
    steps=("crafted",) * 24,
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    variant="raises",
)

WITHOUT = replace(
    VIEWS,
    name="strategy_without",
    summary="every other step runs without the subject, under DDP alone",
    steps=("crafted",) * 4,
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    variant="without",
)

NO_DDP = replace(
    VIEWS,
    name="strategy_no_ddp",
    summary="the model is not wrapped in DDP",
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    variant="no_ddp",
)

# Larger parameters than elsewhere, so that gradients outweigh flags and sizes that a subject sends.
COUNTED = replace(
    VIEWS,
    name="strategy_counted",
    summary="steps of four micro-batches; the bytes that are communicated are counted",
    params=(
        Param((1000,)),
        Param((40, 30)),
        Param((900,)),
    ),
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    variant="four",
    observe=replace(VIEWS.observe, bytes_sent=True),
)

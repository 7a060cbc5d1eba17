"""The scenarios for communication hooks.

Several rules read the records of one scenario, so a scenario is added only if no other one records
what a new rule needs. ``ALL`` fixes the order in which scenarios run.
"""

from dataclasses import replace

from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.scenarios.sparse import SPARSE

SCALES = ("random", "large", "small")  # the kinds of gradient of AT_SCALE (``gradients.at_scale``)
SCALE_NUMEL = 32  # elements of each kind

# 47 elements in one bucket. A prime number is divisible by no world size, so a hook that cuts the
# bucket into equal shards has to pad the last one.
_SMALL = (
    Param((5, 3)),
    Param((7,)),
    Param((1,)),
    Param((2, 3, 4)),
)

# The last two parameters have one shape, as the layers of a model often do. A hook that keeps its
# state by shape or by bucket size would share the state of these two buckets.
_SEVERAL = (
    Param((5, 3)),
    Param((17,)),
    Param((20_011,)),
    Param((3, 3, 3)),
    Param((3, 3, 3)),
)

# 64 bytes, which is 16 elements of float32. DDP closes a bucket once it reaches the cap, so each
# parameter of _SEVERAL gets a bucket of its own when DDP rebuilds its buckets after the first step.
# The parameter of 15 elements gets one, too: its gradient comes last.
_CAP = 64 / 2**20

VALUES = Scenario(
    name="values",
    summary="one bucket; crafted, random and wide-ranged gradients; the global generators of each "
    "rank are seeded differently",
    params=_SMALL,
    steps=("crafted", "crafted", "crafted", "normal", "normal", "wide"),
    seeds_differ=True,
)

FEWER = replace(
    VALUES,
    name="fewer",
    summary="fewer ranks than the subject claims to need",
    steps=("crafted",) * 2,
)

# The hash seed decides the order in which a set of strings is iterated. Ranks on different hosts
# have different hash seeds: if they sent elements in that order, each would get another one's sum.
VALUES_AGAIN = replace(
    VALUES,
    name="values_again",
    summary="the scenario `values` once more; every other rank has another hash seed",
    repeat=1,
    world_sizes=(2,),
    hash_seeds_differ=True,
)

# DDP checks a hook's parameter names and annotations. An observer around the hook would hide them.
AS_IS = replace(
    VALUES,
    name="as_is",
    summary="the hook registered as it is, unobserved",
    observe=replace(VALUES.observe, hook=False),
    steps=("crafted",) * 3,
    world_sizes=(2,),
)

VIEWS = replace(
    AS_IS,
    name="views",
    summary="gradients are views of the buckets",
    ddp=replace(AS_IS.ddp, gradient_as_bucket_view=True),
    observe=replace(AS_IS.observe, hook=True),
)

_SEVERAL_BUCKETS = Scenario(
    name="buckets",
    summary="one bucket in the first step, five after DDP has rebuilt them",
    params=_SEVERAL,
    steps=("crafted",) * 4,
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=_CAP),
)

BUCKETS = replace(
    _SEVERAL_BUCKETS,
    observe=replace(_SEVERAL_BUCKETS.observe, other_gradients=True),
)

# A hook that waits for its peers inside the call shows here, because rank 0 waits alone.
ORDERED = replace(
    _SEVERAL_BUCKETS,
    name="ordered",
    summary="rank 0 leaves each hook call before its peers enter",
    order="rank0_first",
    prerequisite="buckets",
)

_SCHEDULED = (
    "ranks enter the hook, and callbacks run, in an order drawn from a seed; every collective is"
    " recorded"
)

SCHEDULES = (
    replace(
        _SEVERAL_BUCKETS,
        name="schedule_1",
        summary=_SCHEDULED,
        steps=("crafted", "crafted", "normal", "normal"),
        world_sizes=(3,),
        order="seeded",
        seed=1,
        observe=replace(_SEVERAL_BUCKETS.observe, collectives=True),
        prerequisite="buckets",
    ),
    replace(
        _SEVERAL_BUCKETS,
        name="schedule_2",
        summary=f"{_SCHEDULED}; with another hash seed",
        steps=("crafted", "crafted", "normal", "normal"),
        world_sizes=(3,),
        order="seeded",
        seed=2,
        observe=replace(_SEVERAL_BUCKETS.observe, collectives=True),
        prerequisite="buckets",
        other_hash_seed=True,
    ),
)

# Without a forced order, ranks may issue the collectives of a chained hook in different orders and
# hang. The short deadline limits the wait.
RAW = replace(
    _SEVERAL_BUCKETS,
    name="raw",
    summary="several buckets, with collectives in no forced order, for a hook that is judged "
    "serialised in the other scenarios",
    steps=("crafted",) * 6,
    world_sizes=(3,),
    prerequisite="buckets",
    deadline=5.0,
)

# One large bucket, because growth is judged over steps and not over buckets.
LONG = replace(
    _SEVERAL_BUCKETS,
    name="long",
    summary="twelve steps; memory is measured",
    steps=("crafted",) * 12,
    ddp=replace(_SEVERAL_BUCKETS.ddp, bucket_cap_mb=25.0),
    observe=replace(_SEVERAL_BUCKETS.observe, memory=True),
)

DTYPES = Scenario(
    name="dtypes",
    summary="float32, float64, float16 and bfloat16 parameters in one model",
    params=tuple(
        Param(shape, dtype)
        for dtype in ("float32", "float64", "float16", "bfloat16")
        for shape in ((11,), (3, 5))
    ),
    steps=("crafted", "crafted", "normal"),
    world_sizes=(2, 3),
)

SHAPES = Scenario(
    name="shapes",
    summary="0-d (one of them alone in its bucket), one-element, empty, prime-sized, channels_last "
    "and transposed parameters, and one larger than a bucket",
    params=(
        Param(()),
        Param((1,)),
        Param((0,)),
        Param((13,)),
        Param((4, 3, 2, 5), layout="channels_last"),
        Param((6, 5), layout="transposed"),
        Param((1031,)),
        Param((2, 2)),
        # The only parameter of its dtype: buckets hold one dtype, so it has a bucket of its own.
        Param((), "float64"),
    ),
    steps=("crafted",) * 3,
    world_sizes=(2, 3, 4),
    ddp=DDPOptions(bucket_cap_mb=_CAP),
)

SIZES = Scenario(
    name="sizes",
    summary="buckets of every size from 1 to 33 elements",
    params=tuple(Param((size,)) for size in range(1, 34)),
    steps=("crafted",) * 2,
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=1 / 2**20),  # one byte: no two parameters share a bucket
)

# 1,048,583 is the first prime above 2**20.
LARGE = Scenario(
    name="large",
    summary="one parameter of more than a million elements",
    params=(Param((1_048_583,)),),
    steps=("crafted",),
    world_sizes=(2,),
)

# In (1, 3) the global ranks differ from the ranks within the group. Code that confuses the two
# addresses a rank outside of its group.
SUBGROUPS = Scenario(
    name="subgroups",
    summary="two models on two disjoint subgroups of WORLD at once; group ranks are not global "
    "ranks",
    params=_SMALL,
    steps=("crafted",) * 3,
    groups=((1, 3), (0, 2)),
)

COMPLEX = Scenario(
    name="complex",
    summary="complex parameters, of two models on two groups of ranks",
    params=(
        Param((5, 3), "complex64"),
        Param((7,), "complex64"),
        Param((11,), "complex128"),
    ),
    steps=("crafted", "crafted", "normal"),
    groups=((1, 3), (0, 2)),
)

# The last step is ordinary again: one NaN must not stay in the state of a hook.
SPECIAL = Scenario(
    name="special",
    summary="NaN, infinities, zeros, subnormals, negative zeros, then ordinary values again",
    params=_SMALL,
    steps=(
        "crafted",
        "nan",
        "inf",
        "zero_one",
        "zero_all",
        "tiny",
        "tiny_float16",
        "tiny_bfloat16",
        "minus_zero",
        "crafted",
    ),
    world_sizes=(2, 3),
)

# No parameters of the probe: this scenario trains a real network.
TRAINING = Scenario(
    name="training",
    summary="a small network with batch norm under SGD with momentum, several buckets",
    params=(),
    steps=("normal",) * 6,
    world_sizes=(2, 3),
    ddp=DDPOptions(bucket_cap_mb=_CAP),
)

# Each of the six optimizers has two parameters, in groups of their own. In the step of infinities,
# the gradient scaler has to skip the optimizers' step on all ranks.
OPTIMIZERS = Scenario(
    name="optimizers",
    summary="six optimizers with groups and a schedule; gradients are scaled and clipped, and "
    "overflow on one rank in one step",
    params=tuple(Param(shape) for shape in ((5, 3), (7,), (2, 3, 4), (11,)) for _ in range(3)),
    steps=("crafted", "crafted", "crafted", "inf", "crafted", "crafted"),
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=_CAP, gradient_as_bucket_view=True),
    initial_value=0.0,
    training_loop=True,
)

AT_SCALE = Scenario(
    name="at_scale",
    summary="5 to 1024 ranks, simulated in one process for one step or more; some of the numbers "
    "of ranks are drawn",
    params=(Param((3 * SCALE_NUMEL,)),),
    steps=(),
    world_sizes=(1,),
    prerequisite="ordered",
    # A hook that is right with real ranks must be right with as many simulated ones. If it is not,
    # the simulation is at fault, and the rules of section 20 do not apply. The first three sizes
    # are for that. They do not ascend: a module that keeps the first size is wrong at the next one.
    # The multiples of eight are nodes of eight GPUs, with 2 to 12 of them.
    simulated=(3, 2, 4, 5, 6, 7, 8, 12, *range(16, 97, 8), 1024),
    deadline=30.0,
)


def simulated_steps(size: int) -> int:
    """Return the number of steps that so many simulated ranks take."""
    if size <= 16:
        return 24
    if size <= 32:
        return 4
    return 2 if size < 1024 else 1


UNUSED = replace(
    _SEVERAL_BUCKETS,
    name="unused",
    summary="find_unused_parameters: some ranks, or all, leave some parameters out, different ones "
    "in every step; from the third step on those that all leave out are frozen in it",
    # DDP keeps its first buckets: three parameters, and the other two.
    ddp=DDPOptions(bucket_cap_mb=2**-5, find_unused_parameters=True),
    freezes_unused_from=2,
)

FROZEN = Scenario(
    name="frozen",
    summary="frozen parameters between others, and one that is used twice; the model trains in "
    "eval mode, and parameters get new storage after every step",
    params=(
        Param((5, 3)),
        Param((4, 4), frozen=True),
        Param((7,), uses=2),
        Param((11,), frozen=True),
        Param((2, 3, 4)),
    ),
    steps=("crafted", "normal", "crafted"),
    world_sizes=(2,),
    in_eval_mode=True,
    renews_storage=True,
)

STATIC = replace(
    _SEVERAL_BUCKETS,
    name="static",
    summary="static_graph=True: DDP calls the hook for the first step's buckets after backward",
    ddp=replace(_SEVERAL_BUCKETS.ddp, static_graph=True),
)

# The weights sum to 1, and neither one weight nor two are 1 together: a hook that loses a
# micro-batch gives another gradient.
ACCUMULATED = replace(
    _SEVERAL_BUCKETS,
    name="accumulated",
    summary="two to five micro-batches a step, all but the last one under no_sync; the number is "
    "drawn",
    microbatch_weights=(2, -3, 2),
)

# In the second half the gradients stay the same, so that only the hook's state changes a result.
LIKE = replace(
    VALUES,
    name="like",
    summary="random gradients, then the same gradients in every step",
    steps=("normal",) * 12 + ("constant",) * 12,
    world_sizes=(2,),
)

COMBINED = replace(
    UNUSED,
    name="combined",
    summary="gradients are views, micro-batches accumulate, and some ranks leave some parameters "
    "out, other ones in each micro-batch",
    ddp=replace(_SEVERAL_BUCKETS.ddp, find_unused_parameters=True, gradient_as_bucket_view=True),
    microbatch_weights=(2, -3, 2),
    freezes_unused_from=0,
    prerequisite="accumulated",
)

UNEVEN = replace(
    _SEVERAL_BUCKETS,
    name="uneven",
    summary="under Join, ranks run out of inputs one after another, and one has none at all",
    steps=("crafted",) * 5,
    world_sizes=(3,),
    uneven=True,
)

TWO_MODELS = replace(
    VALUES,
    name="two_models",
    summary="another model with the same subject trains in between",
    world_sizes=(2,),
    twin=True,
)

SAVED = replace(
    VALUES,
    name="saved",
    summary="the state is saved after three steps; one bucket in the first step of a process, two "
    "or more after DDP has rebuilt them",
    steps=("crafted", "crafted", "normal", "crafted", "normal"),
    world_sizes=(2,),
    resume=replace(VALUES.resume, saves_at=3),
)

RESUMED = replace(
    SAVED,
    name="resumed",
    summary="new processes continue from the saved state, which they save and load once more first",
    prerequisite="saved",
    resume=replace(SAVED.resume, resumes=True, passes_on=True),
)

# With one parameter, DDP rebuilds no buckets. A resumed run then has the same buckets as the run
# that it continues, and its results can be compared bit by bit.
SAVED_ONE = replace(
    SAVED,
    name="saved_one",
    summary="the scenario `saved` with one parameter",
    params=(Param((20_011,)),),
)

RESUMED_ONE = replace(
    SAVED_ONE,
    name="resumed_one",
    summary="new processes continue from the saved state",
    prerequisite="saved_one",
    resume=replace(SAVED_ONE.resume, resumes=True),
)

PEER_DIES = replace(
    VALUES,
    name="peer_dies",
    summary="rank 1 dies as it enters the hook at step 2",
    steps=("crafted",) * 3,
    fault=replace(VALUES.fault, kind="peer_dies"),
    world_sizes=(2,),
)

PEER_DIES_LATER = replace(
    PEER_DIES,
    name="peer_dies_later",
    summary="rank 1 dies as it starts the last collective of step 3",
    steps=("crafted",) * 4,
    fault=replace(PEER_DIES.fault, kind="peer_dies_later", step=3),
)

COLLECTIVE_RAISES = replace(
    PEER_DIES,
    name="collective_raises",
    summary="the first collective of step 2 raises on rank 1",
    fault=replace(PEER_DIES.fault, kind="collective_raises"),
)

PEER_SILENT = replace(
    PEER_DIES,
    name="peer_silent",
    summary="rank 1 never enters the hook at step 2; the group's timeout expires",
    fault=replace(PEER_DIES.fault, kind="peer_silent", group_timeout=0.5),
)

# STREAMS, MANY_STEPS and GRAPH run only on devices that have streams.
STREAMS = replace(
    _SEVERAL_BUCKETS,
    name="streams",
    summary="several buckets; in turn, a rank's gradients are late, and its work on other streams "
    "is late",
    # A step that loads kernels of the hook waits for the whole device, and shows nothing.
    steps=("crafted",) * 7,
    delayed=True,
    prerequisite="buckets",
)

# Callbacks of futures take torch's 32 streams in turn, and each of them has memory of its own: what
# they need is known after some rounds.
MANY_STEPS = replace(
    LONG,
    name="many_steps",
    summary="a hundred steps; the memory of the device is measured",
    steps=("crafted",) * 100,
    prerequisite="long",
)

GRAPH = replace(
    _SEVERAL_BUCKETS,
    name="graph",
    summary="a step is captured in a CUDA graph, and replayed",
    captured=True,
    prerequisite="buckets",
)

# For lossy claims only. Their runs are longer: see ``judging/oracles/lossy.py``.
SMALL_GRADIENTS = replace(
    VALUES,
    name="small",
    summary="random gradients, a thousandth as large",
    steps=("small",) * 6,
    world_sizes=(2,),
)

# The scenarios in the order in which they run. The plainest one is first: if it breaks, the hook is
# judged no further.
ALL = (
    VALUES,
    FEWER,
    AS_IS,
    VIEWS,
    BUCKETS,
    ORDERED,
    *SCHEDULES,
    RAW,
    LONG,
    VALUES_AGAIN,
    DTYPES,
    SHAPES,
    SIZES,
    LARGE,
    SUBGROUPS,
    COMPLEX,
    SPARSE,
    UNUSED,
    FROZEN,
    STATIC,
    ACCUMULATED,
    COMBINED,
    UNEVEN,
    TWO_MODELS,
    LIKE,
    SMALL_GRADIENTS,
    SAVED,
    RESUMED,
    SAVED_ONE,
    RESUMED_ONE,
    SPECIAL,
    TRAINING,
    OPTIMIZERS,
    AT_SCALE,
    STREAMS,
    MANY_STEPS,
    GRAPH,
    PEER_DIES,
    PEER_DIES_LATER,
    COLLECTIVE_RAISES,
    PEER_SILENT,
)

BY_NAME = {scenario.name: scenario for scenario in ALL}

# Not part of a certification: it is run only when claims are to be proposed (--claims auto).
NORMAL = replace(
    VALUES,
    name="normal",
    summary="random gradients",
    steps=("normal",) * 8,
)


def explained(scenario: Scenario) -> Scenario:
    """Return the scenario with which a broken run is repeated to explain it.

    Its records show whether ranks disagree on their collectives. The deadline is short, because
    the repeated run only explains the first one and decides nothing.
    """
    return replace(
        scenario,
        name=f"{scenario.name}_explained",
        observe=replace(scenario.observe, collectives=True),
        deadline=3.0,
    )

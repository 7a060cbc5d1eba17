"""TODO: conformance/scenarios/hook.py."""

from dataclasses import replace

from conformance.scenarios.model import DDPOptions, Param, Scenario

SCALES, SCALE_NUMEL = (
    ("random", "large", "small"),
    32,
)  # kinds of gradient at scale, and how many elements each has


# 47 elements: odd, prime, divisible by no world size. All in one bucket.
_SMALL = (Param((5, 3)), Param((7,)), Param((1,)), Param((2, 3, 4)))


# With a cap of 64 bytes every parameter gets a bucket of its own once DDP has rebuilt its buckets. Two are alike, as layers of a
# model are: what is kept by shape, or by the size of a bucket, is not each one's own.
_SEVERAL = (Param((5, 3)), Param((17,)), Param((20_011,)), Param((3, 3, 3)), Param((3, 3, 3)))


_CAP = 64 / 2**20


VALUES = Scenario(
    "values",
    "one bucket; crafted, random and wide-ranged gradients",
    _SMALL,
    ("crafted", "crafted", "crafted", "normal", "normal", "wide"),
)


FEWER = replace(VALUES, name="fewer", summary="fewer ranks than it takes", steps=("crafted",) * 2)


VALUES_AGAIN = replace(
    VALUES,
    name="values_again",
    summary="the same once more, where strings hash otherwise",
    repeat=1,
    world_sizes=(2,),
    other_hash_seed=True,
)


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
    "buckets",
    "one bucket in the first step, five after DDP has rebuilt them",
    _SEVERAL,
    ("crafted",) * 4,
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=_CAP),
)


BUCKETS = replace(_SEVERAL_BUCKETS, observe=replace(_SEVERAL_BUCKETS.observe, other_gradients=True))


ORDERED = replace(
    _SEVERAL_BUCKETS,
    name="ordered",
    summary="rank 0 leaves each hook call before its peers enter",
    order="rank0_first",
    prerequisite="buckets",
)


SCHEDULES = tuple(
    replace(
        _SEVERAL_BUCKETS,
        name=f"schedule_{seed}",
        summary="ranks enter the hook in an order that a seed draws, and callbacks run in one; every collective is on record"
        + ("; strings hash otherwise" if elsewhere else ""),
        steps=("crafted", "crafted", "normal", "normal"),
        world_sizes=(3,),
        order="seeded",
        seed=seed,
        observe=replace(_SEVERAL_BUCKETS.observe, collectives=True),
        prerequisite="buckets",
        other_hash_seed=elsewhere,
    )
    for seed, elsewhere in ((1, False), (2, True))
)


RAW = replace(
    _SEVERAL_BUCKETS,
    name="raw",
    summary="several buckets, for a hook that is judged serialised elsewhere: collectives come as they come",
    steps=("crafted",) * 6,
    world_sizes=(3,),
    prerequisite="buckets",
    deadline=5.0,
)


LONG = replace(
    _SEVERAL_BUCKETS,
    name="long",
    summary="twelve steps; memory is measured",
    steps=("crafted",) * 12,
    ddp=replace(_SEVERAL_BUCKETS.ddp, bucket_cap_mb=25.0),
    observe=replace(_SEVERAL_BUCKETS.observe, memory=True),
)


DTYPES = Scenario(
    "dtypes",
    "float32, float64, float16 and bfloat16 parameters in one model",
    tuple(
        Param(shape, dtype)
        for dtype in ("float32", "float64", "float16", "bfloat16")
        for shape in ((11,), (3, 5))
    ),
    ("crafted", "crafted", "normal"),
    world_sizes=(2, 3),
)


SHAPES = Scenario(
    "shapes",
    "0-d (one of them alone in its bucket), one element, empty, prime, channels_last, transposed, larger than a bucket",
    (
        *(
            Param(()),
            Param((1,)),
            Param((0,)),
            Param((13,)),
            Param((4, 3, 2, 5), layout="channels_last"),
        ),
        *(Param((6, 5), layout="transposed"), Param((1031,)), Param((2, 2)), Param((), "float64")),
    ),
    ("crafted",) * 3,
    world_sizes=(2, 3, 4),
    ddp=DDPOptions(bucket_cap_mb=_CAP),
)


SIZES = Scenario(
    "sizes",
    "buckets of every size from 1 to 33 elements",
    tuple(Param((size,)) for size in range(1, 34)),
    ("crafted",) * 2,
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=1 / 2**20),
)


LARGE = Scenario(
    "large",
    "one parameter of more than a million elements",
    (Param((1_048_583,)),),
    ("crafted",),
    world_sizes=(2,),
)


SUBGROUPS = Scenario(
    "subgroups",
    "two models on two disjoint subgroups of WORLD at once; places in the group are not global ranks",
    _SMALL,
    ("crafted",) * 3,
    groups=((1, 3), (0, 2)),
)


COMPLEX = Scenario(
    "complex",
    "complex parameters",
    (Param((5, 3), "complex64"), Param((7,), "complex64")),
    ("crafted",) * 2,
    world_sizes=(2,),
)


SPARSE = Scenario(
    "sparse",
    "a sparse embedding beside a dense parameter",
    (Param((10, 3), layout="sparse"), Param((7,))),
    ("crafted",) * 3,
    world_sizes=(2,),
)


SPECIAL = Scenario(
    "special",
    "NaN, infinities, zeros, subnormals, negative zeros, then ordinary values again",
    _SMALL,
    (
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


TRAINING = Scenario(
    "training",
    "a small network with batch norm under SGD with momentum, several buckets",
    (),
    ("normal",) * 6,
    world_sizes=(2, 3),
    ddp=DDPOptions(bucket_cap_mb=_CAP),
)


OPTIMIZERS = Scenario(
    "optimizers",
    "six optimizers with groups and a schedule; gradients are scaled and clipped, and overflow on one rank in one step",
    tuple(Param(shape) for shape in ((5, 3), (7,), (2, 3, 4), (11,)) for _ in range(3)),
    ("crafted", "crafted", "crafted", "inf", "crafted", "crafted"),
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=_CAP, gradient_as_bucket_view=True),
    initial_value=0.0,
    training_loop=True,
)


AT_SCALE = Scenario(
    "at_scale",
    "8, 64 and 1024 ranks, simulated in one process",
    (Param((3 * SCALE_NUMEL,)),),
    (),
    world_sizes=(1,),
    prerequisite="ordered",
    simulated=(2, 8, 64, 1024),
    deadline=30.0,
)


UNUSED = replace(
    _SEVERAL_BUCKETS,
    name="unused",
    summary="find_unused_parameters: some ranks, or all, leave some parameters out, other ones in every step",
    ddp=replace(_SEVERAL_BUCKETS.ddp, find_unused_parameters=True),
)


FROZEN = Scenario(
    "frozen",
    "frozen parameters between others, and one that is used twice",
    (
        Param((5, 3)),
        Param((4, 4), frozen=True),
        Param((7,), uses=2),
        Param((11,), frozen=True),
        Param((2, 3, 4)),
    ),
    ("crafted",) * 3,
    world_sizes=(2,),
)


STATIC = replace(
    _SEVERAL_BUCKETS,
    name="static",
    summary="static_graph=True: the first step's buckets come when backward is over",
    ddp=replace(_SEVERAL_BUCKETS.ddp, static_graph=True),
)


ACCUMULATED = replace(
    _SEVERAL_BUCKETS,
    name="accumulated",
    summary="three micro-batches a step, the first two under no_sync",
    microbatch_weights=(2, -3, 2),
)


LIKE = replace(
    VALUES,
    name="like",
    summary="random gradients, then the same again and again",
    steps=("normal",) * 12 + ("constant",) * 12,
    world_sizes=(2,),
)


COMBINED = replace(
    UNUSED,
    name="combined",
    summary="gradients are views, micro-batches accumulate, and some ranks leave some parameters out",
    ddp=replace(UNUSED.ddp, gradient_as_bucket_view=True),
    microbatch_weights=(2, -3, 2),
    prerequisite="accumulated",
)


UNEVEN = replace(
    _SEVERAL_BUCKETS,
    name="uneven",
    summary="under Join, ranks run out of inputs one after another, one has none at all",
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
    summary="the state is saved after three steps",
    steps=("crafted", "crafted", "normal", "crafted", "normal"),
    world_sizes=(2,),
    resume=replace(VALUES.resume, saves_at=3),
)


RESUMED = replace(
    SAVED,
    name="resumed",
    summary="new processes go on from there",
    prerequisite="saved",
    resume=replace(SAVED.resume, resumes=True),
)


SAVED_ONE = replace(
    SAVED, name="saved_one", summary="the same with one parameter", params=(Param((20_011,)),)
)


RESUMED_ONE = replace(
    SAVED_ONE,
    name="resumed_one",
    summary="new processes go on from there",
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


# Where the device has streams alone.
STREAMS = replace(
    _SEVERAL_BUCKETS,
    name="streams",
    summary="several buckets; in turn a rank's gradients are late, and what it puts on streams beside them is",
    steps=("crafted",) * 5,
    delayed=True,
    prerequisite="buckets",
)


GRAPH = replace(
    _SEVERAL_BUCKETS,
    name="graph",
    summary="a step is captured in a CUDA graph, and replayed",
    captured=True,
    prerequisite="buckets",
)


# Under lossy claims alone, which make it longer: see lossy.py.
SMALL_GRADIENTS = replace(
    VALUES,
    name="small",
    summary="random gradients, a thousandth as large",
    steps=("small",) * 6,
    world_sizes=(2,),
)


# In the order in which they run: the plainest first, since a hook that breaks it is judged no further.
ALL = (
    *(
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
    ),
    *(
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
    ),
    *(
        RESUMED_ONE,
        SPECIAL,
        TRAINING,
        OPTIMIZERS,
        AT_SCALE,
        STREAMS,
        GRAPH,
        PEER_DIES,
        PEER_DIES_LATER,
        COLLECTIVE_RAISES,
        PEER_SILENT,
    ),
)


BY_NAME = {scenario.name: scenario for scenario in ALL}


# Not of the plan: asked for where claims are to be proposed.
NORMAL = replace(VALUES, name="normal", summary="random gradients", steps=("normal",) * 8)


def explained(scenario: Scenario) -> Scenario:
    """Return how a run that broke is repeated, to learn whether ranks disagree on their collectives.

    It is not waited for long: it only explains.
    """
    return replace(
        scenario,
        name=f"{scenario.name}_explained",
        observe=replace(scenario.observe, collectives=True),
        deadline=3.0,
    )

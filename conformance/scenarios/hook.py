"""TODO: conformance/scenarios/hook.py."""

from dataclasses import replace

from conformance.scenarios.model import Param, Scenario

SCALES, SCALE_NUMEL = ("random", "large", "small"), 32  # kinds of gradient at scale, and how many elements each has


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


FEWER = replace(VALUES, name="fewer", what="fewer ranks than it takes", steps=("crafted",) * 2)


VALUES_AGAIN = replace(
    VALUES, name="values_again", what="the same once more, where strings hash otherwise", repeat=1, world_sizes=(2,), elsewhere=True
)


AS_IS = replace(
    VALUES, name="as_is", what="the hook registered as it is, unobserved", observed=False, steps=("crafted",) * 3, world_sizes=(2,)
)


VIEWS = replace(AS_IS, name="views", what="gradients are views of the buckets", view=True, observed=True)


_SEVERAL_BUCKETS = Scenario(
    "buckets",
    "one bucket in the first step, five after DDP has rebuilt them",
    _SEVERAL,
    ("crafted",) * 4,
    world_sizes=(2,),
    bucket_cap_mb=_CAP,
)


BUCKETS = replace(_SEVERAL_BUCKETS, outside=True)


ORDERED = replace(
    _SEVERAL_BUCKETS, name="ordered", what="rank 0 leaves each hook call before its peers enter", order="rank0_first", after="buckets"
)


SCHEDULES = tuple(
    replace(
        _SEVERAL_BUCKETS,
        name=f"schedule_{seed}",
        what="ranks enter the hook in an order that a seed draws, and callbacks run in one; every collective is on record"
        + ("; strings hash otherwise" if elsewhere else ""),
        steps=("crafted", "crafted", "normal", "normal"),
        world_sizes=(3,),
        order="seeded",
        seed=seed,
        recorded=True,
        after="buckets",
        elsewhere=elsewhere,
    )
    for seed, elsewhere in ((1, False), (2, True))
)


RAW = replace(
    _SEVERAL_BUCKETS,
    name="raw",
    what="several buckets, for a hook that is judged serialised elsewhere: collectives come as they come",
    steps=("crafted",) * 6,
    world_sizes=(3,),
    after="buckets",
    deadline=5.0,
)


LONG = replace(
    _SEVERAL_BUCKETS, name="long", what="twelve steps; memory is measured", steps=("crafted",) * 12, bucket_cap_mb=25.0, growth=True
)


DTYPES = Scenario(
    "dtypes",
    "float32, float64, float16 and bfloat16 parameters in one model",
    tuple(Param(shape, dtype) for dtype in ("float32", "float64", "float16", "bfloat16") for shape in ((11,), (3, 5))),
    ("crafted", "crafted", "normal"),
    world_sizes=(2, 3),
)


SHAPES = Scenario(
    "shapes",
    "0-d (one of them alone in its bucket), one element, empty, prime, channels_last, transposed, larger than a bucket",
    (
        *(Param(()), Param((1,)), Param((0,)), Param((13,)), Param((4, 3, 2, 5), layout="channels_last")),
        *(Param((6, 5), layout="transposed"), Param((1031,)), Param((2, 2)), Param((), "float64")),
    ),
    ("crafted",) * 3,
    world_sizes=(2, 3, 4),
    bucket_cap_mb=_CAP,
)


SIZES = Scenario(
    "sizes",
    "buckets of every size from 1 to 33 elements",
    tuple(Param((size,)) for size in range(1, 34)),
    ("crafted",) * 2,
    world_sizes=(2,),
    bucket_cap_mb=1 / 2**20,
)


LARGE = Scenario("large", "one parameter of more than a million elements", (Param((1_048_583,)),), ("crafted",), world_sizes=(2,))


SUBGROUPS = Scenario(
    "subgroups",
    "two models on two disjoint subgroups of WORLD at once; places in the group are not global ranks",
    _SMALL,
    ("crafted",) * 3,
    groups=((1, 3), (0, 2)),
)


COMPLEX = Scenario(
    "complex", "complex parameters", (Param((5, 3), "complex64"), Param((7,), "complex64")), ("crafted",) * 2, world_sizes=(2,)
)


SPARSE = Scenario(
    "sparse", "a sparse embedding beside a dense parameter", (Param((10, 3), layout="sparse"), Param((7,))), ("crafted",) * 3,
    world_sizes=(2,),
)  # fmt: skip


SPECIAL = Scenario(
    "special",
    "NaN, infinities, zeros, subnormals, negative zeros, then ordinary values again",
    _SMALL,
    ("crafted", "nan", "inf", "zero_one", "zero_all", "tiny", "tiny_float16", "tiny_bfloat16", "minus_zero", "crafted"),
    world_sizes=(2, 3),
)


TRAINING = Scenario(
    "training", "a small network with batch norm under SGD with momentum, several buckets", (), ("normal",) * 6,
    world_sizes=(2, 3), bucket_cap_mb=_CAP,
)  # fmt: skip


OPTIMIZERS = Scenario(
    "optimizers",
    "six optimizers with groups and a schedule; gradients are scaled and clipped, and overflow on one rank in one step",
    tuple(Param(shape) for shape in ((5, 3), (7,), (2, 3, 4), (11,)) for _ in range(3)),
    ("crafted", "crafted", "crafted", "inf", "crafted", "crafted"),
    world_sizes=(2,),
    bucket_cap_mb=_CAP,
    view=True,
    level=0.0,
    recipe=True,
)


AT_SCALE = Scenario(
    "at_scale",
    "8, 64 and 1024 ranks, simulated in one process",
    (Param((3 * SCALE_NUMEL,)),),
    (),
    world_sizes=(1,),
    after="ordered",
    simulated=(2, 8, 64, 1024),
    deadline=30.0,
)


UNUSED = replace(
    _SEVERAL_BUCKETS,
    name="unused",
    what="find_unused_parameters: some ranks, or all, leave some parameters out, other ones in every step",
    find_unused=True,
)


FROZEN = Scenario(
    "frozen",
    "frozen parameters between others, and one that is used twice",
    (Param((5, 3)), Param((4, 4), frozen=True), Param((7,), uses=2), Param((11,), frozen=True), Param((2, 3, 4))),
    ("crafted",) * 3,
    world_sizes=(2,),
)


STATIC = replace(
    _SEVERAL_BUCKETS, name="static", what="static_graph=True: the first step's buckets come when backward is over", static_graph=True
)


ACCUMULATED = replace(
    _SEVERAL_BUCKETS, name="accumulated", what="three micro-batches a step, the first two under no_sync", shares=(2, -3, 2)
)


LIKE = replace(
    VALUES,
    name="like",
    what="random gradients, then the same again and again",
    steps=("normal",) * 12 + ("constant",) * 12,
    world_sizes=(2,),
)


COMBINED = replace(
    UNUSED,
    name="combined",
    what="gradients are views, micro-batches accumulate, and some ranks leave some parameters out",
    view=True,
    shares=(2, -3, 2),
    after="accumulated",
)


UNEVEN = replace(
    _SEVERAL_BUCKETS,
    name="uneven",
    what="under Join, ranks run out of inputs one after another, one has none at all",
    steps=("crafted",) * 5,
    world_sizes=(3,),
    uneven=True,
)


TWO_MODELS = replace(VALUES, name="two_models", what="another model with the same subject trains in between", world_sizes=(2,), twin=True)


SAVED = replace(
    VALUES, name="saved", what="the state is saved after three steps", steps=("crafted", "crafted", "normal", "crafted", "normal"),
    world_sizes=(2,), saves_at=3,
)  # fmt: skip


RESUMED = replace(SAVED, name="resumed", what="new processes go on from there", after="saved", resumes=True)


SAVED_ONE = replace(SAVED, name="saved_one", what="the same with one parameter", params=(Param((20_011,)),))


RESUMED_ONE = replace(SAVED_ONE, name="resumed_one", what="new processes go on from there", after="saved_one", resumes=True)


PEER_DIES = replace(
    VALUES, name="peer_dies", what="rank 1 dies as it enters the hook at step 2", steps=("crafted",) * 3, fault="peer_dies",
    world_sizes=(2,),
)  # fmt: skip


PEER_DIES_LATER = replace(
    PEER_DIES, name="peer_dies_later", what="rank 1 dies as it starts the last collective of step 3", steps=("crafted",) * 4,
    fault="peer_dies_later", fault_step=3,
)  # fmt: skip


COLLECTIVE_RAISES = replace(
    PEER_DIES, name="collective_raises", what="the first collective of step 2 raises on rank 1", fault="collective_raises"
)


PEER_SILENT = replace(
    PEER_DIES,
    name="peer_silent",
    what="rank 1 never enters the hook at step 2; the group's timeout expires",
    fault="peer_silent",
    group_timeout=0.5,
)


# Where the device has streams alone.
STREAMS = replace(
    _SEVERAL_BUCKETS,
    name="streams",
    what="several buckets; in turn a rank's gradients are late, and what it puts on streams beside them is",
    steps=("crafted",) * 5,
    delayed=True,
    after="buckets",
)


GRAPH = replace(_SEVERAL_BUCKETS, name="graph", what="a step is captured in a CUDA graph, and replayed", captured=True, after="buckets")


# Under lossy claims alone, which make it longer: see lossy.py.
SMALL_GRADIENTS = replace(VALUES, name="small", what="random gradients, a thousandth as large", steps=("small",) * 6, world_sizes=(2,))


# In the order in which they run: the plainest first, since a hook that breaks it is judged no further.
ALL = (
    *(VALUES, FEWER, AS_IS, VIEWS, BUCKETS, ORDERED, *SCHEDULES, RAW, LONG, VALUES_AGAIN, DTYPES, SHAPES, SIZES, LARGE, SUBGROUPS),
    *(COMPLEX, SPARSE, UNUSED, FROZEN, STATIC, ACCUMULATED, COMBINED, UNEVEN, TWO_MODELS, LIKE, SMALL_GRADIENTS, SAVED, RESUMED, SAVED_ONE),
    *(RESUMED_ONE, SPECIAL, TRAINING, OPTIMIZERS, AT_SCALE, STREAMS, GRAPH, PEER_DIES, PEER_DIES_LATER, COLLECTIVE_RAISES, PEER_SILENT),
)


BY_NAME = {scenario.name: scenario for scenario in ALL}


# Not of the plan: asked for where claims are to be proposed.
NORMAL = replace(VALUES, name="normal", what="random gradients", steps=("normal",) * 8)


def explained(scenario: Scenario) -> Scenario:
    """Return how a run that broke is repeated, to learn whether ranks disagree on their collectives.

    It is not waited for long: it only explains.
    """
    return replace(scenario, name=f"{scenario.name}_explained", recorded=True, deadline=3.0)

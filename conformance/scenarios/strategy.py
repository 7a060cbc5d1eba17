"""TODO: conformance/scenarios/strategy.py."""

from dataclasses import replace

from conformance.scenarios.model import DDPOptions, Param, Scenario

_CAP = 100 / 2**20  # MiB: a few parameters to a bucket


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
    "strategy",
    "steps of one micro-batch",
    _PARAMS,
    ("crafted",) * 3,
    ddp=DDPOptions(bucket_cap_mb=_CAP),
    kind="strategy",
    prerequisite="strategy",
    initial_value=0.0,
)


ACCUMULATED = replace(
    PLAIN,
    name="strategy_accumulated",
    summary="steps of 2, 4, 1 and 2 micro-batches",
    steps=("crafted",) * 4,
    variant="accumulated",
    observe=replace(PLAIN.observe, process=True),
)


RANDOM = replace(
    ACCUMULATED,
    name="strategy_random",
    summary="the same with random values",
    steps=("normal",) * 4,
    world_sizes=(3, 4),
)


MICROBATCHES = replace(
    PLAIN,
    name="strategy_microbatches",
    summary="one step of four micro-batches that use different parameters, the same ones on all ranks",
    steps=("crafted",),
    world_sizes=(2, 3),
    variant="microbatches",
    prerequisite="strategy_accumulated",
)


RANKS = replace(
    PLAIN,
    name="strategy_ranks",
    summary="each rank leaves out another parameter, of many that have one shape; the last one is left out by all",
    params=(Param((5, 3)),) * 6,
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
    summary="find_unused_parameters and views; by rank and by micro-batch other parameters are used, some by one rank alone",
    world_sizes=(2, 3),
    ddp=replace(PLAIN.ddp, gradient_as_bucket_view=True, find_unused_parameters=True),
    variant="combined",
    prerequisite="strategy_ranks",
)


SHARED = replace(
    VIEWS,
    name="strategy_shared",
    summary="two optimizers share a parameter; their groups are not in the model's order",
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
    summary="four dtypes in one model; channels_last, transposed, 0-d, empty and one-element parameters, and a frozen one",
    params=(
        *(
            Param(shape, dtype)
            for dtype in ("float32", "float64", "float16", "bfloat16")
            for shape in ((11,), (3, 5))
        ),
        *(
            Param((4, 3, 2, 5), layout="channels_last"),
            Param((6, 5), layout="transposed"),
            Param((4, 4), frozen=True),
        ),
        *(Param(()), Param((0,)), Param((1,), "float64")),
    ),
    steps=("crafted", "normal"),
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
)


SPARSE = replace(
    VIEWS,
    name="strategy_sparse",
    summary="a sparse embedding beside dense parameters",
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    params=(Param((10, 3), layout="sparse"), Param((7,)), Param((2, 3))),
)


SUBGROUPS = replace(
    PLAIN,
    name="strategy_subgroups",
    summary="two models on two disjoint subgroups of WORLD; places in the group are not global ranks",
    groups=((1, 3), (0, 2)),
    variant="two",
    observe=replace(PLAIN.observe, collectives=True),
)


ORDERED = replace(
    VIEWS,
    name="strategy_ordered",
    summary="peers begin each micro-batch when rank 0 is done with it, or waits for them",
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    order="rank0_first",
)


RAISES = replace(
    VIEWS,
    name="strategy_raises",
    summary="in two steps an exception is raised inside the context on all ranks: before a backward, and after the last",
    steps=("crafted",) * 4,
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    variant="raises",
)


WITHOUT = replace(
    VIEWS,
    name="strategy_without",
    summary="every other step is DDP's alone",
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


COUNTED = replace(
    VIEWS,
    name="strategy_counted",
    summary="steps of four micro-batches; bytes that are communicated are counted",
    params=(Param((1000,)), Param((40, 30)), Param((900,))),
    ddp=replace(VIEWS.ddp, gradient_as_bucket_view=False),
    variant="four",
    observe=replace(VIEWS.observe, bytes_sent=True),
)


_BATCHES = {"": (1,), "accumulated": (2, 4, 1), "microbatches": (4,), "claim": (4,), "four": (4,)}


_DIFFERENT = ("microbatches", "ranks", "combined", "claim")


def batches(scenario: Scenario, step: int) -> int:
    """Return how many micro-batches a step has."""
    if by_itself(scenario, step):
        return 1
    numbers = _BATCHES.get(scenario.variant, (2,))
    return numbers[step % len(numbers)]


def by_itself(scenario: Scenario, step: int) -> bool:
    """Whether a step is DDP's alone, without the subject."""
    return scenario.variant == "without" and step % 2 == 1


def clears(scenario: Scenario, step: int) -> bool:
    """Whether gradients are cleared before a step."""
    return scenario.variant != "kept" or step % 2 == 0


def raises_in(scenario: Scenario, step: int) -> int | None:
    """Return the micro-batch of a step in which an exception is raised, which is its last; None where there is none."""
    return {1: 0, 2: 1}.get(step) if scenario.variant == "raises" else None


def multiple(size: int, number: int, batch: int) -> int:
    """Return what a micro-batch's gradient is a multiple of the step's by, where a step has a number of them.

    Every choice of micro-batches has a sum of its own. What is averaged again in each micro-batch is divided by the size of
    the group as often: the power of it keeps that exact.
    """
    return int(2**batch * size ** (number - 1))


def uses(scenario: Scenario, size: int, place: int, step: int, batch: int, index: int) -> bool:
    """Whether a micro-batch of the rank in a place of its group uses a parameter."""
    if scenario.params[index].frozen:
        return False
    last = batch == batches(scenario, step) - 1
    match scenario.variant:
        case "microbatches" | "claim":
            return (
                True,
                batch == 0,
                last,
                0 < batch < 3,
                False,
                batch in (0, 3),
                batch == 1,
                batch != 2,
            )[index]
        case "ranks":
            return index not in (
                len(scenario.params) - 1,
                (place + step) % (len(scenario.params) - 1),
            )
        case "combined":
            one, other = place == step % size, place == (step + 1) % size
            return (
                True,
                one and last,
                other and not last,
                False,
                batch % 2 == place % 2,
                place > 0,
                last,
                not last,
            )[index]
    return True

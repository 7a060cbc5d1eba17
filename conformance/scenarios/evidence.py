"""Scenarios for hooks that lose evidence: a NaN, an infinity or a failure, in buckets of any size.

Their sizes, steps and places are drawn from the session's seed, in these ranges:

special         three steps with NaN and three with an infinity, each on one rank of 0, 1 and 2
                (modulo the world size), in one drawn parameter, at its first, its last or a drawn
                element
special_first   one to three steps with NaN or infinities on one rank, before any other; two to five
                ordinary ones; one or two with NaN or infinities again, and an ordinary one
special_large   a matrix of 2**14 to 2**22 elements, every size as likely as its double; NaN on each
                of two ranks and an infinity on one, at its first, its last or a drawn element; NaN
                in a bucket of one element; if single results are judged, the matrix is mostly zeros
                in two more steps; a part of 1/16 to all of the other elements of one rank has NaN
                in one of them, and infinities in the other; so have the rows of an embedding that
                are not zero, in two more steps
fails_large, dies_large
                one parameter of 2**12 to 2**22 elements; the failure happens in step 1 to 5
feedback_unused 7 to 9 rests, each of one to three steps, at least two longer than one; the
                sizes of the matrices; whether each has a bucket of its own; for half of the seeds
                two to four micro-batches a step; which of three ranks waits; 60 to 150 steps in
                which all parameters are used
feedback_rescaled
                the sizes of four parameters; two share a bucket; four loss scales of 2**0
                to 2**16, each for three to six steps; the second is lower than the first by 2**7 to
                2**10, the third higher than the second by 2**3 or more
feedback_overflown
                the sizes of five parameters; two or more share a bucket; three to six
                steps, an overflow on one rank or on all, and six to nine steps at a loss scale that
                is lower by 2**7 to 2**10
fails_late      a small bucket; the failure happens in step 4 to 255, every step as likely as the
                one of twice its number
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.hook import SPECIAL, VALUES
from conformance.scenarios.micro_batches import with_micro_batches
from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.scenarios.mostly_zero import draw_embedding

# The names of all ranks of the largest world that `special` runs at.
_RANKS = (0, 1, 2)
_SMALLEST_MATRIX = 14  # exponents of two
_SMALLEST_FAILURE = 12
_LARGEST = 22
_LATEST_FAILURE = 5
_MOST_MICRO_BATCHES = 4
_STEPS_OF_ALL = (60, 150)
_FIRST_LATE_FAILURE = 4
_LAST_LATE_FAILURE = 255

# DDP closes a bucket at 64 bytes, so that each parameter has a bucket of its own.
_CAP = 64 / 2**20
# Two or three matrices of about 3 KiB.
_CAP_OF_SEVERAL = 6 / 2**10
# A matrix of 3 to 5 KiB and the vector after it.
_CAP_OF_PAIRS = 4 / 2**10

# GradScaler begins with 2**16: the first step is the one that overflows most often.
SPECIAL_FIRST = replace(
    SPECIAL,
    name="special_first",
    summary="NaN or infinities on one rank from the first step on, and again after ordinary values",
    steps=("crafted",) * 3,
    world_sizes=(2,),
    prerequisite="special",
)

SPECIAL_LARGE = Scenario(
    name="special_large",
    summary="a lone NaN or infinity in a large bucket, and NaN in a bucket of one element, at "
    "drawn places",
    # DDP fills its buckets from the last parameter on: the element is left for a bucket of its own.
    params=(Param((1,)), Param((17,)), Param((137, 131))),
    steps=("tiled", "nan/0/2/0", "nan/1/2/-1", "inf/1/2/9", "nan/1/0/0", "tiled"),
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=_CAP),
    prerequisite="special",
)

_OTHER_DTYPES = ("float16", "bfloat16", "float64")
SPECIAL_DEEP = Scenario(
    name="special_deep",
    summary="a lone NaN or infinity in one of 65 to 140 buckets of four dtypes, at drawn places",
    params=(Param((17,)),) * 65,
    steps=("tiled", "tiled", "nan/0/64/0", "inf/1/64/-1", "nan/1/3/9", "tiled"),
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=_CAP),
    prerequisite="special",
)

_LARGE_FAULT = replace(
    VALUES,
    name="fails_large",
    summary="the first collective of a drawn step raises on rank 1; one bucket of a drawn size",
    params=(Param((4099,)),),
    steps=("tiled",) * (_LATEST_FAILURE + 1),
    world_sizes=(2,),
    prerequisite="collective_raises",
)

COLLECTIVE_RAISES_LARGE = replace(
    _LARGE_FAULT, fault=replace(VALUES.fault, kind="collective_raises")
)

PEER_DIES_LARGE = replace(
    _LARGE_FAULT,
    name="dies_large",
    summary="rank 1 dies as it enters the hook at a drawn step; one bucket of a drawn size",
    fault=replace(VALUES.fault, kind="peer_dies"),
    prerequisite="peer_dies",
)

COLLECTIVE_RAISES_LATE = replace(
    _LARGE_FAULT,
    name="fails_late",
    summary="the first collective of a drawn step, up to the 256th, raises on rank 1",
    params=(Param((5, 3)), Param((7,))),
    fault=replace(VALUES.fault, kind="collective_raises"),
)

# DDP fills buckets from the last parameter on.
_MATRICES = (Param((24, 32)), Param((32, 24)), Param((28, 28)), Param((300,)), Param((24, 24)))

FEEDBACK_UNUSED = Scenario(
    name="feedback_unused",
    summary="find_unused_parameters, for hooks that hold back parts of gradients: in each step no "
    "rank uses one parameter of five; it rests for up to three steps; all are used in 60 to 150 "
    "steps before; a rank outside of the model's group waits",
    params=_MATRICES,
    steps=("normal",) * 12,
    groups=((0, 2), (1,)),
    # A vote of all ranks on what is unused would count what other models use.
    idle=(1,),
    observe=replace(VALUES.observe, collectives=True),
    ddp=DDPOptions(bucket_cap_mb=_CAP, find_unused_parameters=True),
    # In these steps no parameter rests, and next to nothing is held back.
    unrecorded_steps=60,
    unrecorded_kind="faint",
    prerequisite="unused",
)

FEEDBACK_RESCALED = Scenario(
    name="feedback_rescaled",
    summary="the loss scale changes, for hooks that hold back parts of gradients",
    params=(*_MATRICES[1:4], Param((70_000,))),
    steps=("normal",) * 16,
    world_sizes=(2,),
    # Two parameters share a bucket; the largest one and the first one have their own.
    ddp=DDPOptions(bucket_cap_mb=_CAP_OF_PAIRS),
    loss_scales=(16,) * 4 + (10,) * 4 + (13,) * 4 + (12,) * 4,
    prerequisite="buckets",
)

FEEDBACK_OVERFLOWN = Scenario(
    name="feedback_overflown",
    summary="the loss scale falls after an overflow, for hooks that hold back parts of gradients",
    params=_MATRICES,
    steps=("normal",) * 3 + ("inf/1/all",) + ("normal",) * 6,
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=_CAP_OF_PAIRS),
    loss_scales=(16,) * 4 + (8,) * 6,
    prerequisite="buckets",
)

FEEDBACK_RESTING = replace(
    FEEDBACK_UNUSED,
    name="feedback_resting",
    summary="the loss scale changes while no rank uses one parameter of five, for hooks that hold "
    "back parts of gradients",
    world_sizes=(2,),
    groups=(),
    idle=(),
    observe=VALUES.observe,
    unrecorded_steps=0,
    loss_scales=(16,) * 6 + (8,) * 6,
)

# Those in which the sum of all results shows what became of residuals.
FOR_RESIDUALS = (FEEDBACK_UNUSED, FEEDBACK_RESCALED, FEEDBACK_OVERFLOWN, FEEDBACK_RESTING)
RESIDUALS = frozenset(scenario.name for scenario in FOR_RESIDUALS)

SCENARIOS = (
    SPECIAL_FIRST,
    SPECIAL_LARGE,
    SPECIAL_DEEP,
    COLLECTIVE_RAISES_LARGE,
    PEER_DIES_LARGE,
    COLLECTIVE_RAISES_LATE,
    *FOR_RESIDUALS,
)


def _draw_element(draw: random.Random) -> int:
    """Return the first element, the last one, or any."""
    return draw.choice((0, -1, draw.randrange(2**30)))


def _draw_size(draw: random.Random, smallest: int) -> int:
    """Return a number of elements whose logarithm is uniform."""
    return int(2.0 ** draw.uniform(smallest, _LARGEST))


def _draw_special(scenario: Scenario, draw: random.Random) -> Scenario:
    """Insert the steps with special values on one rank, before the last step."""
    places = [
        f"{kind}/{rank}/{draw.randrange(len(scenario.params))}/{_draw_element(draw)}"
        for kind in ("nan", "inf")
        for rank in draw.sample(_RANKS, len(_RANKS))
    ]
    *steps, last = scenario.steps
    return replace(scenario, steps=(*steps, *places, last))


def _draw_special_first(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the steps that overflow, before the ordinary ones and between them.

    The first step after the ordinary ones has NaN if the first of all has infinities, or the other
    way round: rules on each of them have something to judge.
    """

    def overflow(kind: str) -> str:
        rank = draw.choice((0, 1))
        places = {"nan": f"{draw.randrange(len(scenario.params))}/all", "inf": "all"}
        return f"{kind}/{rank}/{places[kind]}"

    def overflows(kinds: list[str]) -> list[str]:
        return [overflow(kind) for kind in kinds]

    one, other = draw.sample(("nan", "inf"), 2)
    first = overflows([one, *draw.choices((one, other), k=draw.randint(0, 2))])
    between = ["crafted"] * draw.randint(2, 5)
    again = overflows([other, *draw.choices((one, other), k=draw.randint(0, 1))])
    return replace(scenario, steps=(*first, *between, *again, "crafted"))


def _draw_special_large(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the matrix, and the places in it."""
    one, small, _ = scenario.params
    columns = draw.randrange(97, 211)
    rows = max(2, _draw_size(draw, _SMALLEST_MATRIX) // columns)
    first, second = draw.sample((0, 1), 2)
    steps = (
        "tiled",
        f"nan/{first}/2/{_draw_element(draw)}",
        f"nan/{second}/2/{_draw_element(draw)}",
        f"inf/{draw.choice((0, 1))}/2/{_draw_element(draw)}",
        f"nan/{draw.choice((0, 1))}/0/0",
        "tiled",
    )
    return replace(scenario, params=(one, small, Param((rows, columns))), steps=steps)


def among_zeros(kind: str, rank: int, param: int, draw: random.Random) -> str:
    """Return a kind with special values among zeros, which are drawn (``specials.py``)."""
    return f"{kind}/{rank}/{param}/zeros{draw.randrange(10**6)}"


def add_special_among_zeros(scenario: Scenario, draw: random.Random) -> Scenario:
    """Add an embedding, and two steps in which it or the matrix is mostly zeros, for each of them,
    in a drawn order with the others but the first and the last."""
    first, *between, last = scenario.steps
    embedding = len(scenario.params)
    for param in (embedding - 1, embedding):
        between += [among_zeros(kind, draw.choice((0, 1)), param, draw) for kind in ("nan", "inf")]
    draw.shuffle(between)
    params = (*scenario.params, draw_embedding(draw))
    return replace(scenario, params=params, steps=(first, *between, last))


def _draw_special_deep(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the number of buckets, their sizes and dtypes, and the places.

    One place is in the last parameter, which has the first bucket, one in the first parameter,
    which has the last bucket, one anywhere between them, and one in a parameter of each other
    dtype.
    """
    count = draw.randint(65, 140)
    between, *others = draw.sample(range(1, count - 1), 1 + len(_OTHER_DTYPES))
    dtypes = dict(zip(others, _OTHER_DTYPES, strict=True))
    params = tuple(
        Param((draw.randint(17, 64),), dtypes.get(place, "float32")) for place in range(count)
    )
    # Both kinds at each place: a defect of one kind must not depend on the drawn place.
    special = [
        f"{kind}/{draw.choice((0, 1))}/{place}/{_draw_element(draw)}"
        for place in (0, count - 1, between, *others)
        for kind in ("nan", "inf")
    ]
    draw.shuffle(special)
    before = ("tiled",) * draw.randint(2, 6)
    return replace(scenario, params=params, steps=(*before, *special, "tiled"))


def draw_failure(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the size of the bucket, and the first step that may fail."""
    step = draw.randint(1, _LATEST_FAILURE)
    return replace(
        scenario,
        params=(Param((_draw_size(draw, _SMALLEST_FAILURE),)),),
        steps=("tiled",) * (step + scenario.fault.attempts),
        fault=replace(scenario.fault, step=step),
    )


def draw_late_failure(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the first step that may fail."""
    exponents = (math.log2(_FIRST_LATE_FAILURE), math.log2(_LAST_LATE_FAILURE + 1))
    step = int(2.0 ** draw.uniform(*exponents))
    return replace(
        scenario,
        steps=("tiled",) * (step + scenario.fault.attempts),
        fault=replace(scenario.fault, step=step),
    )


def _draw_matrices(params: tuple[Param, ...], draw: random.Random) -> tuple[Param, ...]:
    return tuple(
        replace(spec, shape=tuple(draw.randint(side, side + side // 4) for side in spec.shape))
        for spec in params
    )


def _draw_unused(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the sizes and the buckets, and the rests with their lengths.

    In five rests that follow one another each parameter rests once on all ranks. DDP drops its
    result alone if its bucket has others.
    """
    params = _draw_matrices(scenario.params, draw)
    count = draw.randint(7, 9)
    lengths = [draw.randint(2, 3) for _ in range(2)]
    lengths += [draw.randint(1, 3) for _ in range(count - len(lengths))]
    draw.shuffle(lengths)
    first = draw.randrange(len(params))
    steps = [f"normal@{first + at}" for at, length in enumerate(lengths) for _ in range(length)]
    cap = draw.choice((_CAP, _CAP_OF_SEVERAL))
    return replace(
        scenario,
        params=params,
        steps=tuple(steps),
        ddp=replace(scenario.ddp, bucket_cap_mb=cap),
    )


def _draw_unused_in_micro_batches(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the same, and whether a step has two to four micro-batches, which of three ranks waits,
    and the number of steps in which all parameters are used.
    """
    scenario = _draw_unused(scenario, draw)
    if draw.random() >= 0.5:
        scenario = with_micro_batches(scenario, draw.randint(2, _MOST_MICRO_BATCHES), draw)
    idle = draw.randrange(3)
    training = tuple(rank for rank in range(3) if rank != idle)
    before = draw.randint(*_STEPS_OF_ALL)
    return replace(scenario, groups=(training, (idle,)), idle=(idle,), unrecorded_steps=before)


def _draw_rescaled(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the sizes, the loss scales and their numbers of steps.

    The last parameter is a vector of 2**16 to 2**17 elements.
    """
    first = draw.randint(12, 16)
    low = first - draw.randint(7, 10)
    scales = [first, low, draw.randint(low + 3, 16), draw.randint(0, 16)]
    lengths = [draw.randint(3, 6) for _ in scales]
    pairs = zip(scales, lengths, strict=True)
    exponents = [scale for scale, length in pairs for _ in range(length)]
    return replace(
        scenario,
        params=(
            *_draw_matrices(scenario.params[:-1], draw),
            Param((draw.randint(2**16 + 1, 2**17 - 1),)),
        ),
        steps=("normal",) * len(exponents),
        loss_scales=tuple(exponents),
    )


def _draw_overflown(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the sizes, the loss scales, the numbers of steps, and where the overflow is: in all
    elements of one parameter, or of all.
    """
    first = draw.randint(12, 16)
    before, after = draw.randint(3, 6), draw.randint(6, 9)
    params = _draw_matrices(scenario.params, draw)
    place = draw.choice(("", f"{draw.randrange(len(params))}/"))
    overflow = f"inf/{draw.choice((0, 1))}/{place}all"
    return replace(
        scenario,
        params=params,
        steps=("normal",) * before + (overflow,) + ("normal",) * after,
        loss_scales=(first,) * (before + 1) + (first - draw.randint(7, 10),) * after,
    )


def _draw_resting(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the sizes, the number of steps, and the loss scales.

    The scale changes four times, each time by a factor of 2**8 or more: estimates of one parameter
    of five in an old scale are then longer than the bound of ``oracles/feedback.py``.
    """
    scenario = _draw_unused(scenario, draw)
    count = len(scenario.steps)
    changes = draw.sample(range(2, count - 1), 4)
    exponents = [draw.randint(13, 16)]
    for step in range(1, count):
        last = exponents[-1]
        if step in changes:
            last = draw.randint(2, 5) if last > 8 else draw.randint(13, 16)
        exponents.append(last)
    return replace(scenario, loss_scales=tuple(exponents))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    SPECIAL.name: _draw_special,
    SPECIAL_FIRST.name: _draw_special_first,
    SPECIAL_LARGE.name: _draw_special_large,
    SPECIAL_DEEP.name: _draw_special_deep,
    COLLECTIVE_RAISES_LARGE.name: draw_failure,
    PEER_DIES_LARGE.name: draw_failure,
    COLLECTIVE_RAISES_LATE.name: draw_late_failure,
    FEEDBACK_UNUSED.name: _draw_unused_in_micro_batches,
    FEEDBACK_RESCALED.name: _draw_rescaled,
    FEEDBACK_OVERFLOWN.name: _draw_overflown,
    FEEDBACK_RESTING.name: _draw_resting,
}

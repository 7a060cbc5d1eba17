"""The scenarios for quantized collectives as training uses them: sizes, values, buffers and waits.

Their numbers are drawn from the session's seed, by the functions in ``DRAWS``.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.collective import ORDERED, PLAIN, SUBGROUPS, WAITED
from conformance.scenarios.model import Observation, Param, Scenario
from conformance.scenarios.tables import prime_from

SMALLEST_LARGE = 2**17
LARGEST = 2**21  # a message of more elements is always among the large ones

# Drawn exponents of the ``tiny`` messages. The scale of a block is its largest element divided by
# the largest value of the format, at most 57344: here it is above 2**-105, a normal float32.
TINY = (-88, -20)

# Of float16: from the smallest normal number down to the last bits of subnormal ones.
TINY_HALF = (-19, -13)

# In its later steps only one large message is sent.
OF_LARGE = "of_large"
_LARGE = replace(
    PLAIN,
    name="collective_large",
    summary="messages of 2**17 to 2.6 million elements, one of which is not contiguous, and a "
    "small one, in a drawn order; one lies in a buffer, in place where that is allowed; half of "
    "the calls have async_op=True; then NaN, and infinities, in one large message; sizes are drawn",
    steps=("uneven", "nan", "infinite"),
    world_sizes=(2,),
    variant=OF_LARGE,
    observe=Observation(bytes_sent=True),
)

ONE_SIDED = "one_sided"

# All calls of one shape are made by the same object. Zeros and tiny values come first: error
# feedback adds the errors of earlier calls to them.
_RECOVERING = replace(
    PLAIN,
    name="collective_recovering",
    summary="blocks of zeros, tiny values, constants, values of one sign, and all of them "
    "together; then NaN and infinities in one message, and ordinary values after each",
    steps=(
        "zeros",
        "tiny",
        "equal",
        ONE_SIDED,
        "patches",
        *("nan", "normal", "infinite", "normal"),
    ),
    world_sizes=(2,),
    variant="recovering",
)

# The formats of half precision are where infinities come from: a loss scale that is too large.
_RECOVERING_HALF = replace(
    _RECOVERING,
    name="collective_recovering_half",
    summary="NaN and infinities in messages of float16 and bfloat16, ordinary values after each",
    steps=("normal", "infinite", "normal", "nan", "normal"),
    prerequisite=_RECOVERING.name,
)

OF_VIEWS = "views"
_VIEWS = replace(
    ORDERED,
    name="collective_views",
    summary="inputs and outputs are parts of larger buffers, at drawn offsets, or each behind the "
    "other; in every other call one is a part of the other; half of the calls have async_op=True, "
    "one to three at a time",
    steps=("crafted", "normal"),
    variant=OF_VIEWS,
)

UNEVEN_PARTS = "uneven"
_UNEVEN = replace(
    ORDERED,
    name="collective_uneven",
    summary="tensors of different sizes in an all_to_all or an all_gather, such parts in an "
    "all_to_all_single; sizes change from step to step, in some calls while each rank sends and "
    "gets as many rows as before; half of the calls have async_op=True, one to three at a time; "
    "each rank has the most rows of an all_gather in some call, and fewer than another in the "
    "next; in some calls drawn ranks have no rows to send, or get none; half of the messages are "
    "of float64, float16 or bfloat16; one call has hundreds of rows, one a large part for one rank "
    "and small ones for others, and one other memory layouts",
    steps=("crafted", "normal"),
    world_sizes=(2, 3),
    variant=UNEVEN_PARTS,
)

# The call of ``_UNEVEN`` in which one message is large, and the first one in which some messages
# have no rows.
WITH_LARGE_PART = 5
FIRST_WITHOUT_ROWS = 7

# The group without rank 0 makes no calls in the last step: rank 0 goes first.
_UNEVEN_ON_GROUPS = replace(
    _UNEVEN,
    name="collective_uneven_on_groups",
    summary="tensors or parts of different sizes on two groups of two ranks, which are drawn; one "
    "group makes fewer calls",
    steps=("crafted", "normal", "normal"),
    world_sizes=(),
    groups=((0, 1), (2, 3)),
)

# Each rank may refuse a dtype, so that peers wait for rank 0.
OF_DTYPES = "of_dtypes"
_DTYPES = replace(
    ORDERED,
    name="collective_dtypes",
    summary="messages of float64, float16, bfloat16 and complex64, of 300 to 900 elements, and of "
    "2**11 to 2**18, in a drawn order; half of the calls have async_op=True",
    steps=("normal",),
    world_sizes=(2, 3),
    variant=OF_DTYPES,
)

# Operations other than a sum, on values that every format rounds. Each may be refused.
OF_OPERATIONS = "of_operations"
_OPERATED = replace(
    ORDERED,
    name="collective_operations",
    summary="averages of float32 of 10 to 40, of 300 to 900 and of 2**13 to 2**18 elements, and of "
    "float64, float16 and bfloat16; maxima, minima and products of float32; sizes are drawn",
    steps=("normal",) * 2,
    world_sizes=(2, 3),
    variant=OF_OPERATIONS,
)
# The forms of its calls, one for each parameter in order.
OPERATED_FORMS = (*("average",) * 6, *("maximum", "minimum", "product") * 2)

_IN_FLIGHT = replace(
    WAITED,
    name="collective_in_flight",
    summary="async_op=True, 24 to 40 calls of one shape at a time; each rank waits for them in "
    "an order of its own, and again in that of the calls",
    steps=("normal", "uneven"),
    world_sizes=(2,),
    variant="in_flight",
)

# The same with values whose scale changes, and rows that are seldom used: what a large call has
# lost has to outlive small ones. All calls of one shape are made by the same object.
VARYING = "varying"
SELDOM = "seldom"
_CHANGING_SCALE = replace(
    PLAIN,
    name="collective_changing_scale",
    summary="16 to 20 calls of values whose scale changes from call to call, by drawn powers of "
    "two from 2**-10 to 2**9, steadily or in spikes; in some calls most rows are zeros, or all "
    "are; one message is of float16, and one has 2**13 to 2**18 elements",
    steps=("normal",) * 16,
    world_sizes=(2, 3),
    variant=VARYING,
)
_SCALES = (-10, 9)

# The same on a group of all ranks. In some calls, which are drawn, the object is also called with
# the value that new_group returns on ranks outside of a group, as in a loop over groups.
ALSO_OUTSIDE = "also_outside"
_ALSO_OUTSIDE = replace(
    _CHANGING_SCALE,
    name="collective_outside",
    summary="16 to 20 calls of values whose scale changes from call to call; before some calls, "
    "and while others are under way, there is one as on a rank outside of the group",
    world_sizes=(),
    groups=((0, 1),),
    variant=ALSO_OUTSIDE,
)

ON_GROUPS = "on_groups"

# Rows and columns of a mesh, as in hybrid sharding.
_ON_TWO_GROUPS = replace(
    WAITED,
    name="collective_on_two_groups",
    summary="async_op=True, two to four calls of one shape on two groups at a time: rows or "
    "columns of a mesh of 2 x 2 ranks, or WORLD; each rank waits for them in an order of its own; "
    "in one step one call has no async_op",
    steps=("normal", "uneven", "normal"),
    groups=((0, 1), (2, 3)),
    twin_groups=((0, 2), (1, 3)),
    variant=ON_GROUPS,
)

# All calls are made by the same object. A table of values makes messages cheap.
_LONG = replace(
    PLAIN,
    name="collective_long",
    summary="300 to 450 small messages of six shapes; some calls with async_op=True; drawn numbers",
    steps=("normal",),
    world_sizes=(2,),
    variant="long",
    observe=Observation(growth=True),
)
LONG_CALLS = (300, 450)

AFTER_WORLD = replace(
    SUBGROUPS,
    name="collective_after_world",
    summary="one call on WORLD, and then calls on two disjoint subgroups",
    variant="after_world",
)


def _log_uniform(first: int, last: int, numbers: random.Random) -> int:
    return round(first * (last / first) ** numbers.random())


def matrix(numel: int, numbers: random.Random) -> Param:
    """Return a matrix of at least so many elements, with 3 to 64 columns."""
    columns = numbers.randint(3, 64)
    return Param((-(-numel // columns), columns))


def draw_large(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw four messages, their order, and the length of the table that their values repeat.

    One has 2**17 to 2**21 elements, evenly over their logarithms; one has more than 2**21 and up to
    2**19 more, so that a subject that is wrong beyond any number in that range is refused. The
    third has 300 to 900. The fourth has 2**17 to 2**20 in a drawn memory layout: the weight of a
    convolution, a transposed matrix, or columns of a wider one. The table has a prime length from
    100,000 to 160,000.
    """
    sizes = [
        _log_uniform(SMALLEST_LARGE, LARGEST, numbers),
        LARGEST + numbers.randint(1, 2**19),
        numbers.randint(300, 900),
    ]
    numbers.shuffle(sizes)
    params = [matrix(size, numbers) for size in sizes]
    period = prime_from(numbers.randint(100_000, 160_000))
    size = _log_uniform(SMALLEST_LARGE, 2**20, numbers)
    layout = numbers.choice(("channels_last", "transposed", "columns"))
    other = matrix(size, numbers)
    if layout == "channels_last":
        channels = numbers.randint(32, 128)
        other = Param((-(-size // (9 * channels)), channels, 3, 3))
    params.insert(numbers.randint(0, len(params)), replace(other, layout=layout))
    return replace(scenario, params=tuple(params), period=period)


def draw_on_subgroups(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw one more message, of 2**16 to 2**20 elements, evenly over their logarithms. The last
    step has it. Values repeat a table as in :func:`draw_dtypes`.
    """
    large = matrix(_log_uniform(2**16, 2**20, numbers), numbers)
    period = prime_from(numbers.randint(10_000, 20_000))
    return replace(scenario, params=(*PLAIN.params, large), period=period)


def draw_recovering(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw a matrix of 700 to 1,200 elements: more than five blocks of 128."""
    return replace(scenario, params=(matrix(numbers.randint(700, 1200), numbers),))


def draw_recovering_half(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw matrices of 700 to 1,200 elements, one of float16 and one of bfloat16."""
    made = [matrix(numbers.randint(700, 1200), numbers) for _ in range(2)]
    dtypes = zip(made, ("float16", "bfloat16"), strict=True)
    return replace(scenario, params=tuple(replace(spec, dtype=dtype) for spec, dtype in dtypes))


def draw_views(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw three matrices of 10 to 40 and three of 300 to 900 elements, in turn; the offsets are
    drawn by the driver.
    """
    sizes = [numbers.randint(*ends) for _ in range(3) for ends in ((10, 40), (300, 900))]
    return replace(scenario, params=tuple(matrix(size, numbers) for size in sizes))


def draw_uneven(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw two matrices of 10 to 40 elements, and two of 300 to 900; one of bfloat16 with 300 to
    2,000 rows of 2 to 8 columns; one whose largest part has 2**14 to 2**18 elements, evenly over
    their logarithms; and one of 300 to 900 elements in another memory layout.

    Of the calls in which some messages have no rows, there are six of 10 to 900 elements: senders,
    receivers or pairs have none, in two calls each. Half of all matrices but two have other dtypes.
    Values repeat a table as in :func:`draw_dtypes`.
    """
    sizes = [numbers.randint(*ends) for ends in ((10, 40), (300, 900)) for _ in range(2)]
    params = [matrix(size, numbers) for size in sizes]
    params.append(Param((numbers.randint(300, 2000), numbers.randint(2, 8)), "bfloat16"))
    params.append(matrix(_log_uniform(2**14, 2**18, numbers), numbers))
    layout = numbers.choice(("columns", "transposed"))
    params.append(replace(matrix(numbers.randint(300, 900), numbers), layout=layout))
    params += [matrix(numbers.randint(10, 900), numbers) for _ in range(6)]
    plain = [index for index, spec in enumerate(params) if spec == Param(spec.shape)]
    for index in numbers.sample(plain, len(plain) // 2):
        dtype = numbers.choice(("float64", "float16", "bfloat16"))
        params[index] = replace(params[index], dtype=dtype)
    period = prime_from(numbers.randint(10_000, 20_000))
    return replace(scenario, params=tuple(params), period=period)


def draw_uneven_on_groups(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the ranks of the groups, and three matrices of 300 to 900 elements."""
    ranks = numbers.sample(range(4), 4)
    groups = (tuple(sorted(ranks[:2])), tuple(sorted(ranks[2:])))
    params = tuple(matrix(numbers.randint(300, 900), numbers) for _ in range(3))
    return replace(scenario, params=params, groups=groups)


def draw_dtypes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw two messages of each dtype, their order, and a table as :func:`draw_large` does."""
    params = [
        replace(matrix(size, numbers), dtype=dtype)
        for dtype in ("float64", "float16", "bfloat16", "complex64")
        for size in (numbers.randint(300, 900), _log_uniform(2**11, 2**18, numbers))
    ]
    numbers.shuffle(params)
    period = prime_from(numbers.randint(10_000, 20_000))
    return replace(scenario, params=tuple(params), period=period)


def draw_operations(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the sizes of the calls in ``OPERATED_FORMS``, and a table as in :func:`draw_dtypes`."""
    sizes = [
        numbers.randint(10, 40),
        numbers.randint(300, 900),
        _log_uniform(2**13, 2**18, numbers),
        *(numbers.randint(300, 900) for _ in range(3)),
        *(numbers.randint(*ends) for ends in ((10, 40), (300, 900)) for _ in range(3)),
    ]
    dtypes = ("float32",) * 3 + ("float64", "float16", "bfloat16") + ("float32",) * 6
    params = tuple(
        replace(matrix(size, numbers), dtype=dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    )
    period = prime_from(numbers.randint(10_000, 20_000))
    return replace(scenario, params=params, period=period)


def draw_in_flight(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw 24 to 40 calls of one shape, of 100 to 900 elements, as many as layers may prefetch."""
    return _of_one_shape(scenario, numbers, numbers.randint(24, 40))


def _of_one_shape(scenario: Scenario, numbers: random.Random, calls: int) -> Scenario:
    return replace(scenario, params=(matrix(numbers.randint(100, 900), numbers),) * calls)


def draw_on_groups(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the places of ranks in the mesh, and two to four calls of 100 to 900 elements."""
    ranks = numbers.sample(range(4), 4)
    rows = (ranks[:2], ranks[2:])
    return replace(
        _of_one_shape(scenario, numbers, numbers.randint(2, 4)),
        groups=tuple(tuple(sorted(row)) for row in rows),
        twin_groups=tuple(tuple(sorted(column)) for column in zip(*rows, strict=True)),
    )


def draw_changing_scale(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw 16 to 20 steps, and the exponents of three matrices of 300 to 700 elements.

    The scale of one changes in every call; the others have a small one, but for two or three
    spikes, or a large one, but for as many small calls. In the last calls most rows are zeros, and
    scales are small.
    """
    count = numbers.randint(16, 20)
    steps = numbers.choices(("normal", SELDOM), k=count - 6) + [SELDOM] * 6
    steps[numbers.randint(2, count - 7)] = "zeros"
    return replace(
        scenario,
        params=tuple(
            replace(matrix(numbers.randint(300, 700), numbers), exponents=exponents)
            for exponents in changing_exponents(count, numbers)
        ),
        steps=tuple(steps),
    )


def draw_feedback(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw as :func:`draw_changing_scale` does, and two more matrices.

    One has 2**13 to 2**18 elements, evenly over their logarithms. One is of float16, and has a
    small scale but for spikes: what arrives is rounded to float16, which hides errors among large
    values. Values repeat a table of 2,000 to 4,000.
    """
    scenario = draw_changing_scale(scenario, numbers)
    changing = changing_exponents(len(scenario.steps), numbers)
    of_large = numbers.choice(changing)
    large = matrix(_log_uniform(2**13, 2**18, numbers), numbers)
    half = replace(matrix(numbers.randint(300, 700), numbers), dtype="float16")
    params = (replace(large, exponents=of_large), replace(half, exponents=changing[1]))
    period = prime_from(numbers.randint(2000, 4000))
    return replace(scenario, params=(*scenario.params, *params), period=period)


def changing_exponents(count: int, numbers: random.Random) -> list[tuple[int, ...]]:
    """Return three lists of exponents for so many calls; see :func:`draw_changing_scale`."""
    least, largest = _SCALES
    first = numbers.randint(least, -4)
    usual = numbers.randint(4, largest)
    rates = [numbers.randint(least, largest) for _ in range(count)]
    spikes = _changed_at(first, (6, largest), count, numbers)
    dips = _changed_at(usual, (least, -2), count, numbers)
    last = [numbers.randint(least, least + 3) for _ in range(4)]
    return [tuple(exponents[:-4] + last) for exponents in (rates, spikes, dips)]


def _changed_at(
    usual: int, others: tuple[int, int], count: int, numbers: random.Random
) -> list[int]:
    """Return exponents, of which two or three are drawn from another range."""
    places = numbers.sample(range(1, count - 6), numbers.randint(2, 3))
    return [numbers.randint(*others) if place in places else usual for place in range(count)]


def draw_long(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the number of calls, their kinds of message, and six shapes of 1 to 700 elements."""
    sizes = [numbers.randint(1, 40) for _ in range(4)]
    sizes += [numbers.randint(129, 300), numbers.randint(400, 600)]
    numbers.shuffle(sizes)
    return replace(
        scenario,
        params=tuple(matrix(size, numbers) for size in sizes),
        steps=tuple(numbers.choices(("normal", "uneven"), k=numbers.randint(*LONG_CALLS))),
        period=prime_from(numbers.randint(100, 200)),
    )


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    SUBGROUPS.name: draw_on_subgroups,
    _LARGE.name: draw_large,
    _RECOVERING.name: draw_recovering,
    _RECOVERING_HALF.name: draw_recovering_half,
    _VIEWS.name: draw_views,
    _UNEVEN.name: draw_uneven,
    _UNEVEN_ON_GROUPS.name: draw_uneven_on_groups,
    _DTYPES.name: draw_dtypes,
    _OPERATED.name: draw_operations,
    _ALSO_OUTSIDE.name: draw_changing_scale,
    _IN_FLIGHT.name: draw_in_flight,
    _CHANGING_SCALE.name: draw_feedback,
    _ON_TWO_GROUPS.name: draw_on_groups,
    _LONG.name: draw_long,
}

# As they are drawn for seed 0.
LARGE = draw_large(_LARGE, random.Random(0))
RECOVERING = draw_recovering(_RECOVERING, random.Random(0))
RECOVERING_HALF = draw_recovering_half(_RECOVERING_HALF, random.Random(0))
VIEWS = draw_views(_VIEWS, random.Random(0))
UNEVEN = draw_uneven(_UNEVEN, random.Random(0))
UNEVEN_ON_GROUPS = draw_uneven_on_groups(_UNEVEN_ON_GROUPS, random.Random(0))
DTYPES = draw_dtypes(_DTYPES, random.Random(0))
OPERATED = draw_operations(_OPERATED, random.Random(0))
WITH_CALLS_OUTSIDE = draw_changing_scale(_ALSO_OUTSIDE, random.Random(0))
IN_FLIGHT = draw_in_flight(_IN_FLIGHT, random.Random(0))
CHANGING_SCALE = draw_feedback(_CHANGING_SCALE, random.Random(0))
ON_TWO_GROUPS = draw_on_groups(_ON_TWO_GROUPS, random.Random(0))
LONG = draw_long(_LONG, random.Random(0))

ALL = (
    LARGE,
    RECOVERING,
    RECOVERING_HALF,
    VIEWS,
    UNEVEN,
    UNEVEN_ON_GROUPS,
    DTYPES,
    OPERATED,
    CHANGING_SCALE,
    WITH_CALLS_OUTSIDE,
    IN_FLIGHT,
    ON_TWO_GROUPS,
    LONG,
    AFTER_WORLD,
)

"""Scenarios with sizes as in training, for section 22.

A threshold in a hook, on the elements of a bucket or of a parameter, on the number of buckets or of
tensors in one, cannot lie beyond sizes that are drawn: see ``draw_network`` and
``draw_many_buckets`` for the ranges. Gradients repeat a table (``tables.py``).
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.scenarios.tables import BEYOND, prime_from

# Of ``mostly_small_sizes``.
SMALLEST = 16
_SMALL = 20_000
# A bucket is closed once it holds 33 elements of float32 or more.
_SMALL_CAP = 130 / 2**20


def draw_network(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the sizes of a network.

    The parameters are those of 6 to 9 transformer layers with a width of 48 to 128, of 6 to 9
    convolutions, 129 to 300 tensors of 1 to 64 elements in a row, 24 to 32 of 10**4 to 10**6
    elements, one of 10**6 to 4 * 10**6, and one of a prime number from 2**24 to 2**24 + 2**22. That
    one is at any place, just behind the small tensors: DDP fills its buckets from the last
    parameter on, so the small tensors begin a bucket. The table has a prime length from 100,000 to
    160,000. Steps differ in the precision of matrix products (``_with_precisions``).
    """
    many = [_any_shape(numbers, size) for size in sizes_between(10_000, 1_000_000, 24, 32, numbers)]
    many.append(Param((sizes_between(1_000_000, 4_000_000, 1, 1, numbers)[0],)))
    modules = [
        *_transformer(numbers.randint(6, 9), numbers.randint(48, 128)),
        *_convolutions(numbers.randint(6, 9), numbers),
    ]
    for param in many:
        modules.insert(numbers.randrange(len(modules) + 1), [param])
    small = [Param((numbers.randint(1, 64),)) for _ in range(numbers.randint(129, 300))]
    above = prime_from(BEYOND + numbers.randrange(1, 1 << 22))
    modules.insert(numbers.randrange(len(modules) + 1), [*small, Param((above,))])
    params = tuple(param for module in modules for param in module)
    return _with_precisions(replace(scenario, params=params, period=_draw_period(numbers)), numbers)


def draw_many_buckets(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the sizes of 257 to 300 buckets of one parameter each, from 33 to 10**6 elements.

    The sizes of 65 to 90 are spread evenly over their logarithms, so that some of them lie between
    any N and 1.5 N. The others have up to 100 elements: there are more buckets than most pools of
    buffers, tags or streams have places. The order is drawn, and so is the length of the table, a
    prime from 100,000 to 160,000. Steps differ in the precision of matrix products
    (``_with_precisions``).
    """
    sizes = sizes_between(33, 1_000_000, 65, 90, numbers)
    sizes += [numbers.randint(33, 100) for _ in range(numbers.randint(257, 300) - len(sizes))]
    numbers.shuffle(sizes)
    params = tuple(_any_shape(numbers, size) for size in sizes)
    return _with_precisions(replace(scenario, params=params, period=_draw_period(numbers)), numbers)


def add_large_buckets(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Return ``many_buckets`` with two more buckets, of 10**6 to 2**24 elements.

    One comes from each half of the range of logarithms, and each is at any place.
    """
    params = list(scenario.params)
    for size in sizes_between(1_000_000, BEYOND, 2, 2, numbers):
        params.insert(numbers.randrange(len(params) + 1), _any_shape(numbers, size))
    return replace(scenario, params=tuple(params))


def add_large_complex(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Return a scenario with one more parameter, of complex64 and 2**18 to 2**20 elements, whose
    gradients repeat a table of 10,000 to 20,000.
    """
    size = int(2 ** numbers.uniform(18, 20))
    period = prime_from(numbers.randint(10_000, 20_000))
    return replace(scenario, params=(*scenario.params, Param((size,), "complex64")), period=period)


def draw_vast(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw a matrix of 2**24 + 3 * 2**20 to 2**24 + 2**22 elements, and 6 to 9 tensors around it.

    The matrix has 1,000 to 3,000 columns, and gradients that are four times as large from element
    2**24 on, so that three quarters of their energy are there. The others have 100 to 10**5
    elements. The table has a prime length from 100,000 to 160,000. The claims decide the steps, and
    a draw decides whether the first or the last rank feeds most of the mean.
    """
    columns = numbers.randint(1000, 3000)
    matrix = (BEYOND + numbers.randint(3 << 20, 1 << 22)) // columns + 1
    params = [_any_shape(numbers, size) for size in sizes_between(100, 100_000, 6, 9, numbers)]
    params.insert(numbers.randrange(len(params) + 1), Param((matrix, columns), exponent=2))
    return replace(scenario, params=tuple(params), period=_draw_period(numbers))


def draw_smaller(scenario: Scenario, most: int, numbers: random.Random) -> Scenario:
    """Draw smaller sizes, for subjects that run for many steps and are recorded in full.

    There are two transformer layers with a width of 8 to 16, three convolutions, 12 to 16 tensors
    of 10**3 elements up to a 30th of ``most``, and a matrix and a vector that each have a fifth to
    a quarter of ``most``. ``many_buckets`` has 65 to 100 buckets of 33 elements up to a 20th of
    ``most``.

    Args:
        scenario: ``network`` or ``many_buckets``.
        most: the largest number of elements of all parameters together.
        numbers: draws.
    """
    if scenario.name == _MANY_BUCKETS.name:
        sizes = sizes_between(33, most // 20, 65, 100, numbers)
        numbers.shuffle(sizes)
        return replace(scenario, params=tuple(_any_shape(numbers, size) for size in sizes))
    many = [_any_shape(numbers, n) for n in sizes_between(1000, most // 30, 12, 16, numbers)]
    rows = numbers.randint(100, 200)
    many.append(Param((numbers.randint(most // 5, most // 4) // rows, rows)))
    many.append(Param((prime_from(numbers.randint(most // 5, most // 4)),)))
    modules = [*_transformer(2, numbers.randint(8, 16)), *_convolutions(3, numbers)]
    for param in many:
        modules.insert(numbers.randrange(len(modules) + 1), [param])
    return replace(scenario, params=tuple(param for module in modules for param in module))


def sizes_between(
    first: int, last: int, fewest: int, most: int, numbers: random.Random
) -> list[int]:
    """Draw sizes, one from each of as many equal parts of the range of logarithms."""
    count = numbers.randint(fewest, most)
    span = math.log(last / first)
    return [round(first * math.exp(span * (i + numbers.random()) / count)) for i in range(count)]


def _with_precisions(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the precisions of float32 matrix products, one for each of the three steps.

    Random values get "medium", the one with the fewest bits, and in ``many_buckets`` "high" as
    well. Crafted values have so few bits that products round none of them.
    """
    if scenario.name == _MANY_BUCKETS.name:
        return replace(
            scenario, matmul_precisions=("highest", *numbers.sample(("high", "medium"), 2))
        )
    first, last = numbers.sample(("highest", "high"), 2)
    return replace(scenario, matmul_precisions=(first, "medium", last))


def mostly_small_sizes(last: int, large: int, numbers: random.Random) -> list[int]:
    """Draw sizes from 16 to ``last``: densely up to 20,000 elements, where buckets cost little.

    Eight sizes are in the range up to 20,000, one from each of eight parts that span a factor of
    2.5. So one of them is in every interval from N to 6 N.

    Args:
        last: the largest size.
        large: the number of sizes from 20,000 on, one from each of as many equal parts.
        numbers: draws.
    """
    small = sizes_between(SMALLEST, _SMALL, 8, 8, numbers)
    return small + sizes_between(_SMALL, last, large, large, numbers)


def _draw_period(numbers: random.Random) -> int:
    return prime_from(numbers.randint(100_000, 160_000))


def _any_shape(numbers: random.Random, size: int) -> Param:
    """Return a vector, or a matrix of nearly as many elements, also with transposed memory."""
    width = numbers.randint(3, 64)
    if size < 1000 or numbers.random() < 0.5:
        return Param((size,))
    layout = numbers.choice(("contiguous", "transposed"))
    return Param((size // width, width), layout=layout)


def _transformer(layers: int, width: int) -> list[list[Param]]:
    """Return the parameters of each layer of a transformer: attention, two norms, two products."""
    layer = [
        Param((3 * width, width)),
        Param((3 * width,)),
        Param((width, width)),
        *[Param((width,))] * 5,
        Param((4 * width, width)),
        Param((4 * width,)),
        Param((width, 4 * width)),
        Param((width,)),
    ]
    return [layer] * layers


def _convolutions(layers: int, numbers: random.Random) -> list[list[Param]]:
    """Return the parameters of convolutions and their norms, in two and three dimensions."""
    modules = []
    channels = numbers.randint(3, 8)
    for layer in range(layers):
        more = channels + numbers.randint(1, 8)
        is_volume = layer % 3 == 2
        kernel = (3,) * (3 if is_volume else 2)
        layout = "channels_last_3d" if is_volume else "channels_last"
        weight = Param((more, channels, *kernel), layout=layout)
        modules.append([weight, Param((more,)), Param((more,))])
        channels = more
    return modules


_DRAWN = Scenario(
    name="drawn",
    summary="sizes that are drawn",
    params=(Param((7,)),),
    steps=("crafted", "normal", "crafted"),
    world_sizes=(2,),
    folded="model",
)

# In the order of rule 1.6. The buckets have DDP's default size.
_NETWORK = replace(
    _DRAWN,
    name="network",
    summary="a network of some 300 parameters, one above 2**24 elements, with DDP's default "
    "buckets; sizes are drawn; rank 0 leaves each hook call before its peers enter; every other "
    "rank has another hash seed",
    order="rank0_first",
    hash_seeds_differ=True,
    prerequisite="ordered",
)

_MANY_BUCKETS = replace(
    _DRAWN,
    name="many_buckets",
    summary="257 to 300 buckets of 33 to a million elements; sizes are drawn; the last hook call "
    "of a step begins when all other buckets are reduced; every other rank has another hash seed",
    steps=("crafted", "normal", "normal"),
    world_sizes=(3,),
    hash_seeds_differ=True,
    ddp=DDPOptions(bucket_cap_mb=_SMALL_CAP),
    order="slow",
    prerequisite="buckets",
)

# For lossy claims alone, which are held to their delta; the number of steps follows from it.
_VAST = replace(
    _DRAWN,
    name="vast",
    summary="a matrix of more than 2**24 elements; sizes are drawn; results are recorded as their "
    "products with the gradients",
    steps=("heavy_first",),
    folded="moments",
    prerequisite="buckets",
)

DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    _NETWORK.name: draw_network,
    _MANY_BUCKETS.name: draw_many_buckets,
    _VAST.name: draw_vast,
}

# As they are drawn for seed 0: no scenario is without parameters.
NETWORK = draw_network(_NETWORK, random.Random(0))
MANY_BUCKETS = draw_many_buckets(_MANY_BUCKETS, random.Random(0))
VAST = draw_vast(_VAST, random.Random(0))

ALL = (NETWORK, MANY_BUCKETS, VAST)

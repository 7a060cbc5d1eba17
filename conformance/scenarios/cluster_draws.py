"""The numbers of clusters that are drawn: world sizes, nodes, groups, steps and sizes."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, pairwise

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.mostly_zero import MOSTLY_ZERO, draw_embedding
from conformance.scenarios.tables import prime_from
from conformance.scenarios.training_sizes import mostly_small_sizes, sizes_between

# Of ``wide_groups``: for each dtype the largest number of elements, and how many sizes are drawn
# from 20,000 on. A part of that range spans a factor of six. So one of the sizes is in every
# interval from N to 36 N within the range, and up to 20,000 from N to 6 N.
WIDE_SIZES = {
    "float32": (4_000_000, 3),
    "float64": (700_000, 2),
    "float16": (700_000, 2),
    "bfloat16": (700_000, 2),
}
# Of an embedding that six ranks have.
_LARGEST_EMBEDDING = 1 << 16
_SMALL_CAP = 64 / 2**20


def _sizes_of_clusters(scenario: Scenario) -> tuple[int, int]:
    """Return the world sizes of the two scenarios with nodes: 5 or 7, and 6 or 8.

    So there is an odd size above 3, and one with several ranks beyond a power of two: some
    algorithms fold the first of these ranks alone. Half of all sessions have six ranks, and half
    have eight.
    """
    both = random.Random(f"{scenario.session_seed}/sizes of clusters")
    return both.choice(((5, 6), (7, 6), (7, 8), (7, 8)))


def _draw_size(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw a prime number of elements from 257 to 1009, for the parameter of that shape."""
    return replace(
        scenario,
        params=tuple(
            replace(spec, shape=(prime_from(numbers.randint(257, 1009)),))
            if spec.shape == (307,)
            else spec
            for spec in scenario.params
        ),
    )


def _draw_unequal_nodes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw five or seven ranks on two or three nodes, not all of one size."""
    size = _sizes_of_clusters(scenario)[0]
    while len(set(nodes := _split(size, numbers.choice((2, 2, 3)), numbers))) == 1:
        pass
    return _draw_size(replace(scenario, size=size, nodes=nodes), numbers)


def train_in_cluster(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Return a scenario of a cluster with parameters of other dtypes, and with nodes also with
    larger ones and with steps that leave no record before.

    A hook may send small buckets, or all of them in its first steps, by the collective of all
    ranks, and others node by node, piece by piece. It may take another path for half precision,
    too. On nodes one parameter has 1,000 to 30,000 elements, another one 30,000 to 500,000, on
    equal nodes 80,000 to 260,000, by the logarithm, each in a bucket of its own; 20 to 60 steps
    come before. Groups have an embedding instead, in a bucket of its own, and two steps in which
    most of its rows are zero (``mostly_zero.py``). Ranks of one node alone have overflown in two
    steps (``_with_overflows``).
    """
    params = list(scenario.params)
    larger = []
    if scenario.size:
        # The results of eight ranks take long to judge if they are not kept (``MOST_KEPT``).
        largest = (80_000, 260_000) if len(set(scenario.nodes)) == 1 else (30_000, 500_000)
        for first, last in ((1_000, 30_000), largest):
            (size,) = sizes_between(first, last, 1, 1, numbers)
            larger.append(Param((size,)))
        scenario = replace(scenario, unrecorded_steps=numbers.randint(20, 60))
    else:
        # DDP fills its buckets from the last parameter on: the embedding has one of its own.
        params.append(draw_embedding(numbers, _LARGEST_EMBEDDING))
        zeros = [f"{MOSTLY_ZERO}/{numbers.randrange(10**6)}" for _ in range(2)]
        ddp = replace(scenario.ddp, bucket_cap_mb=_SMALL_CAP)
        scenario = replace(scenario, steps=(*scenario.steps, *zeros), ddp=ddp)
    for spec in (*larger, *_of_other_dtypes(numbers)):
        # The first parameter has fewer elements than there are ranks, and a bucket of its own.
        params.insert(numbers.randint(1, len(params)), spec)
    return _with_overflows(replace(scenario, params=tuple(params)), numbers)


def _with_overflows(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Add two steps, in a drawn order with the others but the first and the last: in one, a drawn
    rank has NaN in all elements of a drawn parameter, and in the other, a drawn rank has an
    infinity in a drawn element of one.
    """
    first, *between, last = scenario.steps
    places = [f"{numbers.randrange(8)}/{numbers.randrange(len(scenario.params))}" for _ in range(2)]
    between += [f"nan/{places[0]}/all", f"inf/{places[1]}/{numbers.randrange(2**20)}"]
    numbers.shuffle(between)
    return replace(scenario, steps=(first, *between, last))


def _of_other_dtypes(numbers: random.Random) -> list[Param]:
    """Draw four parameters: of float16, bfloat16 and float64 with 1 to 300 elements, and one of a
    half dtype with 1,000 to 30,000, by the logarithm.
    """
    sizes = [sizes_between(1, 300, 1, 1, numbers)[0] for _ in range(3)]
    (large,) = sizes_between(1_000, 30_000, 1, 1, numbers)
    dtypes = ("float16", "bfloat16", "float64", numbers.choice(("float16", "bfloat16")))
    return [Param((size,), dtype) for size, dtype in zip((*sizes, large), dtypes, strict=True)]


def _draw_equal_nodes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw six or eight ranks on two nodes or more, with two ranks or more each."""
    size = _sizes_of_clusters(scenario)[1]
    on_node = numbers.choice([count for count in range(2, size) if size % count == 0])
    nodes = (on_node,) * (size // on_node)
    return _draw_size(replace(scenario, size=size, nodes=nodes), numbers)


def _draw_uneven_groups(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw four of six ranks, not at a constant distance, and three nodes of two or two of three.

    The four ranks are unequally many of nodes of equal size, and there is a node without any of the
    two other ranks.
    """
    on_node = numbers.choice((2, 3))
    nodes = (on_node,) * (6 // on_node)
    while True:
        first = tuple(sorted(numbers.sample(range(6), 4)))
        others = tuple(rank for rank in range(6) if rank not in first)
        is_uneven = len(set(_on_nodes(first, on_node))) > 1
        if is_uneven and len(_distances(first)) > 1 and min(_on_nodes(others, on_node)) == 0:
            break
    return replace(scenario, groups=(first, others), nodes=nodes)


def _on_nodes(ranks: tuple[int, ...], on_node: int) -> list[int]:
    """Return how many of these ranks each of the nodes has, which have ``on_node`` of six."""
    return [sum(rank // on_node == node for rank in ranks) for node in range(6 // on_node)]


def _distances(ranks: tuple[int, ...]) -> set[int]:
    return {after - before for before, after in pairwise(ranks)}


def _draw_unused_groups(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the two of three ranks in one group."""
    alone = numbers.randrange(3)
    others = tuple(rank for rank in range(3) if rank != alone)
    return replace(scenario, groups=(others, (alone,)))


def _draw_wide_groups(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the two of three ranks in one group, the sizes of each dtype (``WIDE_SIZES``), and their
    order.
    """
    alone = numbers.randrange(3)
    others = tuple(rank for rank in range(3) if rank != alone)
    params = [
        Param((size,), dtype)
        for dtype, (largest, large) in WIDE_SIZES.items()
        for size in mostly_small_sizes(largest, large, numbers)
    ]
    numbers.shuffle(params)
    return replace(scenario, groups=(others, (alone,)), params=tuple(params))


def _draw_two_groups(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the ranks of the smaller groups: two of three on unequal nodes, or three of four on two
    nodes of two ranks.
    """
    size = numbers.choice((3, 4))
    first = tuple(sorted(numbers.sample(range(size), size - 1)))
    others = tuple(rank for rank in range(size) if rank not in first)
    nodes = (2, 2) if size == 4 else numbers.choice(((1, 2), (2, 1)))
    return replace(scenario, size=size, nodes=nodes, twin_groups=(first, others))


def _draw_equal_groups(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw two ways to divide four ranks into pairs; or six ranks into threes, a third of the time.

    A group of one way has ranks of both groups of the other. In each way another rank is the first
    of its group, and another one the last, as rank 1 is last in 0 and 1, and first in 1 and 3. The
    ranks are on two nodes of unequal size.
    """
    size = numbers.choice((2, 2, 3))
    ways = [_halves((0, *others), size) for others in combinations(range(1, 2 * size), size - 1)]
    while True:
        first, second = numbers.sample(ways, 2)
        if all(_at(end, first) != _at(end, second) for end in (0, -1)):
            break
    groups = tuple(numbers.sample(first, 2))
    while len(set(nodes := _split(2 * size, 2, numbers))) == 1:
        pass
    twin_groups = tuple(numbers.sample(second, 2))
    return replace(scenario, groups=groups, twin_groups=twin_groups, nodes=nodes)


def _halves(first: tuple[int, ...], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a group of ``size`` ranks, and a group of as many other ranks."""
    return first, tuple(rank for rank in range(2 * size) if rank not in first)


def _at(place: int, groups: tuple[tuple[int, ...], ...]) -> set[int]:
    """Return the rank at a place of each group."""
    return {group[place] for group in groups}


def _draw_bystanders(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the two of three ranks that train, and 33 to 80 steps."""
    idle = numbers.randrange(3)
    training = tuple(rank for rank in range(3) if rank != idle)
    steps = ("crafted",) * numbers.randint(33, 80)
    return replace(scenario, groups=(training, (idle,)), idle=(idle,), steps=steps)


def _draw_simulated(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw numbers of ranks to simulate: 5 to 8, 12, the multiples of 8 from 16 to 96, and 1024 are
    always there. The others are drawn: one from 9 to 16, from 17 to 31, from 33 to 83, from 129 to
    511, and from 513 to 1023; a multiple of 8 from 104 to 256, and of 4 from 20 to 124.
    """
    ranges = ((9, 16), (17, 31), (33, 83), (129, 511), (513, 1023))
    between = [numbers.randint(*bounds) for bounds in ranges]
    between += [8 * numbers.randint(13, 32), 4 * numbers.randint(5, 31)]
    guards = scenario.simulated[:3]
    larger = sorted({*scenario.simulated[3:], *between})
    return replace(scenario, simulated=(*guards, *larger))


def _split(count: int, parts: int, numbers: random.Random) -> tuple[int, ...]:
    """Return ``parts`` positive numbers that sum to ``count``."""
    cuts = [0, *sorted(numbers.sample(range(1, count), parts - 1)), count]
    return tuple(after - before for before, after in pairwise(cuts))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    "unequal_nodes": _draw_unequal_nodes,
    "equal_nodes": _draw_equal_nodes,
    "lone_nodes": _draw_size,
    "uneven_groups": _draw_uneven_groups,
    "unused_groups": _draw_unused_groups,
    "wide_groups": _draw_wide_groups,
    "two_groups": _draw_two_groups,
    "equal_groups": _draw_equal_groups,
    "bystanders": _draw_bystanders,
    "at_scale": _draw_simulated,
}

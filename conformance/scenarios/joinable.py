"""The scenarios for join contexts and joinables (section 17).

Each context of a scenario has a row of ``lengths``: the number of inputs of every rank of a group.
The kit's own joinables are numbered from 0 to :func:`joinables_of` - 1.
"""

import random
from dataclasses import replace
from typing import Any

from conformance.scenarios.join_draws import drawn_lengths, drawn_order
from conformance.scenarios.join_loop_draws import group_of_loop, loop_contexts
from conformance.scenarios.model import Observation, Param, Scenario

_JOINABLES = 3  # of the kit, in one context
_MOST_JOINABLES = (5, 12)

LEARNING_RATE = 0.5  # a power of two, so that steps on crafted gradients are exact

# The kit's joinables check that these arrive. divide_by_initial_world_size is an argument of DDP's
# own join hook.
KEYWORDS: dict[str, Any] = {
    "factor": 5,
    "divide_by_initial_world_size": True,
    "names": ["a", "b"],
}

Lengths = tuple[int, ...]  # numbers of inputs, by group rank

PLAIN = Scenario(
    name="joinable",
    summary="as many inputs on all ranks, or none; three joinables",
    params=(),
    steps=(),
    kind="joinable",
    variant="even",
    prerequisite="joinable",
    observe=Observation(collectives=True),
)

UNEVEN = replace(
    PLAIN,
    name="joinable_uneven",
    summary="one input more or less, one rank without any, very uneven numbers",
    variant="uneven",
    world_sizes=(2, 3, 4),
)

KEYWORD = replace(
    PLAIN,
    name="joinable_keywords",
    summary="keyword arguments for several joinables",
    variant="keywords",
    world_sizes=(2,),
)

AGAIN = replace(
    PLAIN,
    name="joinable_again",
    summary="the same joinables in a second context in another order, and all but one in a third",
    variant="again",
    world_sizes=(2, 3),
)

DISABLED = replace(
    PLAIN,
    name="joinable_disabled",
    summary="enable=False, as many inputs on all ranks",
    variant="disabled",
    world_sizes=(2,),
)

THROWS = replace(
    PLAIN,
    name="joinable_throws",
    summary="throw_on_early_termination=True, even and uneven inputs in turn",
    variant="throws",
    world_sizes=(2, 3),
)

THROWS_DDP = replace(
    THROWS,
    name="joinable_throws_ddp",
    summary="throw_on_early_termination=True, with a DDP whose forward has a collective",
    params=(Param((5, 3)),),
    variant="throws_ddp",
    world_sizes=(2,),
    prerequisite="joinable_throws",
)

RAISES = replace(
    PLAIN,
    name="joinable_raises",
    summary="each rank raises in the body, rank 0 before its peers",
    variant="raises",
    world_sizes=(2,),
)

SUBGROUPS = replace(
    PLAIN,
    name="joinable_subgroups",
    summary="two contexts on two disjoint subgroups of WORLD; group ranks are not global ranks",
    variant="uneven",
    groups=((1, 3), (0, 2)),
)

ORDERED = replace(
    PLAIN,
    name="joinable_ordered",
    summary="peers enter a context after rank 0 has left it or waits for them",
    variant="uneven",
    world_sizes=(2,),
    order="rank0_first",
)

DDP = replace(
    PLAIN,
    name="joinable_ddp",
    summary="DDP with a buffer and several buckets, divided by all ranks, then by those that train",
    params=(Param((5, 3)), Param((7,)), Param((2, 3, 4))),
    steps=("crafted",) * 4,
    variant="ddp",
    ddp=replace(PLAIN.ddp, bucket_cap_mb=64 / 2**20),  # 64 bytes: several buckets
    # Parameters are stepped: a small step would be lost in the roundings of a large value.
    initial_value=0.0,
    world_sizes=(2, 3),
)

ZERO = replace(
    DDP,
    name="joinable_zero",
    summary="DDP, a joinable that sets a joined rank's gradients, and ZeroRedundancyOptimizer",
    variant="zero",
    world_sizes=(2,),
    deadline=30.0,
)

WRONG = replace(
    PLAIN,
    name="joinable_wrong",
    summary="no joinables, joinables on two groups, an object that is no joinable",
    variant="wrong",
    world_sizes=(2,),
)

OUTSIDE = replace(
    PLAIN,
    name="joinable_outside",
    summary="steps before a context, and after it was left in three ways",
    variant="outside",
    world_sizes=(2,),
    params=(Param((5, 3)),),
)

CROWD = replace(
    PLAIN,
    name="joinable_crowd",
    summary=f"{_MOST_JOINABLES[0]} to {_MOST_JOINABLES[1]} joinables in one context, by the seed, "
    "which has keyword arguments",
    variant="crowd",
    world_sizes=(2,),
)

SCENARIOS = (
    PLAIN,
    UNEVEN,
    KEYWORD,
    AGAIN,
    DISABLED,
    THROWS,
    THROWS_DDP,
    RAISES,
    SUBGROUPS,
    ORDERED,
    DDP,
    ZERO,
    WRONG,
    OUTSIDE,
    CROWD,
)

# The kit's joinables in each context, for the variants in which a context does not have all of them
# in their usual order.
_ORDERS: dict[str, list[tuple[int, ...]]] = {"again": [(0, 1, 2), (2, 0, 1), (1, 2)]}


def group_in_context(scenario: Scenario, rank: int, world: int, context: int) -> tuple[int, ...]:
    """Return the global ranks of the group of a context; the rank may be none of them."""
    if loop_contexts(scenario, world):
        return group_of_loop(scenario, world, context)
    return scenario.group_of(rank, world)


def inputs_in_context(scenario: Scenario, group: Lengths, world: int, context: int) -> Lengths:
    """Return the numbers of inputs of a group's ranks in a context."""
    if contexts := loop_contexts(scenario, world):
        return contexts[context].inputs
    return lengths(scenario, group)[context]


def order(scenario: Scenario, world: int, context: int) -> tuple[int, ...]:
    """Return the numbers of the kit's joinables in a context, in their order."""
    if contexts := loop_contexts(scenario, world):
        return contexts[context].joinables
    if scenario.variant in ("long", "epochs", "many"):
        return drawn_order(scenario, context)
    if scenario.variant in _ORDERS:
        return _ORDERS[scenario.variant][context]
    return tuple(range(joinables_of(scenario)))


def joinables_of(scenario: Scenario) -> int:
    """Return the number of the kit's joinables."""
    if scenario.name != CROWD.name:
        return _JOINABLES
    return random.Random(f"{scenario.session_seed}/crowd").randint(*_MOST_JOINABLES)


def lengths(scenario: Scenario, group: tuple[int, ...]) -> list[Lengths]:
    """Return the numbers of inputs of a group's ranks, one row for each context."""
    size = len(group)
    if drawn := drawn_lengths(scenario, size):
        return drawn
    # The ranks of the second group have one input more: a subject that waits for a rank of the
    # other group does not get by with equal numbers.
    more = scenario.groups.index(group) if scenario.groups else 0
    falling = tuple(range(size, 0, -1))
    uneven = [
        tuple(2 + (place == 0) for place in range(size)),
        tuple(2 + (place != 0) for place in range(size)),
        tuple(7 * place for place in range(size)),
        tuple(4 * (place == 0) for place in range(size)),
        falling,
    ]
    by_variant: dict[str, list[Lengths]] = {
        "uneven": uneven,
        "crowd": uneven,
        "again": [
            falling,
            falling[::-1],
            (2, *(1,) * (size - 1)),
        ],
        "throws": [
            (2,) * size,
            falling,
            (1,) * size,
            tuple(range(size)),
            (3, *(2,) * (size - 1)),
        ],
        "throws_ddp": [
            (2,) * size,
            falling,
        ],
        "raises": [
            (1,) * size,
            (2,) * size,
        ],
        # Twice: once for each value of divide_by_initial_world_size.
        "ddp": [
            falling,
            tuple(3 * (place % 2) for place in range(size)),
        ]
        * 2,
        "zero": [
            falling,
            tuple(4 * (place % 2) for place in range(size)),
        ],
    }
    even = [(2,) * size, (0,) * size, (1,) * size]
    return [
        tuple(length + more for length in row) for row in by_variant.get(scenario.variant, even)
    ]

"""The contexts of a joinable that trains the same steps in one context and in two.

The seed and the scenario's name alone decide them. See ``joins_in_parts.py`` for the scenario.
"""

from dataclasses import dataclass
from functools import lru_cache

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

# Shows whether the joinable steps its parameters itself.
TRIAL = 0
_STEPS_OF_TRIAL = 4

# Even inputs, in one context: twice, to find out whether the joinable repeats its numbers.
WHOLE = 1
WHOLE_AGAIN = 2

# The same steps in two contexts of one joinable.
FIRST_PART = 3
SECOND_PART = 4


@dataclass(frozen=True)
class Uneven:
    """The numbers of contexts in which one rank runs out of inputs before the other.

    Attributes:
        early: the group rank with fewer inputs.
        plain: the first context.
        rest: the context after it, with even inputs; the same joinable.
        again: the first one again, with a new joinable.
        outdated: again, and values of the early rank go back by a step while it shadows.
    """

    early: int
    plain: int
    rest: int
    again: int
    outdated: int


@dataclass(frozen=True)
class PartContext:
    """One context.

    Attributes:
        inputs: of each rank of the group.
        begin: the number of its first step.
        is_new: it has a new joinable.
    """

    inputs: tuple[int, int]
    begin: int = 0
    is_new: bool = True


@lru_cache(maxsize=64)
def part_contexts(scenario: Scenario) -> tuple[PartContext, ...]:
    """Return the contexts.

    There are 7 to 9 steps, N, and the first of two contexts has 2 to N - 3. A rank that runs out
    has 2 or 3 inputs, and shadows two steps or more.
    """
    draw = generator(scenario, "parts")
    steps = draw.randint(7, 9)
    first = draw.randint(2, steps - 3)
    contexts = [
        PartContext((_STEPS_OF_TRIAL, _STEPS_OF_TRIAL)),
        PartContext((steps, steps)),
        PartContext((steps, steps)),
        PartContext((first, first)),
        PartContext((steps - first, steps - first), first, is_new=False),
    ]
    for one in uneven_contexts(scenario):
        fewer = draw.randint(2, 3)
        most = draw.randint(fewer + 2, steps - 2)
        inputs = (fewer, most) if one.early == 0 else (most, fewer)
        rest = (steps - most, steps - most)
        contexts.append(PartContext(inputs))
        contexts.append(PartContext(rest, most, is_new=False))
        contexts += [PartContext(inputs)] * 2
    return tuple(contexts)


def uneven_contexts(scenario: Scenario) -> tuple[Uneven, ...]:
    """Return the contexts in which each rank joins early, in a drawn order of ranks."""
    ranks = generator(scenario, "early").sample((0, 1), 2)
    return tuple(
        Uneven(early, *range(begin, begin + 4))
        for early, begin in zip(ranks, (SECOND_PART + 1, SECOND_PART + 5), strict=True)
    )

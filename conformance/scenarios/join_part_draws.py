"""The contexts of a joinable that trains the same steps in one context and in several.

The seed and the scenario's name alone decide them. See ``joins_in_parts.py`` for the scenarios.
"""

import itertools
import random
from dataclasses import dataclass
from functools import lru_cache

from conformance.scenarios.join_loop_draws import DISABLED, ENDS, RAISES, THROWS
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

# The same steps in contexts of one joinable; one is broken off, and one is disabled.
INTERRUPTED = (5, 6, 7, 8)

# A schedule in one context, and after two joins.
SCHEDULE = 9
AFTER_UNEVEN = 10
AFTER_EVEN = 11
SCHEDULE_AFTER_JOINS = 12

# Contexts of one joinable; throw_on_early_termination ends the first, the third and the fourth one.
THROWN = (13, 14, 15, 16, 17)

# The same steps in contexts of one joinable; no rank has an input in the second and the fourth one.
# A row of another joinable begins with the same context, and has steps in each.
EMPTIED = (18, 19, 20, 21, 22)
NOT_EMPTIED = (23, 24, 25)

_FIRST_UNEVEN = 26
_STEPS = (9, 11)
_SHADOWS = 4  # at least; chance leaves no element as it is in so many steps
_STEPS_OF_SCHEDULE = (100, 140)
_LONG_STEPS = (62, 72)


@dataclass(frozen=True)
class Uneven:
    """The numbers of contexts in which all ranks but one run out of inputs.

    Attributes:
        late: the group rank with the most inputs.
        plain: the first context.
        rest: the context after it, with even inputs; the same joinable. None if there is none.
        resumed: the context after it again, with a new joinable that has loaded the state of the
            first one. None if there is none.
        again: the first one again, with a new joinable.
        rest_again: the context after that one; ranks that joined early have cleared gradients as it
            begins. None if there is none.
        outdated: again, and values of the other ranks go back by a step while they shadow.
    """

    late: int
    plain: int
    rest: int | None
    resumed: int | None
    again: int
    rest_again: int | None
    outdated: int


@dataclass(frozen=True)
class PartContext:
    """One context.

    Attributes:
        inputs: of each rank of the group.
        begin: the number of its first step.
        is_new: it has a new joinable.
        ending: the way in which it ends.
        is_schedule: the hyperparameters alone are on record.
        is_long: the state at its end alone is on record.
        resumes: its joinable has loaded the state of another one.
    """

    inputs: tuple[int, ...]
    begin: int = 0
    is_new: bool = True
    ending: str = ENDS
    is_schedule: bool = False
    is_long: bool = False
    resumes: bool = False

    def taken(self, rank: int) -> int:
        """Return the number of steps that a rank takes: all stop with the first one if the context
        throws.
        """
        return min(self.inputs) if self.ending == THROWS else self.inputs[rank]


@lru_cache(maxsize=64)
def part_contexts(scenario: Scenario, size: int) -> tuple[PartContext, ...]:
    """Return the contexts.

    There are 9 to 11 steps, N, and the first of two contexts has 2 to N - 3. In a row of four the
    first one has 2 or 3; an exception ends the second or the third one, after 0 to 2 steps, and
    the other one is disabled, with none. A rank that runs out has 2 or 3 inputs, and shadows four
    steps or more.

    The schedule is read in 100 to 140 steps, M, after a context with uneven inputs and one with
    even ones, which have T steps; and in M + T steps of one context.

    Five more contexts of one joinable have M + T steps. In the first one a drawn rank runs out
    after 1 to 3 steps, and all ranks throw; in the third and fourth one another rank runs out,
    after 1 or 2 steps. One that has counted a step too much for each throw is then not level with
    the other. The second one has 2 or 3 steps.

    In a row of five, the second and the fourth context have no inputs. The first one has 2 or 3
    steps, and the third one has 1 or 2. Another joinable has three contexts, with as many steps in
    the first one, and 1 or 2 in the second.

    Each rank trains alone for long once more: the contexts have 62 to 72 steps.

    A scenario that brings its own number of ranks has the contexts with uneven inputs alone, after
    two with even ones.

    Args:
        scenario: the scenario.
        size: the number of ranks.
    """
    draw = generator(scenario, "parts")
    steps = draw.randint(*_STEPS)
    contexts = [PartContext((_STEPS_OF_TRIAL,) * size), PartContext((steps,) * size)]
    if not scenario.size:
        first = draw.randint(2, steps - 3)
        contexts += [
            PartContext((steps,) * size),
            PartContext((first,) * size),
            PartContext((steps - first,) * size, first, is_new=False),
            *_interrupted(draw, size, steps),
            *_schedule(draw, size),
        ]
        contexts += _thrown(generator(scenario, "thrown"), size, max(contexts[SCHEDULE].inputs))
        contexts += _emptied(generator(scenario, "emptied"), size, steps)
    for one in uneven_contexts(scenario, size):
        inputs = _inputs(draw, size, one.late, steps)
        most = max(inputs)
        rest = (steps - most,) * size
        rest_of = PartContext(rest, most, is_new=False)
        contexts += [PartContext(inputs), rest_of, PartContext(rest, most, resumes=True)]
        contexts += [PartContext(inputs), rest_of, PartContext(inputs)]
    of_long = generator(scenario, "long")
    for one in long_contexts(scenario, size):
        most = of_long.randint(*_LONG_STEPS)
        row = tuple(most if at == one.late else of_long.randint(2, 3) for at in range(size))
        contexts += [PartContext(row, is_long=True)] * 3
    return tuple(contexts)


@lru_cache(maxsize=64)
def uneven_contexts(scenario: Scenario, size: int) -> tuple[Uneven, ...]:
    """Return the contexts in which each rank trains longest, in a drawn order of ranks."""
    begin = WHOLE + 1 if scenario.size else _FIRST_UNEVEN
    ranks = generator(scenario, "late").sample(range(size), size)
    return tuple(
        Uneven(late, *range(begin + 6 * place, begin + 6 * place + 6))
        for place, late in enumerate(ranks)
    )


@lru_cache(maxsize=64)
def long_contexts(scenario: Scenario, size: int) -> tuple[Uneven, ...]:
    """Return the contexts in which each rank trains alone for long, in the same order of ranks.

    A scenario that brings its own number of ranks has none.
    """
    if scenario.size:
        return ()
    short = uneven_contexts(scenario, size)
    begin = _FIRST_UNEVEN + 6 * len(short)
    return tuple(
        Uneven(one.late, plain, None, None, plain + 1, None, outdated=plain + 2)
        for plain, one in zip(itertools.count(begin, 3), short, strict=False)
    )


def _thrown(draw: random.Random, size: int, steps: int) -> list[PartContext]:
    """Return a row of contexts with a number of steps in all; three contexts throw."""
    first = draw.randrange(size)
    second = (first + 1) % size
    contexts = []
    begin = 0
    for ends, most in ((first, 3), (None, 3), (second, 2), (second, 2)):
        count = draw.randint(1 + (ends is None), most)
        # A rank that does not run out has more inputs.
        more = [0 if ends in (None, at) else draw.randint(1, 4) for at in range(size)]
        contexts.append(
            PartContext(
                tuple(count + added for added in more),
                begin,
                is_new=begin == 0,
                ending=ENDS if ends is None else THROWS,
            )
        )
        begin += count
    rest = (steps - begin,) * size
    return [*contexts, PartContext(rest, begin, is_new=False, is_long=True)]


def _emptied(draw: random.Random, size: int, steps: int) -> list[PartContext]:
    """Return two rows of contexts, each with a number of steps; in the first row two have none."""
    first = draw.randint(2, 3)
    second = draw.randint(1, 2)
    contexts = []
    for row in ((first, 0, second, 0), (first, second)):
        begin = 0
        for count in (*row, steps - sum(row)):
            contexts.append(PartContext((count,) * size, begin, is_new=begin == 0))
            begin += count
    return contexts


def _inputs(draw: random.Random, size: int, late: int, steps: int) -> tuple[int, ...]:
    """Return inputs; one rank has the most."""
    fewer = [draw.randint(2, 3) for _ in range(size - 1)]
    most = draw.randint(max(fewer) + _SHADOWS, steps - 2)
    return tuple(most if rank == late else fewer.pop() for rank in range(size))


def _interrupted(draw: random.Random, size: int, steps: int) -> list[PartContext]:
    """Return a row of contexts with N steps in all."""
    contexts = []
    begin = 0
    endings = [ENDS, *draw.sample((RAISES, DISABLED), 2)]
    for ending in endings:
        count = {ENDS: draw.randint(2, 3), RAISES: draw.randint(0, 2), DISABLED: 0}[ending]
        contexts.append(PartContext((count,) * size, begin, is_new=begin == 0, ending=ending))
        begin += count
    rest = steps - begin
    return [*contexts, PartContext((rest,) * size, begin, is_new=False)]


def _schedule(draw: random.Random, size: int) -> list[PartContext]:
    """Return a context, and three of another joinable, with as many steps."""
    fewer = draw.randint(1, 2)
    most = fewer + draw.randint(1, 2)
    late = draw.randrange(size)
    uneven = tuple(most if rank == late else fewer for rank in range(size))
    even = draw.randint(1, 2)
    begin = most + even
    count = draw.randint(*_STEPS_OF_SCHEDULE)
    return [
        PartContext((begin + count,) * size, is_schedule=True),
        PartContext(uneven, is_schedule=True),
        PartContext((even,) * size, most, is_new=False, is_schedule=True),
        PartContext((count,) * size, begin, is_new=False, is_schedule=True),
    ]

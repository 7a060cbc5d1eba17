"""Numbers of inputs that are drawn from the session's seed, for scenarios of joins as in training.

A subject can be wrong beyond any number of shadowed steps or of epochs, so no fixed number will do.
The seed and the scenario's name alone decide the numbers.
"""

import random
from functools import lru_cache

from conformance.scenarios.averager_training import option
from conformance.scenarios.interrupts import INTERRUPTS
from conformance.scenarios.join_part_draws import part_contexts
from conformance.scenarios.model import Scenario

Lengths = tuple[int, ...]  # numbers of inputs, by group rank

DIVISOR = "divide_by_initial_world_size"

# The first contexts of ``counts`` with large integers, with those that int32 has not, and with
# large counts in float64. They have even inputs.
LARGE_TRIAL = 1
HUGE_TRIAL = 4
FLOAT64_TRIAL = 7
TRIALS = (LARGE_TRIAL, HUGE_TRIAL, FLOAT64_TRIAL)

# The last context of ``counts``: uneven inputs, and counts as they are.
NONE_RAISED = 10

# The contexts of ``numbers`` with one joinable; its others have several.
ROWS_OF_ONE = 5

JOINABLES_OF_EPOCHS = 3

DDP_IS_FIRST = 3  # from this context of ``epochs`` on


@lru_cache(maxsize=64)
def drawn_lengths(scenario: Scenario, size: int) -> list[Lengths]:
    """Return the numbers of inputs of a group's ranks, one row for each context; [] if none are
    drawn for the scenario.

    - ``numbers``: 2 to 4 on all ranks; then four rows of uneven inputs, and a row for each joinable
      of two contexts with several, which has the inputs of the context.
    - ``counts``: 2 to 4 on all ranks, twice; then two rows of uneven inputs; the last three rows
      twice more; and the last row.
    - ``long``: 100 to 300 on one rank and none on the others, then the same for another rank, then
      1,001 to 1,400 on one rank. A probe names the number, for one rank and then for another.
    - ``long_epoch``: 257 to 600 more on a drawn rank than on the others, which have up to three.
    - ``interrupts``: 1 to 3 on all ranks for each kind of exception; then uneven inputs.
    - ``hooks_raise``: none on one rank and one on the others; then uneven inputs three times.
    - ``epochs``: 5 to 8 rows of uneven inputs.
    - ``many``: 3 on all ranks; then a row for each step of the scenario, with 0 to 3 inputs on each
      rank, and one more on a drawn rank; the same number on all ranks if the context breaks off.
    - ``failing``: for each step of the scenario 1 to 3 on a rank whose first collective fails, and
      none on the other one; if a later collective fails, none on the rank and 2 to 4 on the other.
    - ``fails_last`` and ``fails_early``: the same, where a collective of a post hook fails.
    - ``in_parts``: those of ``join_part_draws``.

    In rows of uneven inputs one rank has 3 to 6 inputs, one has 1 or 2, and one more has none.
    Ranks take turns, beginning with a drawn one.
    """
    if scenario.variant == "in_parts":
        return [context.inputs for context in part_contexts(scenario, size)]
    numbers = _generator(scenario, "lengths")
    first = numbers.randrange(size)
    if scenario.variant == "numbers":
        even = (numbers.randint(2, 4),) * size
        rows = [even, *(_uneven(numbers, size, first + row) for row in range(4))]
        draw = _generator(scenario, "lengths of several")
        for turn, numbers_of_rows in enumerate(several_joinables(scenario)):
            rows += [_uneven(draw, size, first + turn)] * len(numbers_of_rows)
        return rows
    if scenario.variant == "counts":
        even = (numbers.randint(2, 4),) * size
        large = [even, *(_uneven(numbers, size, first + row) for row in range(2))]
        return [even, *large, *large, *large, large[-1]]
    if scenario.variant == "long":
        counts = [numbers.randint(100, 300), numbers.randint(100, 300), numbers.randint(1001, 1400)]
        if scenario.is_probe:
            counts = [int(option(scenario, "inputs"))] * 2
        return [
            tuple(count * (place == (first + row) % size) for place in range(size))
            for row, count in enumerate(counts)
        ]
    if scenario.variant == "long_epoch":
        few = [numbers.randint(0, 3) for _ in range(size)]
        more = max(few) + numbers.randint(257, 600)
        return [tuple(more if place == first else few[place] for place in range(size))]
    if scenario.variant == "interrupts":
        even_rows = [(numbers.randint(1, 3),) * size for _ in INTERRUPTS]
        return [*even_rows, _uneven(numbers, size, first)]
    if scenario.variant == "hooks_raise":
        row = tuple(int(place != first) for place in range(size))
        return [row, *(_uneven(numbers, size, first + at) for at in range(3))]
    if scenario.variant == "many":
        rows = [(3,) * size]
        for context in range(1, len(scenario.steps)):
            most = numbers.randrange(size)
            row = tuple(numbers.randint(0, 3) + (place == most) for place in range(size))
            # No rank shadows the steps of a rank whose context breaks off.
            rows.append(row[:1] * size if breaks_off(scenario, context) else row)
        return rows
    if scenario.variant in ("failing", "fails_last", "fails_early"):
        joins_early = scenario.variant == "fails_early"
        if scenario.variant == "failing":
            joins_early = scenario.fault.succeeding > 0
        trains = [(place == scenario.fault.rank) != joins_early for place in range(size)]
        most_inputs = [numbers.randint(1, 3) + joins_early for _ in scenario.steps]
        return [tuple(count * one for one in trains) for count in most_inputs]
    if scenario.variant == "epochs":
        return [_uneven(numbers, size, first + row) for row in range(numbers.randint(5, 8))]
    return []


def drawn_order(scenario: Scenario, context: int) -> tuple[int, ...]:
    """Return the numbers of the kit's joinables in a context of ``long``, ``epochs`` or ``many``.

    The two contexts with hundreds of shadows have two joinables, and the one with more than a
    thousand has one. The contexts of ``epochs`` have all of them, in any order; those of ``many``
    have one or two.
    """
    if scenario.variant == "long":
        return (0, 1) if context < 2 else (0,)
    places = list(range(JOINABLES_OF_EPOCHS))
    draw = _generator(scenario, f"order/{context}")
    draw.shuffle(places)
    if scenario.variant == "many":
        places = places[: draw.randint(1, 2)]
    return tuple(places)


def several_joinables(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    """Return the contexts of ``numbers`` with two or three joinables that the target makes.

    For each joinable, in the context's order, it is the number under which its values are recorded.

    There are two such contexts, of joinables of their own, which are made in the order of numbers.
    A scenario on several nodes has none.
    """
    if scenario.variant != "numbers" or scenario.nodes:
        return ()
    draw = _generator(scenario, "several")
    begin = ROWS_OF_ONE
    contexts = []
    for _ in range(2):
        rows = list(range(begin, begin + draw.randint(2, 3)))
        begin += len(rows)
        draw.shuffle(rows)
        contexts.append(tuple(rows))
    return tuple(contexts)


def breaks_off(scenario: Scenario, context: int) -> bool:
    """Whether an exception ends a context of ``many``: about one of five, and not the first."""
    return (
        scenario.variant == "many"
        and context > 0
        and _generator(scenario, f"breaks off/{context}").random() < 0.2
    )


def place_of_ddp(scenario: Scenario, context: int) -> int:
    """Return how many of the kit's joinables come before DDP in a context of ``epochs``.

    DDP is anywhere in the first three contexts, and first in the others.
    """
    if context >= DDP_IS_FIRST:
        return 0
    return _generator(scenario, f"place/{context}").randint(0, JOINABLES_OF_EPOCHS)


def divides_by_all(scenario: Scenario, context: int) -> bool:
    """Return the value of ``divide_by_initial_world_size`` in a context.

    The contexts of ``numbers`` with one joinable take turns; those with several divide by all. In
    ``many`` it is that of :func:`divisor_in_many`. In ``epochs`` it is True in the first three
    contexts, and drawn in the others, with at least one False. torch's DDP counts the training
    ranks by its own notification, and a rank keeps that count until it notifies again: DDP has to
    be first from the first False on.
    """
    if scenario.variant == "numbers":
        return context % 2 == 1 or context == 0 or context >= ROWS_OF_ONE
    if scenario.variant == "many":
        return divisor_in_many(scenario, context) is not False
    if scenario.variant != "epochs" or context < DDP_IS_FIRST:
        return True
    is_true = _generator(scenario, f"divisor/{context}").random() < 0.5
    return is_true and context > DDP_IS_FIRST


def divisor_in_many(scenario: Scenario, context: int) -> bool | None:
    """Return the value of ``divide_by_initial_world_size`` that a context of ``many`` is given;
    None if it is given none.

    The first two contexts have none. Of four others, about two have none, and one has each value: a
    context without the argument follows one with False, and the reverse.
    """
    if context < 2:
        return None
    return _generator(scenario, f"divisor/{context}").choice((None, None, True, False))


def _uneven(numbers: random.Random, size: int, turn: int) -> Lengths:
    """Return the numbers of inputs of ranks of which one has the most and, of three, one has none.

    Of two ranks the other one has 1 or 2 inputs in three rows of four, and none in the fourth. Of
    four ranks and more, the others have any number below the most.
    """
    most = numbers.randint(3, 6)
    fewer = numbers.randint(1, 2)
    if size == 2 and turn % 4 == 3:
        fewer = 0
    others = [numbers.randrange(most) for _ in range(size - 3)]
    by_turn = [most, fewer, *(0,) * min(1, size - 2), *others]
    return tuple(by_turn[(place - turn) % size] for place in range(size))


def _generator(scenario: Scenario, purpose: str) -> random.Random:
    return random.Random(f"{scenario.session_seed}/{scenario.name}/{purpose}")

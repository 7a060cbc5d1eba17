"""The scenario in which several graphs of a wrapped network are alive (section 19, continued).

Networks compute in float32, in one process each: nothing averages gradients. These numbers are
drawn from the session's seed:

    the first steps   2 to 6 graphs at once, with batches of 4 to 12 rows, no two the same; one
                      batch of one step has none
    the others        5 to 9 graphs, with 2 to 4 alive at once; three in four batches have the same
                      number of rows; the order of forwards and backwards; the share of
                      dropout
    all of them       the parts of a linear layer, 2 to 4, and how it is cut
"""

import itertools
import random
from dataclasses import replace

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.wrapper import PLAIN

LEAST_ROWS = 4
MOST_ROWS = 12
MOST_ALIVE = 4
# The first step in which a forward comes after the backward of another graph.
FIRST_IN_TURNS = 4
# The next backward of such a step: of the oldest graph, of the newest one, or of any; and whether
# blocks have dropout.
_TURNS = tuple(itertools.product(("queue", "stack", "drawn"), (False, True)))

FORWARD = "forward"
BACKWARD = "backward"

GRAPHS = replace(
    PLAIN,
    name="wrapper_graphs",
    summary="several forwards before their backwards, which run in the same order, in reverse, and "
    "in a drawn one; one graph is dropped, and one batch is empty; in six more steps forwards and "
    "backwards take turns, as in a pipeline, three times with dropout",
    steps=("normal",) * (FIRST_IN_TURNS + len(_TURNS)),
    world_sizes=(2,),
    variant="training_graphs",
)


def draw_graphs(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the graphs of each step.

    A parameter stands for a step. Its shape has the rows of each batch in the order of forwards.
    No two batches of a step have as many, so that blocks can count them by their rows. In steps in
    which forwards and backwards take turns most have as many: memory of one batch fits another.
    """
    of_all = range(LEAST_ROWS, MOST_ROWS + 1)
    rows = [numbers.sample(of_all, numbers.randint(2, 6)) for _ in range(FIRST_IN_TURNS)]
    empty = numbers.choice(rows)
    empty[numbers.randrange(len(empty))] = 0
    for _ in scenario.steps[FIRST_IN_TURNS:]:
        usual = numbers.choice(of_all)
        count = numbers.randint(5, 9)
        rows.append(
            [usual if numbers.random() < 0.75 else numbers.choice(of_all) for _ in range(count)]
        )
    return replace(scenario, params=tuple(Param(tuple(counts)) for counts in rows))


def _turns(scenario: Scenario, step: int) -> tuple[str, bool]:
    order = generator(scenario, "turns").sample(_TURNS, len(_TURNS))
    return order[step - FIRST_IN_TURNS]


def share_in_graphs(scenario: Scenario, step: int) -> float:
    """Return the share of dropout in a step of ``GRAPHS``: 0, or 0.1 to 0.5."""
    if step < FIRST_IN_TURNS or not _turns(scenario, step)[1]:
        return 0.0
    return generator(scenario, f"share/{step}").uniform(0.1, 0.5)


def passes_in_turns(scenario: Scenario, step: int) -> list[tuple[str, int]]:
    """Return ``FORWARD`` or ``BACKWARD`` and the number of the graph, for each pass of a step.

    Two graphs at least are alive before each backward, as long as others are to come.
    """
    draw = generator(scenario, f"passes/{step}")
    most = draw.randint(2, MOST_ALIVE)
    (order, _) = _turns(scenario, step)
    to_come = list(range(len(scenario.params[step].shape)))
    alive: list[int] = []
    passes = []
    while to_come or alive:
        has_room = len(alive) < 2 or (len(alive) < most and draw.random() < 0.5)
        if to_come and has_room:
            alive.append(to_come.pop(0))
            passes.append((FORWARD, alive[-1]))
            continue
        place = {"queue": 0, "stack": -1, "drawn": draw.randrange(len(alive))}[order]
        passes.append((BACKWARD, alive.pop(place)))
    return passes

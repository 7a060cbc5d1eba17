"""The contexts of joins in loops, which are drawn from the session's seed.

See ``joins_in_loops.py`` for the scenarios. The seed and the scenario's name alone decide the
contexts.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

Group = tuple[int, ...]  # global ranks

# The ways in which a context ends. ``throws`` has throw_on_early_termination=True.
ENDS = "ends"
RAISES = "raises"
THROWS = "throws"
DISABLED = "disabled"

# The settings of torch that the code around a context may have changed.
NO_GRAD = "no_grad"
INFERENCE = "inference_mode"
AUTOCAST = "autocast"
FLOAT64 = "float64"
DETERMINISTIC = "deterministic"
_SETTINGS = (NO_GRAD, INFERENCE, AUTOCAST, FLOAT64, DETERMINISTIC)
_CONTEXTS_WITH_SETTINGS = 4

# The places in a body at which it changes modes, rates and settings for good.
AT_BEGIN = "begin"
AT_END = "end"

JOINABLES = 3

# The first context on each of two groups: it shows the meaning of a joinable's gradients, and the
# state that it replicates.
EVEN_ON_GROUPS = (0, 1)


@dataclass(frozen=True)
class LoopContext:
    """One context.

    Attributes:
        inputs: the number of inputs of each rank, by its place in the group.
        ending: the way in which the context ends.
        joinables: the numbers of the kit's joinables, in their order.
        settings: of torch, in the code around the context.
        place_of_model: how many joinables come before DDP; -1 if the context has no DDP.
        on_part: the group is a part of WORLD.
        nested_at: the step of the context before in which this one is nested; -1 if in none.
        changes_at: the place in the body at which it changes modes, rates and settings for good.
    """

    inputs: tuple[int, ...]
    ending: str = ENDS
    joinables: tuple[int, ...] = tuple(range(JOINABLES))
    settings: tuple[str, ...] = ()
    place_of_model: int = -1
    on_part: bool = False
    nested_at: int = -1
    changes_at: str = AT_BEGIN


@lru_cache(maxsize=64)
def loop_contexts(scenario: Scenario, world: int) -> tuple[LoopContext, ...]:
    """Return the contexts of a scenario; () if it has none of these.

    - ``modes``: four contexts of the kit's joinables in a row of drawn settings, each of which is
      on in two of the four. Then four with DDP among the joinables: two end, and one each ends by
      an exception and by throw_on_early_termination. One more is disabled. They come in any order.
      Half of the contexts without an exception make their changes at the end of the body.
    - ``two_groups``: a context with even inputs on each of two groups, one with uneven inputs on
      each, and one that ends in another way on each, in a drawn order; then a context within
      another one twice: on the part within one on WORLD, and the reverse. The order of the groups
      is drawn. On the part throw_on_early_termination ends the one that ends in another way; on
      WORLD it ends so, or by an exception, or is disabled, as drawn.
    - ``entered``: three or four contexts, and one more that an exception ends: not the first two
      and not the last.
    """
    draw = generator(scenario, "contexts")
    drawers: dict[str, Callable[[Scenario, int, random.Random], list[LoopContext]]] = {
        "modes": _in_modes,
        "two_groups": _on_two_groups,
        "entered": _entered_again,
    }
    if scenario.variant not in drawers:
        return ()
    return tuple(drawers[scenario.variant](scenario, world, draw))


def group_of_loop(scenario: Scenario, world: int, context: int) -> Group:
    """Return the global ranks of the group of a context."""
    if loop_contexts(scenario, world)[context].on_part:
        return scenario.twin_groups[0]
    return tuple(range(world))


def _in_modes(scenario: Scenario, world: int, draw: random.Random) -> list[LoopContext]:
    turn = draw.randrange(world)
    settings: list[list[str]] = [[] for _ in range(_CONTEXTS_WITH_SETTINGS)]
    for setting in _SETTINGS:
        for place in draw.sample(range(_CONTEXTS_WITH_SETTINGS), _CONTEXTS_WITH_SETTINGS // 2):
            settings[place].append(setting)
    of_changes = generator(scenario, "changes")
    half = _CONTEXTS_WITH_SETTINGS // 2
    places = of_changes.sample((AT_BEGIN, AT_END) * half, 2 * half)
    contexts = [
        LoopContext(
            _uneven(draw, world, turn + number), settings=tuple(chosen), changes_at=places[number]
        )
        for number, chosen in enumerate(settings)
    ]
    # An exception may end the body before its last step.
    places = [*of_changes.sample((AT_BEGIN, AT_END), 2), AT_BEGIN, AT_BEGIN]
    places.append(of_changes.choice((AT_BEGIN, AT_END)))
    for number, ending in enumerate((ENDS, ENDS, RAISES, THROWS, DISABLED)):
        is_even = ending in (RAISES, DISABLED)
        inputs = (draw.randint(1, 3),) * world if is_even else _uneven(draw, world, turn + number)
        place = draw.randint(0, JOINABLES)
        is_deterministic = draw.random() < 0.5
        contexts.append(
            LoopContext(
                inputs,
                ending,
                settings=(DETERMINISTIC,) * is_deterministic,
                place_of_model=place,
                changes_at=places[number],
            )
        )
    draw.shuffle(contexts)
    return [
        replace(context, joinables=tuple(draw.sample(range(JOINABLES), JOINABLES)))
        for context in contexts
    ]


def draw_groups(scenario: Scenario, draw: random.Random, least: int = 2) -> Scenario:
    """Return the scenario with one rank more than the subject needs, and a drawn part.

    The ranks of the part have other numbers in it than in WORLD.
    """
    size = least + 1
    without = draw.randrange(size - 1)
    part = tuple(rank for rank in range(size) if rank != without)
    return replace(scenario, size=size, twin_groups=(part,))


def _on_two_groups(scenario: Scenario, world: int, draw: random.Random) -> list[LoopContext]:
    part = scenario.twin_groups[0]
    groups = [False, True]
    draw.shuffle(groups)
    groups += draw.sample(groups, 2)
    turn = draw.randrange(world)
    # More joinables in a later context on the other group than in the first.
    numbers = [
        draw.randint(1, 2),
        *(JOINABLES if other != groups[0] else 2 for other in groups[1:]),
    ]
    contexts = []
    for number, on_part in enumerate(groups):
        size = len(part) if on_part else world
        even = (draw.randint(1, 3),) * size
        contexts.append(
            LoopContext(
                even if number in EVEN_ON_GROUPS else _uneven(draw, size, turn + number),
                joinables=_some(draw, numbers[number]),
                on_part=on_part,
            )
        )
    contexts += _ending(scenario, world, part)
    outer_on_part = draw.random() < 0.5
    for on_part in (outer_on_part, not outer_on_part):
        contexts += _nested(draw, world, part, on_part)
    return contexts


def _ending(scenario: Scenario, world: int, part: Group) -> list[LoopContext]:
    """Return a context on each of two groups that ends in another way, in a drawn order."""
    draw = generator(scenario, "endings")
    endings = {True: THROWS, False: draw.choice((THROWS, RAISES, DISABLED))}
    contexts = []
    for on_part in draw.sample((True, False), 2):
        size = len(part) if on_part else world
        is_even = endings[on_part] != THROWS
        inputs = (
            (draw.randint(1, 3),) * size if is_even else _uneven(draw, size, draw.randrange(size))
        )
        joinables = _some(draw, draw.randint(1, JOINABLES))
        contexts.append(LoopContext(inputs, endings[on_part], joinables, on_part=on_part))
    return contexts


def _nested(draw: random.Random, world: int, part: Group, on_part: bool) -> list[LoopContext]:
    """Return a context, and one within it, on the other group.

    The ranks of both groups have the step in which the other context is entered. The rank with the
    most inputs in one of them has fewest in the other.
    """
    step = draw.randint(0, 2)
    everybody = tuple(range(world))
    outer = part if on_part else everybody
    inner = everybody if on_part else part
    order = draw.sample(part, len(part))
    inputs = {rank: draw.randint(0, step) for rank in outer}
    inputs |= {rank: step + 1 + more for more, rank in enumerate(order)}
    inner_inputs = dict(zip(inner, _uneven(draw, len(inner), inner.index(order[0])), strict=True))
    inner_inputs[order[-1]] = 0
    outer_context = LoopContext(
        tuple(inputs[rank] for rank in outer),
        joinables=_some(draw, draw.randint(1, JOINABLES)),
        on_part=on_part,
    )
    inner_context = LoopContext(
        tuple(inner_inputs[rank] for rank in inner),
        joinables=_some(draw, draw.randint(1, JOINABLES)),
        on_part=not on_part,
        nested_at=step,
    )
    return [outer_context, inner_context]


def _entered_again(scenario: Scenario, world: int, draw: random.Random) -> list[LoopContext]:
    turn = draw.randrange(world)
    rows = [_uneven(draw, world, turn + number) for number in range(draw.randint(3, 4))]
    contexts = [LoopContext(row) for row in rows]
    broken = LoopContext((draw.randint(1, 3),) * world, RAISES)
    contexts.insert(draw.randint(2, len(contexts) - 1), broken)
    return contexts


def _some(draw: random.Random, count: int) -> tuple[int, ...]:
    """Return some of the kit's joinables, in any order."""
    return tuple(draw.sample(range(JOINABLES), count))


def _uneven(draw: random.Random, size: int, turn: int) -> tuple[int, ...]:
    """Return numbers of inputs; the rank whose turn it is has the most, and another one fewest."""
    most = draw.randint(3, 6)
    fewest = draw.randint(0, 2)
    others = [draw.randrange(most) for _ in range(size - 2)]
    by_turn = [most, fewest, *others]
    return tuple(by_turn[(place - turn) % size] for place in range(size))

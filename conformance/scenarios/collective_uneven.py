"""The calls of tensors, or of parts of a tensor, of different sizes, in the scenario ``UNEVEN``."""

import itertools
import random

from conformance.scenarios.collective import TO_ALL
from conformance.scenarios.collective_training import FIRST_WITHOUT_ROWS, WITH_LARGE_PART
from conformance.scenarios.model import Scenario


def rows_of(scenario: Scenario, size: int, step: int, index: int, source: int, to: int) -> int:
    """Return the number of rows of a message."""
    if _has_no_rows(scenario, size, index, source, to):
        return 0
    if index == WITH_LARGE_PART:
        return _rows_beside_large(scenario, size, step, index, source, to)
    return scenario.params[index].shape[0] + _more_rows(scenario, size, step, index, source, to)


def _more_rows(scenario: Scenario, size: int, step: int, index: int, source: int, to: int) -> int:
    """Return how many rows a message has beyond those of its parameter.

    They are others in the next step. In every other call each rank still sends, and gets, as many
    rows in all as in the other steps.
    """
    if scenario.options[0] == "all_gather":
        key = f"{scenario.session_seed}/rows/{index // 2}"
        more = random.Random(key).sample(range(size), size)[source]
        # The rank that has the most rows in one call has the fewest in the next, and in the call of
        # the same parameter in the next step.
        return 3 * (more if (index + step) % 2 else size - 1 - more)
    key = f"{scenario.session_seed}/splits/{index}"
    shift = random.Random(key).sample(range(size), size)[step % size]
    if index % 2:
        # A rank sends as many rows in all as it gets. With three ranks, what it sends to a peer has
        # another number of rows than what it gets from that peer.
        return 3 * ((to - source + shift) % size)
    # No rank sends as many rows in all as it gets: if that is refused, it is on every rank.
    return 2 * ((source + shift) % size) + 3 * ((to + shift) % size) ** 2


def _rows_beside_large(
    scenario: Scenario, size: int, step: int, index: int, source: int, to: int
) -> int:
    """Return the number of rows of a message: those of the parameter for one pair, or one sender of
    messages to all ranks, and up to an eighth of that for others. All of it is drawn.

    In the first step the pair is a rank and itself, as of tokens that stay with their rank.
    """
    key = f"{scenario.session_seed}/large part/{step}"
    draw = random.Random(key)
    rows = scenario.params[index].shape[0]
    chosen = draw.randrange(size)
    destination = draw.randrange(size) if step else chosen
    if scenario.options[0] in TO_ALL:
        destination = to
    if (source, to) == (chosen, destination):
        return rows
    return random.Random(f"{key}/{source}/{to}").randint(1, max(rows // 8, 1))


def _has_no_rows(scenario: Scenario, size: int, index: int, source: int, to: int) -> bool:
    """Whether a message has no rows.

    Some senders, some receivers or some pairs of ranks have none. They are drawn; in the next call
    the others have none. A message to all ranks is its sender's.
    """
    if index < FIRST_WITHOUT_ROWS:
        return False
    number, is_next = divmod(index - FIRST_WITHOUT_ROWS, 2)
    places = range(size)
    if scenario.options[0] in TO_ALL or number == 0:
        message: int | tuple[int, int] = source
        candidates: list[int | tuple[int, int]] = [*places]
    elif number == 1:
        message, candidates = to, [*places]
    else:
        message, candidates = (source, to), [*itertools.product(places, places)]
    draw = random.Random(f"{scenario.session_seed}/without rows/{number}")
    chosen = draw.sample(candidates, draw.randint(1, max(len(candidates) - 1, 1)))
    return (message in chosen) != bool(is_next)

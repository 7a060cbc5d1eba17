"""The memory of calls of quantized collectives: tensors that are parts of larger buffers, and
inputs and outputs that share memory.
"""

import random
from collections.abc import Collection

from conformance.scenarios.model import Scenario

# How the tensors of a call lie in their buffer: with gaps between them, or each behind the one
# before it, as those of ``list(buffer.chunk(n))``; these may also fill the buffer.
APART = "apart"
ADJACENT = "adjacent"
WHOLE = "whole"


def is_in_place(scenario: Scenario, step: int, index: int) -> bool:
    """Whether a call of ``IN_OUTPUTS`` or ``IN_INPUTS`` shares the memory of input and output."""
    first = random.Random(f"{scenario.session_seed}/in place").randrange(2)
    return (first + step + index) % 2 == 0


def place_in_buffer(scenario: Scenario, step: int, index: int) -> str:
    """Return how the tensors of a call of ``VIEWS`` lie in their buffer: the same on all ranks.

    In half of the calls of a step they are apart; in one they fill the buffer.
    """
    draw = random.Random(f"{scenario.session_seed}/places/{step}")
    count = len(scenario.params)
    chosen = draw.sample(range(count), count // 2)
    if index == chosen[0]:
        return WHOLE
    return ADJACENT if index in chosen else APART


def asynchronous_calls(scenario: Scenario, step: int) -> Collection[int]:
    """Return the parameters of a step of ``VIEWS`` whose calls have async_op=True: half of them.

    In the first step three calls follow each other, so that they are under way together. In the
    others there is one of each two calls.
    """
    draw = random.Random(f"{scenario.session_seed}/asynchronous views/{step}")
    half = len(scenario.params) // 2
    if step == 0:
        first = draw.randint(0, half)
        return range(first, first + half)
    return [2 * pair + draw.randrange(2) for pair in range(half)]

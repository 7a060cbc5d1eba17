"""The memory of calls of quantized collectives: tensors that are parts of larger buffers, and
inputs and outputs that share memory. Some of these calls have async_op=True.
"""

import math
import random
from collections.abc import Collection

from conformance.scenarios.collective_training import OF_LARGE
from conformance.scenarios.model import Scenario

# How the tensors of a call lie in their buffer: with gaps between them, or each behind the one
# before it, as those of ``list(buffer.chunk(n))``; these may also fill the buffer.
APART = "apart"
ADJACENT = "adjacent"
WHOLE = "whole"


def is_in_place(scenario: Scenario, step: int, index: int) -> bool:
    """Whether a call of ``IN_OUTPUTS`` or ``IN_INPUTS`` shares the memory of input and output.

    Of ``VIEWS`` every other call does, and of ``LARGE`` the one whose tensors lie in a buffer.
    """
    if scenario.variant == OF_LARGE:
        return bool(place_in_buffer(scenario, step, index))
    first = random.Random(f"{scenario.session_seed}/in place").randrange(2)
    return (first + step + index) % 2 == 0


def place_in_buffer(scenario: Scenario, step: int, index: int) -> str:
    """Return how the tensors of a call lie in their buffer, the same on all ranks; '' if they have
    memory of their own.

    Of ``VIEWS`` half of the calls of a step are ``APART``, and one is ``WHOLE``. Of ``LARGE`` one
    large message of the first step lies in a buffer, in any of these ways.
    """
    draw = random.Random(f"{scenario.session_seed}/places/{step}")
    if scenario.variant == OF_LARGE:
        if step or index != draw.choice(_large(scenario)):
            return ""
        return draw.choice((APART, ADJACENT, WHOLE))
    count = len(scenario.params)
    chosen = draw.sample(range(count), count // 2)
    if index == chosen[0]:
        return WHOLE
    return ADJACENT if index in chosen else APART


def asynchronous_calls(scenario: Scenario, step: int) -> Collection[int]:
    """Return the parameters of a step of ``VIEWS`` or ``LARGE`` whose calls have async_op=True:
    half of them, and of ``LARGE`` none after the first step.

    In the first step of ``VIEWS`` three calls follow each other, so that they are under way
    together. In its other step there is one of each two calls. Of ``LARGE`` one at least is a large
    contiguous message.
    """
    draw = random.Random(f"{scenario.session_seed}/asynchronous/{scenario.name}/{step}")
    half = len(scenario.params) // 2
    if scenario.variant == OF_LARGE:
        first = draw.choice(_large(scenario))
        others = [index for index in range(len(scenario.params)) if index != first]
        return [] if step else [first, *draw.sample(others, half - 1)]
    if step == 0:
        first = draw.randint(0, half)
        return range(first, first + half)
    return [2 * pair + draw.randrange(2) for pair in range(half)]


def middle_one(scenario: Scenario) -> int:
    """Return the contiguous parameter of middle size: the largest one takes long, and the smallest
    one is no large message.
    """
    contiguous = _by_size(scenario)
    return contiguous[len(contiguous) // 2]


def _large(scenario: Scenario) -> list[int]:
    """Return the contiguous parameters, but for the smallest one."""
    return _by_size(scenario)[1:]


def _by_size(scenario: Scenario) -> list[int]:
    contiguous = [index for index, spec in enumerate(scenario.params) if spec.is_contiguous]
    return sorted(contiguous, key=lambda index: math.prod(scenario.params[index].shape))

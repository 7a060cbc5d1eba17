"""Gradients that lie in a few elements, as those of an embedding's last row or of one bias do.

A compressor of blocks may leave out the elements after the last whole block, the first ones, or one
at each border. In a gradient that is spread over a bucket they cost next to nothing of its norm; in
these gradients they are all of it.

The kind of such a step is ``few/FORM/COUNT/PARAM/NUMBER``. FORM is one of:

tail, head      the last or the first elements of a parameter
before, behind  the element before the border of a block of any power of two, or behind it: at
                2**j - 1 or 2**j, for the largest power below the number of elements
any             drawn elements

COUNT is the number of elements; 0 draws one of 1 to 255, each as likely as its double. PARAM is the
number of the only parameter that is not zero, or ``all``. NUMBER is drawn from the session's seed.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

FEW = "few"
LARGEST_COUNT = 255
_MOST_DRAWN = 64
# A probe has hundreds of parameters, and the hook is called for each bucket in each step.
_MOST_ALONE = 16
_ALL = "all"


def places(kind: str, numel: int, param: int) -> Sequence[int]:
    """Return the elements of a parameter that are not zero, for a kind that begins with ``few``."""
    _, form, count, only, number = kind.split("/")
    if only not in (_ALL, str(param)) or not numel:
        return ()
    numbers = random.Random(f"{number}/{param}")
    some = min(numel, int(count) or int((LARGEST_COUNT + 1) ** numbers.random()))
    border = 1 << (numel - 1).bit_length() >> 1
    return {
        "tail": range(numel - some, numel),
        "head": range(some),
        "before": (max(0, border - 1),),
        "behind": (border,),
        "any": numbers.sample(range(numel), some),
    }[form]


def in_each_parameter(scenario: Scenario, delta: float) -> tuple[str, ...]:
    """Return steps for the buckets of several parameters: the last and the first elements of each
    parameter alone, or of drawn ones of many, and drawn elements of all.
    """
    numbers = generator(replace(scenario, name=FEW), "parameters")
    params: Sequence[int] = range(len(scenario.params))
    if len(params) > _MOST_ALONE:
        params = sorted(numbers.sample(params, _MOST_ALONE))
    steps = [
        f"{FEW}/{form}/{numbers.choice((0, 1))}/{param}/{numbers.randrange(10**6)}"
        for param in params
        for form in ("tail", "head")
    ]
    numbers.shuffle(steps)
    return (*steps, _drawn(delta, numbers))


def in_all_parameters(scenario: Scenario, delta: float) -> tuple[str, ...]:
    """Return steps for parameters that have buckets of their own, in an order that is drawn."""
    numbers = generator(scenario, FEW)
    forms = (("tail", 1), ("tail", 0), ("head", 1), ("head", 0), ("before", 1), ("behind", 1))
    steps = [f"{FEW}/{form}/{count}/{_ALL}/{numbers.randrange(10**6)}" for form, count in forms]
    steps += [_drawn(delta, numbers) for _ in range(2)]
    numbers.shuffle(steps)
    return tuple(steps)


def _drawn(delta: float, numbers: random.Random) -> str:
    """Return a step with so few drawn elements that none may be lost.

    Of n elements of about the same size, one is the n-th part of the squared norm, and 1 - delta of
    it may be lost.
    """
    most = int(1 / (1 - delta)) if delta < 1 else _MOST_DRAWN
    count = max(1, min(most, _MOST_DRAWN))
    return f"{FEW}/any/{count}/{_ALL}/{numbers.randrange(10**6)}"

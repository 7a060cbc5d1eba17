"""The scenario in which a quantized collective is called in a drawn mix of ways.

One object makes all calls; with error feedback each of ten parameters has an object of its own.
What the calls of a parameter have in common is drawn, and so is the rest for each call:

parameter   sums and averages in turn; contiguous matrices, matrices that are transposed, matrices
            in drawn layouts, whose inputs and outputs may have different ones, weights of
            convolutions in channels_last, and numbers
call        with async_op=True or without; under ``no_grad`` or not; a wait() in another thread

The calls of a step come in a drawn order. One to four are begun before the first wait.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from conformance.scenarios.collective import PLAIN, SUMMING
from conformance.scenarios.collective_training import SELDOM, changing_exponents, matrix
from conformance.scenarios.model import Param, Scenario

MIXED = "mixed"
_POISON = ("nan", "infinite")
# The least and the largest extent of each dimension of a convolution's weight.
_IMAGES = ((3, 5), (2, 4), (3, 5), (3, 5))
# Inputs and outputs; an empty text is the layout of the inputs.
_LAYOUTS = (
    ("columns", ""),
    ("columns", "transposed"),
    ("transposed", "contiguous"),
    ("contiguous", "transposed"),
    ("contiguous", "columns"),
)

_MIXED = replace(
    PLAIN,
    name="collective_mixed",
    summary="16 to 20 calls of values whose scale changes from call to call, in a drawn mix: sums "
    "and averages, contiguous matrices, others, weights in channels_last and numbers, with "
    "async_op=True and without, under no_grad and not, a wait() in another thread; one to four "
    "calls are begun before the first wait",
    steps=("normal",) * 16,
    world_sizes=(2, 3),
    variant=MIXED,
)


@dataclass(frozen=True)
class Conditions:
    """How a call is made.

    Attributes:
        is_asynchronous: with async_op=True, if the subject takes it.
        waits_in_thread: the wait() is in another thread than the call.
        has_grad_mode: whether grad mode is on.
    """

    is_asynchronous: bool
    waits_in_thread: bool
    has_grad_mode: bool


def conditions_of(scenario: Scenario, step: int, index: int) -> Conditions:
    """Return how a call of the scenario ``MIXED`` is made."""
    draw = random.Random(f"{scenario.session_seed}/conditions/{step}/{index}")
    return Conditions(*(draw.random() < 0.5 for _ in range(3)))


def mixed_runs(scenario: Scenario, step: int, indices: Sequence[int]) -> list[list[int]]:
    """Return the parameters of a step's calls in a drawn order, in runs of drawn lengths.

    A run has one to four calls, which are begun before the first wait.
    """
    draw = random.Random(f"{scenario.session_seed}/runs/{step}")
    left = draw.sample(indices, len(indices))
    runs = []
    while left:
        length = draw.randint(1, 4)
        runs.append(left[:length])
        left = left[length:]
    return runs


def is_average(scenario: Scenario, index: int) -> bool:
    """Whether a parameter's calls ask for averages."""
    return scenario.options[0] in SUMMING and index % 2 == 1


def kind_of_calls(scenario: Scenario, index: int) -> str:
    """Return what the calls of a parameter have in common, in words."""
    calls = "averages" if is_average(scenario, index) else "sums"
    if scenario.options[0] not in SUMMING:
        calls = "messages"
    spec = scenario.params[index]
    layouts = dict.fromkeys((spec.layout, spec.output_layout or spec.layout))
    if len(spec.shape) == len(_IMAGES):
        return f"{calls} of tensors in channels_last"
    return f"{calls} of {' to '.join(layouts)} matrices" if spec.shape else f"{calls} of numbers"


def draw_mixed(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw 16 to 20 steps, six matrices of 150 to 400 elements and two weights of convolutions with
    drawn exponents, and layouts.

    One message has a NaN, and one infinities, in one step each.
    """
    count = numbers.randint(16, 20)
    steps = numbers.choices(("normal", SELDOM), k=count - 6) + [SELDOM] * 6
    for place, kind in zip(
        numbers.sample(range(1, count - 7), 3), ("zeros", *_POISON), strict=True
    ):
        steps[place] = kind
    layouts = [("contiguous", ""), ("transposed", ""), numbers.choice(_LAYOUTS)]
    of_sums = changing_exponents(count, numbers)
    of_averages = changing_exponents(count, numbers)
    params = [
        replace(
            matrix(numbers.randint(150, 400), numbers),
            exponents=exponents,
            layout=layout,
            output_layout=output_layout,
        )
        for (layout, output_layout), *pair in zip(layouts, of_sums, of_averages, strict=True)
        for exponents in pair
    ]
    images = [
        Param(
            tuple(numbers.randint(*sizes) for sizes in _IMAGES),
            exponents=exponents,
            layout="channels_last",
        )
        for exponents in changing_exponents(count, numbers)[1:]
    ]
    params += [*images, Param(()), Param(())]
    return replace(scenario, params=tuple(params), steps=tuple(steps))


def without_poison(scenario: Scenario) -> Scenario:
    """Return the scenario without NaN and infinities: errors of other calls can be followed."""
    steps = ("normal" if kind in _POISON else kind for kind in scenario.steps)
    return replace(scenario, steps=tuple(steps))


DRAWS = {_MIXED.name: draw_mixed}

# As it is drawn for seed 0.
MIXED_CALLS = draw_mixed(_MIXED, random.Random(0))

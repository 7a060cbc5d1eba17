"""The messages that ranks send each other through a quantized collective.

The message of each pair of ranks is different, so that a message that arrives at the wrong place
can be traced. The ranks that send a message and the controller that judges its arrival compute the
same bits from (source, destination, step, parameter). There are two kinds of message besides those
of ``gradients``:

uneven      normal, with magnitudes that differ between pairs, and between one run of 128 elements
            and the next: if a value is scaled by the largest value of another block, its error
            exceeds the bound.
special     NaN, infinities, zeros, ties and neighbours of a rounding to half precision, subnormals,
            the largest values.

In this module, ``place`` is a rank's number within its group.
"""

import functools
import math

import torch

from conformance.scenarios.collective import CALLED, CALLS
from conformance.scenarios.gradients import gradient
from conformance.scenarios.model import Scenario

# The bits of the NaN that arithmetic on a CUDA device returns. A rounding to bfloat16 that adds to
# these bits and cuts off the last 16 overflows into the sign, and returns -0.0.
_NAN_OF_CUDA = 0x7FFFFFFF

_SPECIAL = (
    # Around the largest value of float16, and the largest value of float32.
    *(math.nan, math.inf, -math.inf, 0.0, -0.0),
    *(65504.0, -65504.0, 65519.0, 65520.0, -7e4, 3.4028234663852886e38, -3e38),
    # Around the smallest normal and subnormal values of float16 and bfloat16.
    *(2.0**-14, 2.0**-24, 3 * 2.0**-25, 2.0**-25, -(2.0**-26)),
    *(1e-40, -(2.0**-133), 2.0**-134, 1e-30),
    # Ties of the roundings to float16 and bfloat16, and ordinary values.
    *(1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8),
    *(0.1, -1 / 3, 256.0),
    math.nan,  # message() gives this one the bits of _NAN_OF_CUDA
)


def form_of(scenario: Scenario, index: int) -> str:
    """Return the form of a parameter's call: one of ``CALLS``, or '' for the ordinary form."""
    if scenario.name != CALLED.name:
        return ""
    return CALLS[scenario.options[0]][index]


def indices(scenario: Scenario) -> range:
    """Return the parameters for which a call is made."""
    calls = len(scenario.params)
    if scenario.name == CALLED.name:
        # The scenario has a parameter for each form of the collective with the most forms.
        calls = min(calls, len(CALLS[scenario.options[0]]))
    return range(calls)


def source_of(scenario: Scenario, size: int, step: int, index: int) -> int:
    """Return the place of the rank that scatters."""
    if scenario.order != "free" or "constant" in scenario.steps:
        # Rank 0 has to go first, or the same message has to be sent in every step.
        return 0
    return (step + index) % size


def sent(scenario: Scenario, size: int, place: int, step: int, index: int) -> list[tuple[int, int]]:
    """Return the messages that a rank passes to a call, in order, as places (from, to).

    An all_gather has one message for all ranks; its destination is given as 0.
    """
    collective = scenario.options[0]
    if collective == "all_gather":
        return [(place, 0)]
    if collective == "scatter" and place != source_of(scenario, size, step, index):
        return []
    return [(place, to) for to in range(size)]


def received(
    scenario: Scenario, size: int, place: int, step: int, index: int
) -> list[tuple[int, int]]:
    """Return the messages that arrive at a rank, in order, as places (from, to)."""
    collective = scenario.options[0]
    if collective == "scatter":
        return [(source_of(scenario, size, step, index), place)]
    destination = 0 if collective == "all_gather" else place
    return [(source, destination) for source in range(size)]


def shape_of(scenario: Scenario, size: int, index: int, source: int, to: int) -> tuple[int, ...]:
    """Return the shape of a message."""
    shape = scenario.params[index].shape
    form = form_of(scenario, index)
    if not form.endswith("splits"):
        return shape
    # Every rank sends the same number of rows in all, and a different number to each peer. A
    # collective that ignores the splits and cuts evenly still runs, but delivers rows that belong
    # to another rank.
    rows = 2 * ((source + to) % size) + (form == "splits")
    return (rows, *shape[1:])


@functools.lru_cache(maxsize=512)
def message(
    scenario: Scenario, size: int, step: int, index: int, source: int, to: int
) -> torch.Tensor:
    """Return the message from one place of a group to another, in C order."""
    spec = scenario.params[index]
    kind = scenario.steps[step]
    pair = 16 * source + to
    dtype = getattr(torch, spec.dtype)
    shape = shape_of(scenario, size, index, source, to)
    count = math.prod(shape)
    if not dtype.is_floating_point:
        # Odd numbers above 2**20 need more bits than any narrow dtype has.
        return (2**20 + 1 + 2 * (1000 * pair + torch.arange(count))).to(dtype).reshape(shape)
    if kind == "special":
        values = torch.tensor(_SPECIAL)
        values[-1:].view(torch.int32).fill_(_NAN_OF_CUDA)
        return values.roll(source + to).reshape(shape)
    values = gradient(
        "normal" if kind == "uneven" else kind,
        (count,),
        torch.float64,
        world=1,
        rank=pair,
        step=step,
        param=index,
    )
    if kind == "uneven":
        of_pair = 2.0 ** (2 * ((5 * source + 3 * to + step) % 4))
        of_block = 2.0 ** (6 - 3 * (torch.arange(count) // 128 % 3))
        values = values * of_pair * of_block
    return values.to(dtype).reshape(shape)

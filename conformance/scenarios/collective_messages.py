"""What ranks send each other through a quantized collective: each pair's message is its own, so that it is known where it belongs.

Ranks that send it and the controller that judges what has arrived make the same bits of (source, destination, step, parameter).
Kinds of message beside those of ``inputs``:

uneven      normal, with magnitudes that differ from pair to pair, and from one run of 128 elements to the next: what is scaled by
            the largest value of something else is off by more than it may.
special     NaN, infinities, zeros, ties and neighbours of a rounding to half precision, subnormals, the largest values.
"""

import functools
import math

import torch

from conformance.scenarios.collective import CALLED, CALLS
from conformance.scenarios.gradients import gradient
from conformance.scenarios.model import Scenario

_NAN_OF_CUDA = 0x7FFFFFFF  # the bits of the NaN that arithmetic on such a device gives
_SPECIAL = (
    *(
        math.nan,
        math.inf,
        -math.inf,
        0.0,
        -0.0,
        65504.0,
        -65504.0,
        65519.0,
        65520.0,
        -7e4,
        3.4028234663852886e38,
        -3e38,
    ),
    *(
        2.0**-14,
        2.0**-24,
        3 * 2.0**-25,
        2.0**-25,
        -(2.0**-26),
        1e-40,
        -(2.0**-133),
        2.0**-134,
        1e-30,
    ),
    *(
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        -1 - 2.0**-8,
        0.1,
        -1 / 3,
        256.0,
        math.nan,
    ),
)


def form_of(scenario: Scenario, index: int) -> str:
    """Return how the call for a parameter is made: one of ``CALLS``, or '' as it mostly is."""
    return CALLS[scenario.options[0]][index] if scenario.name == CALLED.name else ""


def indices(scenario: Scenario) -> range:
    """Return the parameters that there are calls for."""
    forms = (
        len(CALLS[scenario.options[0]]) if scenario.name == CALLED.name else len(scenario.params)
    )
    return range(min(forms, len(scenario.params)))


def source_of(scenario: Scenario, size: int, step: int, index: int) -> int:
    """Return the place of the rank that scatters; where rank 0 goes first, or the same is sent again and again, the first."""
    return (
        (step + index) % size
        if scenario.order == "free" and "constant" not in scenario.steps
        else 0
    )


def sent(scenario: Scenario, size: int, place: int, step: int, index: int) -> list[tuple[int, int]]:
    """Return the messages that a rank hands in, as places (from, to), in their order; one goes to all, where all get the same."""
    collective = scenario.options[0]
    if collective == "all_gather":
        return [(place, 0)]
    if collective == "scatter" and place != source_of(scenario, size, step, index):
        return []
    return [(place, to) for to in range(size)]


def received(
    scenario: Scenario, size: int, place: int, step: int, index: int
) -> list[tuple[int, int]]:
    """Return the messages that arrive at a rank, in their order."""
    collective = scenario.options[0]
    if collective == "scatter":
        return [(source_of(scenario, size, step, index), place)]
    return [(source, 0 if collective == "all_gather" else place) for source in range(size)]


def shape_of(scenario: Scenario, size: int, index: int, source: int, to: int) -> tuple[int, ...]:
    """Return the shape of a message. With uneven splits a rank sends as many rows in all as its peers, other ones to each: what
    splits evenly instead goes on with the rows of others."""
    shape, form = scenario.params[index].shape, form_of(scenario, index)
    if not form.endswith("splits"):
        return shape
    return (2 * ((source + to) % size) + (form == "splits"), *shape[1:])


@functools.lru_cache(maxsize=512)
def message(
    scenario: Scenario, size: int, step: int, index: int, source: int, to: int
) -> torch.Tensor:
    """Return what the rank in one place of its group sends to the one in another, in C order."""
    spec, kind, pair = scenario.params[index], scenario.steps[step], 16 * source + to
    shape, dtype = shape_of(scenario, size, index, source, to), getattr(torch, spec.dtype)
    count = math.prod(shape)
    if not dtype.is_floating_point:  # more bits than any narrow dtype has
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
        values = (
            values
            * 2.0 ** (2 * ((5 * source + 3 * to + step) % 4))
            * 2.0 ** (6 - 3 * (torch.arange(count) // 128 % 3))
        )
    return values.to(dtype).reshape(shape)

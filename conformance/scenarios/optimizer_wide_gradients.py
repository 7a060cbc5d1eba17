"""Gradients of another dtype than their weights, before the steps of an optimizer that averages.

With ``grad_dtype`` float32, torch accumulates the gradients of a weight of half precision in
float32; with None, in the dtype of the first one. torch.optim's SGD steps by such a gradient as it
is, and rounds the weight once. So its mean needs the bits and the range of its own dtype.

Bits. The gradient of element i on rank k is 2**e (c_ki + s_k W 2**n), with crafted values c of few
digits, and signs s that alternate and add up to 0 over the ranks. The weight's dtype holds c, and
not the sum: 2**n is so large that it rounds most of c away. The mean is that of c 2**e.

Range. The exponent e of a step is 0, or so large that float16 has infinities, or so small that it
has zeros. The learning rate of the step is 2**-e, as if it undid a scale of the loss, so that all
steps move weights by about as much. All numbers are drawn from the session's seed.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import PLAIN, Setting
from conformance.scenarios.seeds import generator

WIDE = replace(
    PLAIN,
    name="optimizer_wide_gradients",
    summary="gradients have another dtype than their weights, by grad_dtype, and values that the "
    "weights' dtypes do not hold: digits that cancel between ranks, large and tiny ones",
    steps=("crafted",) * 7,
    world_sizes=(2,),
    variant="wide_gradients",
)

# The exponents of steps. Crafted values lie between 2**-3 and 2**8.
_LARGE = (14, 26)
_TINY = (-36, -28)
# The exponents of the numbers that cancel, by the dtypes of gradients. Half precision has 11 bits
# or less, float32 has 24: a weight's dtype rounds numbers of this size by 2**5 or more.
_CANCEL = {"float32": (15, 17), "float64": (32, 38)}


@dataclass(frozen=True)
class Widened:
    """The gradients of one parameter.

    Attributes:
        dtype: of the gradients.
        takes_any: whether ``grad_dtype`` is None, and not that dtype.
    """

    dtype: str
    takes_any: bool


def widened(scenario: Scenario, index: int) -> Widened | None:
    """Return the dtype of a parameter's gradients, or None if it is the parameter's own."""
    if scenario.variant != WIDE.variant:
        return None
    draw = generator(scenario, f"p{index}")
    is_half = scenario.params[index].dtype != "float32"
    dtype = "float32" if is_half and draw.random() < 0.75 else "float64"
    # One parameter at least takes any dtype, and one at least has a dtype.
    first, second = generator(scenario, "any").sample(range(len(scenario.params)), 2)
    takes_any = index == first or (index != second and draw.random() < 0.3)
    return Widened(dtype, takes_any)


def factor_and_shift(
    scenario: Scenario, step: int, index: int, place: int, size: int
) -> tuple[float, float]:
    """Return the factor of the crafted gradient of a rank, and the number that is added to it.

    Args:
        place: of the rank in its group.
        size: of the group. If it is odd, nothing is added on the last rank.
    """
    wide = widened(scenario, index)
    if wide is None:
        return 1.0, 0.0
    exponent = _exponents(scenario)[step]
    if place == size - 1 and size % 2:
        return 2.0**exponent, 0.0
    draw = generator(scenario, f"cancel p{index} in {step}")
    added = size * 2.0 ** draw.randint(*_CANCEL[wide.dtype])
    sign = draw.choice((-1, 1)) * (-1) ** place
    return 2.0**exponent, sign * added * 2.0**exponent


@lru_cache(maxsize=64)
def _exponents(scenario: Scenario) -> tuple[int, ...]:
    """Return the exponents of all steps: three zeros, two large and two tiny ones."""
    draw = generator(scenario, "exponents")
    exponents = [0] * 3 + [draw.randint(*range_) for range_ in (_LARGE, _LARGE, _TINY, _TINY)]
    draw.shuffle(exponents)
    return tuple(exponents)


def setting_of_wide(scenario: Scenario) -> Setting:
    """Return the learning rates of all steps; each step is judged from the one before it."""
    share = generator(scenario, "rate").uniform(0.05, 0.1)
    rates = tuple(share * 2.0**-exponent for exponent in _exponents(scenario))
    return Setting(options={"lr": rates[0], "momentum": 0.0}, rates=rates)


def _draw_dtypes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the dtypes of the weights; each of the three dtypes has one at least."""
    dtypes = ["float16", "bfloat16", "float32"]
    dtypes += numbers.choices(dtypes, k=len(scenario.params) - len(dtypes))
    numbers.shuffle(dtypes)
    params = zip(scenario.params, dtypes, strict=True)
    return replace(scenario, params=tuple(replace(spec, dtype=dtype) for spec, dtype in params))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {WIDE.name: _draw_dtypes}

"""Dtypes of parameters and of their gradients.

Parameters of half precision are beside others in runs of all kinds: a strategy may have buffers of
float32 for their gradients, and has to treat these as the gradients whenever a step ends.

Other parameters have gradients of another dtype, by ``torch.Tensor.grad_dtype``.

With ``grad_dtype`` float32, torch accumulates the gradients of a parameter of bfloat16 in float32;
with None, in the dtype of the first one. The dtypes of a scenario's ``params`` are those of the
gradients. Between two steps a trainer may change the dtype: some gradients have that of their
parameter in the first steps, as while a step has one micro-batch, and in drawn steps later.

Wider gradients are scaled by powers of two in drawn steps, as by a loss scale: they are beyond the
range of the parameter's dtype, or below its least number.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy import KEPT, RAISES, SUBGROUPS
from conformance.scenarios.strategy_training import (
    ABANDONED,
    AFTER_WORLD,
    EMPTY,
    GRADIENT_DTYPES,
    LARGE_DTYPES,
    LONG,
    PASSES,
    RECOVERED,
    REWRAPPED,
    TWO,
    UNFROZEN,
)

_DTYPES = ("float16", "bfloat16", "float32")
_HALVES = _DTYPES[:2]
_BESIDE_HALVES = (*_DTYPES, "float64")


# The steps in which all gradients have the dtypes of ``params``, at the end of a run: one without a
# scale, one with a large one, and one with a small one.
_WIDE_AT_LAST = 3

# The exponents of large scales, by the dtypes of the gradient and of the parameter; small ones are
# their negatives. Gradients of float32 and parameters of bfloat16 have one range.
_SCALES = {
    ("float32", "float16"): (40, 80),
    ("float64", "float16"): (40, 600),
    ("float64", "bfloat16"): (170, 600),
    ("float64", "float32"): (170, 600),
}

# Scenarios with parameters of half precision beside others.
_WITH_HALVES = frozenset(
    one.name
    for one in (
        *(KEPT, RAISES, ABANDONED, EMPTY, LONG, PASSES, RECOVERED, TWO, UNFROZEN),
        *(SUBGROUPS, AFTER_WORLD, REWRAPPED),
    )
)


def has_halves(scenario: Scenario) -> bool:
    """Whether drawn parameters of a scenario have half precision."""
    return scenario.name in _WITH_HALVES


def with_halves(scenario: Scenario) -> Scenario:
    """Return a scenario with drawn parameters of drawn dtypes, if it is one that has them.

    One at least has half precision, and the first one has float32. Crafted values are exact in
    half precision, too, on two ranks and in steps of up to four micro-batches.
    """
    if not has_halves(scenario):
        return scenario
    draws = generator(scenario, "dtypes")
    params = list(scenario.params)
    others = range(1, len(params))
    half, *more = draws.sample(others, draws.randint(2, len(others)))
    params[half] = replace(params[half], dtype=draws.choice(_HALVES))
    for index in more:
        params[index] = replace(params[index], dtype=draws.choice(_BESIDE_HALVES))
    return replace(scenario, params=tuple(params))


@dataclass(frozen=True)
class Held:
    """A parameter whose gradients have another dtype than its own in some steps, or in all.

    Attributes:
        dtype: of the parameter.
        takes_any: whether its ``grad_dtype`` is None, and not the dtype of its gradients.
    """

    dtype: str
    takes_any: bool


def held_in(scenario: Scenario, index: int) -> Held | None:
    """Return the dtype of a parameter if its gradients have another one, or None.

    The first parameter has bfloat16, and the second float16; the dtypes of others are drawn. Large
    ones have half precision.
    """
    if scenario.variant != GRADIENT_DTYPES.variant:
        return None
    if index == 0:
        return Held("bfloat16", takes_any=False)
    if index == 1 and scenario.name != LARGE_DTYPES.name:
        return Held("float16", takes_any=False)
    draws = generator(scenario, f"p{index}")
    dtype = draws.choice(_HALVES if scenario.name == LARGE_DTYPES.name else _DTYPES)
    takes_any = draws.random() < 0.3
    return None if dtype == scenario.params[index].dtype else Held(dtype, takes_any)


def gradient_spec(scenario: Scenario, step: int, index: int) -> Param:
    """Return a parameter with the dtype and the scale of its gradients in a step."""
    spec = scenario.params[index]
    held = held_in(scenario, index)
    if held is None:
        return spec
    if step in narrow_steps(scenario, index):
        return replace(spec, dtype=held.dtype)
    return replace(spec, exponent=_exponent(scenario, step, index, (spec.dtype, held.dtype)))


def _exponent(scenario: Scenario, step: int, index: int, dtypes: tuple[str, str]) -> int:
    """Return the exponent of the scale of a wider gradient, or 0; large ones have none."""
    if dtypes not in _SCALES or scenario.name == LARGE_DTYPES.name:
        return 0
    signs = [0, 1, -1]
    generator(scenario, f"scales p{index}").shuffle(signs)
    draws = generator(scenario, f"scale {step} p{index}")
    before_end = len(scenario.steps) - step
    sign = signs[before_end - 1] if before_end <= _WIDE_AT_LAST else draws.choice(signs)
    return sign * draws.randint(*_SCALES[dtypes])


@lru_cache(maxsize=256)
def narrow_steps(scenario: Scenario, index: int) -> frozenset[int]:
    """Return the steps in which the gradients of a parameter have the parameter's own dtype.

    These are the first steps, a drawn number, and some later ones; for the first parameter, and
    for a drawn half of the others.
    """
    if scenario.variant != GRADIENT_DTYPES.variant:
        return frozenset()
    draws = generator(scenario, f"narrow p{index}")
    if index and draws.random() < 0.5:
        return frozenset()
    end = len(scenario.steps) - _WIDE_AT_LAST
    first = draws.randint(1, max(1, end - 1))
    later = (step for step in range(first + 1, end) if draws.random() < 0.25)
    return frozenset((*range(first), *later))

"""Dtypes of the parameters whose gradients have another one, by ``torch.Tensor.grad_dtype``.

With ``grad_dtype`` float32, torch accumulates the gradients of a parameter of bfloat16 in float32;
with None, in the dtype of the first one. The dtypes of a scenario's ``params`` are those of the
gradients.
"""

from dataclasses import dataclass

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy_training import GRADIENT_DTYPES

_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Held:
    """A parameter whose gradients have another dtype than its own.

    Attributes:
        dtype: of the parameter.
        takes_any: whether its ``grad_dtype`` is None, and not the dtype of its gradients.
    """

    dtype: str
    takes_any: bool


def held_in(scenario: Scenario, index: int) -> Held | None:
    """Return the dtype of a parameter if its gradients have another one, or None.

    The first parameter has bfloat16 and gradients of float32; the dtypes of others are drawn.
    """
    if scenario.variant != GRADIENT_DTYPES.variant:
        return None
    if index == 0:
        return Held("bfloat16", takes_any=False)
    draws = generator(scenario, f"p{index}")
    dtype = draws.choice(_DTYPES)
    takes_any = draws.random() < 0.3
    return None if dtype == scenario.params[index].dtype else Held(dtype, takes_any)

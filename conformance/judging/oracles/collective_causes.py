"""Known mistakes of quantized collectives, for the likely cause of a failure."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from conformance.judging.oracles.allowed_values import Allowed
from conformance.scenarios.collective_training import UNEVEN_PARTS
from conformance.scenarios.model import Scenario

# The likely cause of wrong values in a call of this form.
_IGNORED = {
    "positional": "an argument is not seen if it is given by position",
    "keywords": "an argument is not seen if it is given by keyword",
    "group_src": "group_src is ignored",
    "splits": "the split sizes are ignored",
    "positional_splits": "the split sizes are ignored",
}


def ignored(scenario: Scenario, form: str) -> str:
    """Return the likely cause of wrong values in a call of a form, or in calls of a scenario."""
    if scenario.variant == UNEVEN_PARTS:
        return "sizes are ignored, or those of another call or of other parts are taken"
    of_group = "the group is ignored, or ranks in the group are taken for global ranks"
    return _IGNORED.get(form, of_group if scenario.groups else "")


def nothing_written(event: Mapping[str, Any]) -> str:
    """Return the likely cause of an output that is not written in a recorded call."""
    use = event.get("use_of_lists")
    if not use:
        return "nothing is written"
    return f"nothing is written: the caller's list is read in wait(), after it is {use}"


def lost_value(sent: float, got: float) -> str:
    """Return how a special value is lost."""
    if math.isnan(sent):
        return "NaN is lost"
    if math.isinf(sent):
        return "an infinity is lost"
    return "subnormal values are flushed to zero" if got == 0 else ""


def mistaken(allowed: Allowed, loss: float) -> dict[str, torch.Tensor]:
    """Return the results of known mistakes with a message, by their names."""
    exact = allowed.exact
    known = {"the sent values arrive unrounded": exact}
    if loss != 1.0:
        known["it is divided twice"] = exact / loss
        known["it is multiplied by the factor"] = exact * loss * loss
    if allowed.two_values:
        known["it is rounded to bfloat16"] = exact.bfloat16().double()
        known["it is rounded toward zero"] = _toward_zero(exact)
    return known


def _toward_zero(values: torch.Tensor) -> torch.Tensor:
    """Return values rounded to float16 toward zero."""
    nearest = values.half()
    is_beyond = nearest.double().abs() > values.abs()
    nearer_zero = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(is_beyond, nearer_zero, nearest).double()

"""A state may hold the weights that training goes on with while a model is evaluated."""

from typing import Any

import pytest
import torch

from conformance.ranks.drivers._equal_states import same_state
from conformance.ranks.drivers._evaluated_averages import Backups

WEIGHTS = [torch.tensor([1.0, 2.0]), torch.tensor([3.0], dtype=torch.bfloat16)]
AVERAGES = [torch.tensor([0.5, 1.5]), torch.tensor([2.5], dtype=torch.bfloat16)]
WIDE = [average.float() for average in AVERAGES]
OLDER = [torch.tensor([0.0, 1.0]), torch.tensor([2.0], dtype=torch.bfloat16)]


def state(averages: list[torch.Tensor], weights: list[torch.Tensor] | None) -> dict[str, Any]:
    return {"updates": 3, "averages": averages, "weights": weights}


@pytest.mark.parametrize(
    ("before", "within", "is_same"),
    [
        (state(WIDE, None), state(WIDE, None), True),
        (state(WIDE, None), state(WIDE, WEIGHTS), True),
        (state(WIDE, OLDER), state(WIDE, WEIGHTS), True),
        (state(WIDE, None), state(WIDE, OLDER), False),
        (state(WIDE, None), state([weight.float() for weight in WEIGHTS], None), False),
        (state(WIDE, WEIGHTS), state(WEIGHTS, WIDE), False),
        (state(WIDE, None), state(WIDE, None) | {"updates": 4}, False),
    ],
)
def test_weights_may_be_kept_aside_and_averages_stay(
    before: Any, within: Any, is_same: bool
) -> None:
    assert same_state(within, before, Backups(WEIGHTS, AVERAGES).accepts) is is_same

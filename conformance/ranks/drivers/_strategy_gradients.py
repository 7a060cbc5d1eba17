"""The gradients of a sync strategy's micro-batches."""

from collections.abc import Sequence

import torch

from conformance.ranks.models.probe import scripted_gradients
from conformance.scenarios.averager_training import special_source
from conformance.scenarios.averager_values import Source, values_of
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.strategy_schedule import (
    fails_and_goes_on,
    has_forward_alone,
    multiple_in,
    uses,
)

Grads = list[torch.Tensor | None]


def gradients_of(
    scenario: Scenario,
    specs: tuple[Param, ...],
    ranks: Sequence[int],
    place: int,
    part: tuple[int, int],
    device: torch.device,
) -> Grads:
    """Return the gradients of a micro-batch; None for the parameters that it does not use.

    Args:
        scenario: the scenario.
        specs: its parameters, with the dtypes of their gradients.
        ranks: the global ranks of the group.
        place: the rank's number within the group.
        part: the step and the micro-batch.
        device: the device of the gradients.
    """
    step, batch = part
    size = len(ranks)
    kind = scenario.steps[step]
    factor = multiple_in(scenario, size, step, batch)
    source = ranks[special_source(scenario, step, place, size)]
    every = scripted_gradients(
        specs, "crafted" if kind == "limit" else kind, size, source, step, device
    )
    # What a forward is given, if no backward follows, or none that comes to its end.
    is_given = fails_and_goes_on(scenario, step) == batch or has_forward_alone(
        scenario, size, place, step, batch
    )
    grads: Grads = []
    for index, grad in enumerate(every):
        spec = scenario.params[index]
        is_used = is_given or uses(scenario, size, place, step, batch, index, ranks[0])
        if kind == "limit" and spec.dtype == "float16":
            grad = values_of(Source("limit", source, step), spec, size, index).to(device)
        grads.append(grad * factor if grad is not None and is_used else None)
    return grads

"""The parameters that each micro-batch of a step uses."""

from conformance.scenarios.gradients import REPEATED
from conformance.scenarios.model import DRAINING, Scenario
from conformance.scenarios.random_numbers import integers

_IN_ALL = 2  # parameters that each micro-batch uses


def micro_batches_with(
    scenario: Scenario, rank: int, step: int, param: int, kind: str
) -> list[bool]:
    """Return for each micro-batch of a step whether its forward uses a parameter that the rank uses
    in that step, if parameters are left out: as an expert that some of them are routed to.

    At least one does. Each has the first two parameters, so that its backward has something to do:
    all ranks use one of them in every step (``gradients.uses``).

    Args:
        scenario: the scenario.
        rank: the number of the rank within its group.
        step: the number of the step for the inputs.
        param: the index of the parameter.
        kind: the kind of gradients. If it is the same at every step, the micro-batches are, too.
    """
    count = len(scenario.microbatch_weights)
    all_use = count == 1 or not scenario.ddp.find_unused_parameters
    if all_use or kind in DRAINING or param < _IN_ALL:
        return [True] * count
    key = (rank, 0 if kind in REPEATED else step, param, 97)
    chosen = 1 + int(integers(1, 2**count - 1, key))
    return [bool(chosen >> number & 1) for number in range(count)]


def factor_of_step(scenario: Scenario, rank: int, step: int, param: int, kind: str) -> int:
    """Return the sum of the weights of the micro-batches that use a parameter; the arguments are
    those of :func:`micro_batches_with`.
    """
    using = micro_batches_with(scenario, rank, step, param, kind)
    return sum(w for w, uses in zip(scenario.microbatch_weights, using, strict=True) if uses)

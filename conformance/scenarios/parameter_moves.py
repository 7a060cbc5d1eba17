"""Amounts by which the parameters of a long run move after each step, as data.

The trainer's optimizer makes no step in a long run, so that parameters would be the same in all
steps and on all ranks: an average of parameters, or a step towards values from some steps before,
would change nothing. So the kit changes them itself, after each step, as an optimizer does:

    amounts    normal values, others in each step; their deviation is 2**-8 to 2**-3, drawn from the
               session's seed
    ranks      the same amounts on all ranks; under local claims each rank has its own from the
               first step after the warm-up on, as replicas that step by their own gradients

Before the first step, parameters have the same values on all ranks, as DDP leaves them. Parameters
that the hook steps (``fused``) are left to it.
"""

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

_BITS = (3, 8)


def deviation(scenario: Scenario) -> float:
    """Return the deviation of the amounts of a long run."""
    return float(2.0 ** -generator(scenario, "moves").uniform(*_BITS))


def has_own_amounts(scenario: Scenario, step: int) -> bool:
    """Whether each rank has amounts of its own after a step of a long run."""
    long_run = scenario.long_run
    return long_run.moves_apart and step >= long_run.warm_up


def seed_of_amounts(scenario: Scenario, rank: int | None) -> int:
    """Return the seed of the amounts of a rank; None for those of all ranks."""
    return generator(scenario, f"moves of {rank}").getrandbits(62)

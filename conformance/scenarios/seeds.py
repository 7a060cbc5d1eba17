"""The generators of a scenario's drawn numbers."""

import random

from conformance.scenarios.model import Scenario


def generator(scenario: Scenario, purpose: str = "") -> random.Random:
    """Return the generator of a scenario's numbers.

    Args:
        scenario: the scenario, with its ``session_seed``.
        purpose: distinguishes several draws for one scenario.
    """
    return random.Random(f"{scenario.session_seed}/{scenario.name}/{purpose}")


def shared_generator(scenario: Scenario, purpose: str = "") -> random.Random:
    """Return a generator that a scenario shares with the one that continues from its saved state.

    That one has the name of the scenario, and ``_resumed`` behind it.
    """
    name = scenario.name.removesuffix("_resumed")
    return random.Random(f"{scenario.session_seed}/{name}/{purpose}")

"""Steps in which the trainer's optimizer has the gradients of DDP, as data.

The kit takes such a step back, and compares it (``ranks/models/optimizer_steps.py``), which takes
an eighth of the time of a small model's step. So it does that in some steps of a run with few of
them: in the first two, and in a drawn quarter of the others.
"""

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

_FIRST = 2
_SHARE = 1 / 4


def is_taken_back(scenario: Scenario, step: int) -> bool:
    """Whether the optimizer steps with gradients; otherwise it has some that change no bit."""
    return step < _FIRST or generator(scenario, f"taken back: {step}").random() < _SHARE

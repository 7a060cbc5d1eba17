"""Exceptions that end a step of training early, beside errors. Code that handles ``Exception``
alone misses most, and code that names those it knows misses ``BaseException``: it stands for those
of other libraries, such as ``asyncio.CancelledError``.
"""

import random

from conformance.scenarios.model import Scenario

INTERRUPTS = (
    "KeyboardInterrupt",
    "SystemExit",
    "StopIteration",
    "GeneratorExit",
    "BaseException",
)

INTERRUPTS_OF_FORWARDS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit", "BaseException")
"""Without StopIteration, which torch's own checkpoints, generators, make a RuntimeError."""

ERROR = "ArithmeticError"
"""An ordinary error, which is an ``Exception``."""

OUT_OF_MEMORY = "OutOfMemoryError"
"""The error of torch that has this name; other names are Python's."""

CAUGHT = (OUT_OF_MEMORY, "RuntimeError", "ValueError", "FloatingPointError", ERROR)
"""Errors that trainers catch, to skip a micro-batch: those of memory, of a device, of bad data and
of a loss that is not finite.
"""


def drawn_interrupts(scenario: Scenario, names: tuple[str, ...] = INTERRUPTS) -> list[str]:
    """Return names of exceptions of Python's in an order that the session's seed decides."""
    numbers = random.Random(f"{scenario.session_seed}/{scenario.name}/interrupts")
    return numbers.sample(names, len(names))

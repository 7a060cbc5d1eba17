"""The scenarios for joins in the loops of real programs: settings, groups, nested contexts.

The contexts are drawn (``join_loop_draws.py``).
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.joinable import PLAIN
from conformance.scenarios.model import Param, Scenario

MODES = replace(
    PLAIN,
    name="joinable_modes",
    summary="nine contexts, some with DDP, whose modules are in drawn modes of training, and some "
    "under other settings of torch; two end with an exception, and one is disabled",
    params=(Param((5, 3)),),
    variant="modes",
    world_sizes=(2,),
)

ALL = (MODES,)

DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {}

"""The scenarios for joins in the loops of real programs: settings, groups, nested contexts.

The contexts are drawn (``join_loop_draws.py``).
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.join_loop_draws import draw_groups
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

TWO_GROUPS = replace(
    PLAIN,
    name="joinable_two_groups",
    summary="contexts on WORLD and on fewer ranks in turn; one throws; then a context "
    "within another one on the other group; the ranks, the order and the numbers of inputs are "
    "drawn",
    variant="two_groups",
    size=3,
    twin_groups=((0, 2),),
)

ENTERED = replace(
    PLAIN,
    name="joinable_entered",
    summary="one context object is entered four or five times, with drawn numbers of inputs; an "
    "exception ends one of them",
    variant="entered",
    world_sizes=(2, 3),
)

ALL = (MODES, TWO_GROUPS, ENTERED)

DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {TWO_GROUPS.name: draw_groups}

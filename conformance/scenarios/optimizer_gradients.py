"""The gradients of optimizer wrappers: which rank has one for a parameter, at which step.

The ranks that run a scenario and the rules that judge it both call these functions. ``place`` is a
rank's number within its group.
"""

import random
from collections.abc import Mapping

from conformance.scenarios.gradients import uses
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import UNUSED
from conformance.scenarios.optimizer_backwards import is_in_half, is_left_out
from conformance.scenarios.optimizer_clipping import CLIPPED, lacks_gradient
from conformance.scenarios.optimizer_closures import CLOSURE_IN_PARTS
from conformance.scenarios.optimizer_in_half import lacks_gradient_in_half
from conformance.scenarios.optimizer_late_training import is_trained_late
from conformance.scenarios.optimizer_loops import RESET, trained_late
from conformance.scenarios.optimizer_repeats import is_repeated
from conformance.scenarios.optimizer_rests import rests, rests_at, rests_in_place
from conformance.scenarios.optimizer_states import SCALED
from conformance.scenarios.optimizer_training import EMPTY, FROZEN, UNFROZEN, kept_plan

# Each rank has gradients of other parameters.
_UNUSED = (UNUSED.variant, CLOSURE_IN_PARTS.variant)
# Others are frozen, or thawed, before a backward.
_FROZEN_LATE = tuple(sorted(set(range(len(EMPTY.params))) - {FROZEN, UNFROZEN}))


def first_kind(scenario: Scenario) -> str:
    """Return the kind of the first values of parameters.

    They are zeros if dtypes differ, so that steps are exact in all of them, or if steps are
    clipped, or repeated or accumulated in half precision, so that small differences show.
    """
    is_zero = scenario.variant in ("dtypes", "special", CLIPPED.variant)
    is_half = is_repeated(scenario) or is_in_half(scenario)
    return "zero_all" if is_zero or is_half else "crafted"


def is_frozen(scenario: Scenario, step: int, index: int) -> bool:
    """Whether a parameter requires no gradient at a step."""
    if rests(scenario):
        return rests_at(scenario, step, index, frozen=True)
    if is_trained_late(scenario, step, index, frozen=True):
        return True
    if scenario.variant == RESET.variant:
        first_step, late = trained_late(scenario)
        return index in late and step < first_step
    if scenario.variant != EMPTY.variant:
        return False
    frozen_late = freezes_late(scenario)
    if index in frozen_late:
        return step in frozen_late[index][1:]
    changed = step >= random.Random(f"{scenario.session_seed}/frozen").randint(2, 8)
    return (index == FROZEN and changed) or (index == UNFROZEN and not changed)


def freezes_late(scenario: Scenario) -> Mapping[int, range]:
    """Return parameters that are frozen between a backward and its step, by their numbers.

    The first of a parameter's steps is that one; until the last of them it stays frozen.
    """
    if scenario.variant != EMPTY.variant:
        return {}
    draw = random.Random(f"{scenario.session_seed}/frozen late")
    firsts = {index: draw.randint(1, 7) for index in _FROZEN_LATE}
    return {index: range(first, first + draw.randint(2, 4)) for index, first in firsts.items()}


def has_gradient(scenario: Scenario, size: int, place: int | None, step: int, index: int) -> bool:
    """Whether a rank has a gradient for a parameter.

    Args:
        size: of the rank's group.
        place: of the rank in its group; None for any rank of the group.
    """
    if is_frozen(scenario, step, index) or _lacks_gradient(scenario, step, index):
        return False
    places = range(size) if place is None else (place,)
    return any(
        not is_empty(scenario, step, other, size)
        and not rests_in_place(scenario, step, index, other, size)
        and (scenario.variant not in _UNUSED or uses(size, other, step, index))
        for other in places
    )


def _lacks_gradient(scenario: Scenario, step: int, index: int) -> bool:
    """Whether no rank has a gradient for a parameter at a step, although it requires one."""
    if rests(scenario):
        return rests_at(scenario, step, index, frozen=False)
    if is_trained_late(scenario, step, index, frozen=False):
        return True
    if lacks_gradient(scenario, step, index) or lacks_gradient_in_half(scenario, step, index):
        return True
    if scenario.variant != SCALED.variant:
        return is_left_out(scenario, step, index)
    scaling = kept_plan(scenario).scaling
    return scaling is not None and scaling.lacking.get(step) == index


def is_empty(scenario: Scenario, step: int, place: int, size: int) -> bool:
    """Whether a rank has no gradient at all at a step; in about two of three steps one has none."""
    if scenario.variant != EMPTY.variant:
        return False
    draw = random.Random(f"{scenario.session_seed}/empty/{step}")
    return place == draw.randrange(3 * size) % (2 * size)

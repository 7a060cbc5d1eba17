"""Micro-batches that end by an exception, after which a step goes on, as data.

A micro-batch that runs out of memory may have made some gradients by then: those of the first of
two losses, of the first of two passes, or of the layers that a backward has come to. They are in
``.grad`` on all ranks, and the trainer keeps them: the next synchronisation averages them, too.
"""

from collections.abc import Mapping

from conformance.scenarios.interrupts import CAUGHT, INTERRUPTS, OUT_OF_MEMORY
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

BEFORE = "before"  # before the backward: no gradient has been made
AFTER = "after"  # after the whole backward
BETWEEN = "between"  # after the backward of a first loss, in the forward of a second one
PARTED = "parted"  # after the first of two backwards through one output
WITHIN = "within"  # in the midst of a backward

_WAYS = (BEFORE, BETWEEN, PARTED, WITHIN)

RECOVERED = "recovered"
# The variant "recovered" if all micro-batches use all parameters.
RECOVERED_ALIKE = "recovered_alike"
# The variant "recovered" if no gradient is made before an exception.
RECOVERED_EARLY = "recovered_early"
VARIANTS = (RECOVERED, RECOVERED_ALIKE, RECOVERED_EARLY)

# A step has the parameters of each kind.
_ALWAYS, _BEFORE_IT, _AFTER_IT, _BY_RANK, _IN_IT_ALONE = range(5)

# A scenario with buffers, in which one step goes on after an exception, and one is given up.
WITH_BUFFERS = "strategy_buffers"
# Its numbers of micro-batches, in turn.
BATCHES_WITH_BUFFERS = (2, 4, 1)

_COME_AGAIN = 2  # steps


def comes_again(scenario: Scenario, step: int) -> bool:
    """Whether the last micro-batch of a step breaks off, and comes again as the last one.

    It is so in two steps, which are drawn. A strategy may average in the backward of that
    micro-batch, so that it breaks off before.
    """
    return scenario.variant in VARIANTS and step in _steps_with_two_ends(scenario)


def failed_with_buffers(scenario: Scenario) -> Mapping[int, int]:
    """Return the step that goes on after an exception, and the micro-batch that fails before its
    backward, if the model has buffers.

    The step is drawn, and another one than the last.
    """
    draws = generator(scenario, "a failure with buffers")
    given_up = given_up_with_buffers(scenario)
    steps = [step for step in _accumulating(scenario, 0, 1) if step not in given_up]
    step = draws.choice(steps)
    return {step: draws.randrange(_number_with_buffers(step) - 1)}


def given_up_with_buffers(scenario: Scenario) -> Mapping[int, int]:
    """Return the step that is given up, and the number of micro-batches before that, if the model
    has buffers.

    The step is drawn: two whole ones follow it at least, and one comes before.
    """
    draws = generator(scenario, "given up with buffers")
    step = draws.choice(_accumulating(scenario, 1, 2))
    return {step: draws.randrange(1, _number_with_buffers(step))}


def _number_with_buffers(step: int) -> int:
    return BATCHES_WITH_BUFFERS[step % len(BATCHES_WITH_BUFFERS)]


def _accumulating(scenario: Scenario, first: int, after: int) -> list[int]:
    """Return the steps with several micro-batches, but for some at the begin and at the end."""
    steps = range(first, len(scenario.steps) - after)
    return [step for step in steps if _number_with_buffers(step) > 1]


def place_among_breaks(scenario: Scenario, step: int) -> int:
    """Return the number of a step among those in which another micro-batch than the last breaks
    off.
    """
    return step - sum(other < step for other in _steps_with_two_ends(scenario))


def way_of_break(scenario: Scenario, step: int) -> str:
    """Return how a micro-batch breaks off; the step goes on.

    Of the steps in which it is not the last one, two neighbours have each way: in one of them the
    first micro-batch breaks off.
    """
    if scenario.variant != RECOVERED or comes_again(scenario, step):
        return BEFORE
    return _drawn_ways(scenario)[place_among_breaks(scenario, step) // 2]


def drawn_error(scenario: Scenario, step: int) -> str:
    """Return the name of the exception of a step.

    Of the ways that make gradients, one has an error of memory, one has another error that trainers
    catch, and one any exception. The way that makes none has an error that trainers catch.
    """
    way = BEFORE
    if not comes_again(scenario, step):
        way = _drawn_ways(scenario)[place_among_breaks(scenario, step) // 2]
    with_gradients = [one for one in _WAYS if one != BEFORE]
    of_memory, of_others, _ = generator(scenario, "error").sample(with_gradients, 3)
    if way == of_memory:
        return OUT_OF_MEMORY
    draws = generator(scenario, f"error {step}")
    if way == of_others:
        return draws.choice([one for one in CAUGHT if one != OUT_OF_MEMORY])
    return draws.choice(CAUGHT if way == BEFORE else (*CAUGHT, *INTERRUPTS))


def uses_around_break(
    scenario: Scenario, broken: int, place: int, step: int, batch: int, index: int
) -> bool:
    """Whether the micro-batch of a rank makes a gradient, in a step that goes on after a break.

    Of five parameters one is used in all micro-batches, one before the broken one alone, one after
    it alone, and one in it alone; a drawn part of the micro-batches of each rank uses the last one.
    The broken one makes gradients of the last two kinds, and drawn ones of the first.

    Args:
        scenario: the scenario.
        broken: the micro-batch that breaks off.
        place: the rank's number within the group.
        step: the step.
        batch: the micro-batch of the step.
        index: the parameter.
    """
    if batch == broken and way_of_break(scenario, step) == BEFORE:
        return False
    kind = (index + generator(scenario, f"kinds {step}").randrange(5)) % 5
    if kind == _BY_RANK:
        return generator(scenario, f"{step}/{batch}/p{index} of {place}").random() < 0.5
    if batch == broken:
        in_it = generator(scenario, f"{step}/p{index} in the broken one").random() < 0.5
        return kind == _IN_IT_ALONE or (kind == _ALWAYS and in_it)
    by_kind = {_BEFORE_IT: batch < broken, _AFTER_IT: batch > broken, _IN_IT_ALONE: False}
    return by_kind.get(kind, True)


def _steps_with_two_ends(scenario: Scenario) -> list[int]:
    return generator(scenario, "two ends").sample(range(len(scenario.steps)), _COME_AGAIN)


def _drawn_ways(scenario: Scenario) -> tuple[str, ...]:
    ways = list(_WAYS)
    generator(scenario, "ways").shuffle(ways)
    return tuple(ways)

"""The parameters that micro-batches use in steps of two models, and of models on two subgroups, as
data.

A strategy may note which gradients the micro-batches of a step have made, or ask the other ranks
which they have. Such notes belong to one model, and such a vote to its group.
"""

from functools import lru_cache

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

TWO_MODELS = "two_models"
# The variant TWO_MODELS if all micro-batches use all parameters.
TWO_ALIKE = "two_models_alike"
BY_GROUP = "by_group"
# The last two parameters are large ones of one size.
LARGE_TWINS = "large_twins"

# Micro-batches of a step with two: both, the first or the last one alone.
_ALWAYS, _FIRST_ALONE, _LAST_ALONE = range(3)

# Which groups lack a gradient in a step.
_BOTH, _FIRST, _SECOND, _NEITHER = range(4)


def models_of(scenario: Scenario) -> int:
    """Return the number of models; each has every second step if there are two."""
    return 2 if scenario.variant in (TWO_MODELS, TWO_ALIKE) else 1


def uses_of_two(scenario: Scenario, step: int, batch: int, index: int) -> bool:
    """Whether a micro-batch uses a parameter, if two models take turns.

    The last micro-batch of one model comes between the two of the other one. In every step some
    parameters are used before alone, and some after it alone. All ranks use the same ones: if
    contexts are nested, a strategy may average in a backward, or at the end, by their number.

    Args:
        scenario: the scenario.
        step: the step, which is that of one model.
        batch: the micro-batch of the step.
        index: the parameter.
    """
    kind = _kinds_of_two(scenario, step)[index]
    return {_FIRST_ALONE: batch == 0, _LAST_ALONE: batch > 0}.get(kind, True)


def fails_among_two(scenario: Scenario) -> tuple[int, int]:
    """Return the step, and the place among its micro-batches, at which one of two models has a
    micro-batch that raises an exception before its backward, and comes again.

    Both are drawn: the other model is in the midst of its step, and contexts are not nested.
    """
    draws = generator(scenario, "a failure of one of two")
    return 2 * draws.randrange(4), draws.choice((1, 2))


@lru_cache(maxsize=64)
def _kinds_of_two(scenario: Scenario, step: int) -> tuple[int, ...]:
    draws = generator(scenario, f"kinds {step}")
    every = [_ALWAYS, _FIRST_ALONE, _LAST_ALONE]
    kinds = [*every, *draws.choices(every, k=len(scenario.params) - len(every))]
    draws.shuffle(kinds)
    return tuple(kinds)


def uses_twin(scenario: Scenario, size: int, place: int, step: int, index: int) -> bool:
    """Whether a rank uses a parameter in a step, if each of two large ones is left out by another
    rank.

    Args:
        scenario: the scenario.
        size: the size of the group.
        place: the rank's number within the group.
        step: the step.
        index: the parameter.
    """
    number = index - len(scenario.params) + 2
    return number < 0 or place != (step + number) % size


def uses_in_group(scenario: Scenario, first_rank: int, place: int, step: int, index: int) -> bool:
    """Whether the micro-batches of a step on a rank use a parameter, if two groups have models.

    In a group that lacks gradients one to three parameters, which are drawn, are left out, each by
    one rank or by all of them. Both groups lack some in one step, one group alone in others, and
    neither in another one.

    Args:
        scenario: the scenario.
        first_rank: the first global rank of the group.
        place: the rank's number within the group.
        step: the step.
        index: the parameter.
    """
    lacking = _groups_that_lack(scenario)[step]
    # Groups of two have the first ranks 0 and 1.
    if lacking not in (_BOTH, _SECOND if first_rank else _FIRST):
        return True
    draws = generator(scenario, f"{step} of the group of {first_rank}")
    indices = draws.sample(range(len(scenario.params)), draws.randint(1, 3))
    if index not in indices:
        return True
    left_out_by = [draws.choice((None, 0, 1)) for _ in indices][indices.index(index)]
    return left_out_by is not None and left_out_by != place


@lru_cache(maxsize=64)
def _groups_that_lack(scenario: Scenario) -> tuple[int, ...]:
    draws = generator(scenario, "groups that lack gradients")
    every = [_BOTH, _FIRST, _SECOND, _NEITHER]
    kinds = [*every, *draws.choices(every, k=max(0, len(scenario.steps) - len(every)))]
    draws.shuffle(kinds)
    return tuple(kinds)

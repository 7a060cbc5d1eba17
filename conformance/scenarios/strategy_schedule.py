"""The micro-batches of a strategy's steps: how many there are, and what happens in each.

The functions define which parameters a micro-batch uses and how large its gradients are. The ranks
that run a scenario and the rules that judge it both call them. Here ``place`` is a rank's number
within its group.
"""

import random
from dataclasses import replace

from conformance.scenarios.averager_training import option, with_option
from conformance.scenarios.interrupts import CAUGHT, ERROR, INTERRUPTS, drawn_interrupts
from conformance.scenarios.model import Scenario
from conformance.scenarios.strategy_breaks import (
    BATCHES_WITH_BUFFERS,
    RECOVERED,
    RECOVERED_ALIKE,
    RECOVERED_EARLY,
    VARIANTS,
    WITH_BUFFERS,
    comes_again,
    drawn_error,
    failed_with_buffers,
    given_up_with_buffers,
    place_among_breaks,
    uses_around_break,
)
from conformance.scenarios.strategy_swaps import swap_of
from conformance.scenarios.strategy_uses import (
    BY_GROUP,
    LARGE_TWINS,
    TWO_MODELS,
    uses_in_group,
    uses_of_two,
    uses_twin,
)

# Numbers of micro-batches by variant; steps go through them in turn. Other variants have two.
_BATCHES = {
    "": (1,),
    "accumulated": (2, 4, 1),
    "microbatches": (4,),
    "claim": (4,),
    "four": (4,),
    "empty": (3,),
    "abandoned": (3,),
    RECOVERED: (3, 4),
    RECOVERED_ALIKE: (3, 4),
    RECOVERED_EARLY: (3, 4),
    "penalties": (2, 3),
    "penalties_by_forwards": (2, 3),
    "buffers": BATCHES_WITH_BUFFERS,
    "freezing": (2, 3),
}

_EXACT = 4  # micro-batches of a step whose sums can be exact

# The variants in which ranks or micro-batches use different parameters.
_DIFFERENT = (
    *("microbatches", "ranks", "combined", "claim", "together"),
    *("added", "turns", "swapped", "freezing", "unfrozen", TWO_MODELS, BY_GROUP),
)


# The variants in which an optimizer has no step() of the trainer's at first.
_WITHOUT_OWN_STEP = ("", "kept")

COUNTS = "counts"

# The variant "unfrozen" if all micro-batches use all parameters.
ZEROED = "zeroed"


def count_of(scenario: Scenario) -> int:
    """Return the micro-batches of each step that the strategy claims to count, or 0."""
    return int(option(scenario, COUNTS) or 0)


def counted(scenario: Scenario, number: str) -> Scenario:
    """Return a scenario for a strategy that counts micro-batches itself.

    Gradients near the limit of a dtype come in steps of a single micro-batch, which such a strategy
    does not have: ordinary ones take their place.

    Args:
        scenario: the scenario.
        number: the micro-batches of each step.
    """
    steps = tuple("normal" if kind == "limit" else kind for kind in scenario.steps)
    return with_option(replace(scenario, steps=steps), COUNTS, number)


def puts_own_steps(scenario: Scenario) -> frozenset[int]:
    """Return the steps before which the trainer puts a step() of its own on its optimizers.

    One of them is drawn. Another one is the first step, except in two scenarios: there a subject
    finds the method of the class.
    """
    draw = random.Random(f"{scenario.session_seed}/{scenario.name}/own steps")
    later = draw.randrange(1, max(2, len(scenario.steps)))
    return frozenset((later,) if scenario.variant in _WITHOUT_OWN_STEP else (0, later))


def batches(scenario: Scenario, step: int) -> int:
    """Return the number of micro-batches of a step."""
    if by_itself(scenario, step) or scenario.steps[step] == "limit":
        return 1
    if count := count_of(scenario):
        return count
    most = {"many": (5, 40), "together": (1, 9)}.get(scenario.variant)
    if most:
        return random.Random(f"{scenario.session_seed}/batches/{step}").randint(*most)
    numbers = _BATCHES.get(scenario.variant, (2,))
    return numbers[step % len(numbers)]


def by_itself(scenario: Scenario, step: int) -> bool:
    """Whether a step runs under DDP alone, without the subject."""
    return scenario.variant == "without" and step % 2 == 1


def clears(scenario: Scenario, step: int) -> bool:
    """Whether gradients are cleared before a step."""
    return scenario.variant != "kept" or step % 2 == 0


def clears_inside(scenario: Scenario, step: int) -> bool:
    """Whether they are cleared between the forward and the backward of the first micro-batch.

    If gradients become zeros, too, it is so in two to four steps, which are drawn.
    """
    if scenario.variant in ("unfrozen", ZEROED):
        draw = random.Random(f"{scenario.session_seed}/{scenario.name}/clears inside")
        later = range(1, len(scenario.steps))
        return step in draw.sample(later, draw.randint(2, 4))
    return scenario.variant == "accumulated" and step % 2 == 1


def raises_in(scenario: Scenario, step: int) -> int | None:
    """Return the micro-batch of a step in which an exception is raised, or None.

    That micro-batch is the last one of its step.
    """
    if scenario.variant != "raises":
        return None
    if step in (1, 2):
        return step - 1
    return _INTERRUPTED.index(step) % 2 if step in _INTERRUPTED else None


def raised_in(scenario: Scenario, step: int) -> str:
    """Return the name of the exception that is raised in a step (``scenarios/interrupts.py``)."""
    if scenario.variant in VARIANTS:
        return drawn_error(scenario, step)
    if scenario.variant != "raises":
        return _generator(scenario, step).choice((*CAUGHT, *INTERRUPTS))
    if step not in _INTERRUPTED:
        return ERROR
    return drawn_interrupts(scenario)[_INTERRUPTED.index(step) // 2]


# Steps in which an exception is raised that is no error, before a backward and after it in turn. A
# whole step follows each: another exception may put back what one has left.
_INTERRUPTED = range(4, 24, 2)


def abandoned_after(scenario: Scenario, step: int) -> int | None:
    """Return the number of micro-batches after which a step is given up, or None.

    Its last micro-batch never comes, and its gradients are cleared.
    """
    if scenario.name == WITH_BUFFERS and not count_of(scenario):
        return given_up_with_buffers(scenario).get(step)
    if scenario.variant != "abandoned":
        return None
    draw = _generator(scenario, 0)
    steps = draw.sample(range(len(scenario.steps) - 1), 2)
    number = draw.randint(1, 2)
    return number if step in steps else None


def fails_and_goes_on(scenario: Scenario, step: int) -> int | None:
    """Return the micro-batch in which an exception is raised, and after which the step goes on.

    A micro-batch that comes again counts as two. A strategy that counts may count the one that
    fails, or not.
    """
    if count_of(scenario):
        return None
    if scenario.variant == "long":
        draw = random.Random(f"{scenario.session_seed}/{scenario.name}/fails/{step}")
        return 0 if draw.random() < 0.2 else None
    if scenario.name == WITH_BUFFERS:
        return failed_with_buffers(scenario).get(step)
    if scenario.variant not in VARIANTS:
        return None
    if comes_again(scenario, step):
        return batches(scenario, step) - 2
    if (_generator(scenario).randrange(2) + place_among_breaks(scenario, step)) % 2:
        return 0
    return _generator(scenario, step, 0).randint(1, batches(scenario, step) - 2)


def is_last(scenario: Scenario, step: int, batch: int) -> bool:
    """Whether the strategy is given a micro-batch as the last one of its step."""
    return batch >= batches(scenario, step) - 1 - comes_again(scenario, step)


def is_judged(scenario: Scenario, step: int) -> bool:
    """Whether the gradients after a step are judged: the step has come to its end."""
    return raises_in(scenario, step) is None and abandoned_after(scenario, step) is None


def is_empty(scenario: Scenario, size: int, place: int, step: int, batch: int) -> bool:
    """Whether a rank has no backward in a micro-batch.

    In two steps, which are drawn, no rank has one in some micro-batch: in one step it is the last
    one, and in the other an earlier one. All ranks have left out a batch whose loss is not finite,
    or is too long for one of them. There is a forward then on drawn ranks, and none elsewhere.
    """
    if scenario.variant != "empty":
        return False
    idle_step, *skipping = _generator(scenario).sample(range(len(scenario.steps)), 3)
    if step == idle_step:
        # One rank has nothing to do in the whole step.
        return place == _generator(scenario, step).randrange(size)
    if step in skipping:
        last = batches(scenario, step) - 1
        skipped = last if step == skipping[0] else _generator(scenario, step).randrange(last)
        return batch == skipped
    return place == _generator(scenario, step, batch).randrange(2 * size)


def has_forward_alone(scenario: Scenario, size: int, place: int, step: int, batch: int) -> bool:
    """Whether a rank has a forward in a micro-batch without a backward on any rank.

    About half of the ranks have one there.
    """
    others = range(size)
    if not all(is_empty(scenario, size, other, step, batch) for other in others):
        return False
    return _generator(scenario, step, batch, place).random() < 0.5


def statistic(place: int, step: int, batch: int) -> float:
    """Return the value that a micro-batch adds to the statistics of a normalisation."""
    return float(64 * (place + 1) + 8 * step + batch)


# Before this step of two models each order of their micro-batches comes once.
_FIRST_NESTED = 8


def order_of_two(scenario: Scenario, step: int) -> list[tuple[int, int]]:
    """Return the order in which the micro-batches of two models come, as (model, micro-batch)."""
    # Every order in which both models are in the midst of a step comes once.
    orders = [(0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1), (1, 0, 1, 0)]
    _generator(scenario).shuffle(orders)
    order = orders[step // 2 % len(orders)]
    return [(model, order[:at].count(model)) for at, model in enumerate(order)]


def steps_before(scenario: Scenario) -> tuple[int, int]:
    """Return how many steps a network has on WORLD, and on other subgroups, before its last DDP."""
    draw = _generator(scenario)
    return draw.randint(1, 3), draw.randint(1, 3)


def nested_of_two(scenario: Scenario, step: int) -> list[list[tuple[int, int]]]:
    """Return the micro-batches of two models in their order; those whose contexts are nested in
    each other are together.

    Each order comes without nested contexts. In a later step both contexts are those of a first, or
    of a last micro-batch; in another one, one is that of a last, and the other that of a first one.
    """
    order = order_of_two(scenario, step)
    if step < _FIRST_NESTED:
        return [[one] for one in order]
    draw = _generator(scenario, _FIRST_NESTED)
    unequal = draw.choice((_FIRST_NESTED, _FIRST_NESTED + 2))
    if step != unequal:
        return [list(pair) for pair in zip(order[::2], order[1::2], strict=True)]
    one = draw.randrange(2)
    both = [(one, 1), (1 - one, 0)]
    draw.shuffle(both)
    return [[(one, 0)], both, [(1 - one, 1)]]


def _generator(scenario: Scenario, *key: int) -> random.Random:
    return random.Random(f"{scenario.session_seed}/{scenario.name}/{key}")


def multiple(size: int, number: int, batch: int) -> int:
    """Return the factor by which a micro-batch's gradient is a multiple of the step's.

    Args:
        size: the size of the group.
        number: the number of micro-batches of the step.
        batch: the micro-batch.
    """
    # Powers of two: every choice of micro-batches has a sum of its own, so that a wrong result
    # shows which ones were lost. A subject may average what has accumulated in every micro-batch,
    # and so divide by the size of the group as often; the power of the size keeps that exact.
    if number <= _EXACT:
        return int(2**batch * size ** (number - 1))
    # Such powers would leave the range of float32. Values of many micro-batches are random, and
    # need not be exact.
    return 1 + batch % 5


def multiple_in(scenario: Scenario, size: int, step: int, batch: int) -> int:
    """Return the factor of a micro-batch's gradient in a step of a scenario; see :func:`multiple`.

    Powers of the size would leave the range of float16 if several micro-batches near its limit are
    counted. Sums of the others are exact for a subject that averages once in a step.
    """
    if count_of(scenario) and scenario.variant == "special":
        return int(2**batch)
    return multiple(size, batches(scenario, step), batch)


def added(scenario: Scenario) -> tuple[int, frozenset[int]]:
    """Return the step from which on some parameters are used, and these parameters."""
    if scenario.variant != "added":
        return 0, frozenset()
    numbers = random.Random(f"{scenario.session_seed}/added")
    step = numbers.randint(1, len(scenario.steps) - 2)
    indices = numbers.sample(range(len(scenario.params)), numbers.randint(1, 4))
    return step, frozenset(indices)


def part_of(scenario: Scenario, index: int) -> int:
    """Return the number of the optimizer that has a parameter, if two optimizers take turns."""
    numbers = random.Random(f"{scenario.session_seed}/{scenario.name}/parts")
    count = len(scenario.params)
    return int(index in numbers.sample(range(count), numbers.randint(2, count - 2)))


def turns(scenario: Scenario, step: int) -> tuple[int, ...]:
    """Return the numbers of the optimizers that step in a step.

    One of them begins alone, the other one steps alone next but one at the latest, and both step
    together later. All further steps are drawn.
    """
    numbers = random.Random(f"{scenario.session_seed}/{scenario.name}/turns")
    first = numbers.randrange(2)
    kinds = [(first,), (1 - first,), (0, 1)]
    more = [numbers.choice(kinds) for _ in range(len(scenario.steps) - len(kinds))]
    begin = [kinds[0]] * numbers.randint(1, 2)
    rest = [*kinds[2:], *more[len(begin) - 1 :]]
    numbers.shuffle(rest)
    return [*begin, kinds[1], *rest][step]


def trained_from(scenario: Scenario, index: int) -> int:
    """Return the step from which on a parameter is trained, which is frozen before.

    Two steps, which are drawn, unfreeze one to three parameters each; the others are always
    trained.
    """
    if scenario.variant != "unfrozen":
        return 0
    numbers = random.Random(f"{scenario.session_seed}/{scenario.name}/unfrozen")
    steps = sorted(numbers.sample(range(1, len(scenario.steps) - 1), 2))
    frozen = numbers.sample(range(len(scenario.params)), numbers.randint(2, 6))
    if index not in frozen:
        return 0
    return steps[frozen.index(index) % 2]


def clears_to_zeros(scenario: Scenario, step: int, index: int) -> bool:
    """Whether the trainer clears a gradient by zeros in its memory, and does not drop it.

    So it is for all gradients in steps that unfreeze parameters, and in most others. Further steps
    drop some gradients, which are drawn, and clear the others by zeros; if all parameters are used,
    one drawn step does so at least.
    """
    if scenario.variant not in ("unfrozen", ZEROED):
        return False
    drops = _generator(scenario, step).random() >= 0.6
    if scenario.variant == ZEROED:
        drops |= step == _generator(scenario).randrange(1, len(scenario.steps))
    elif any(trained_from(scenario, one) == step for one in range(len(scenario.params))):
        drops = False
    return not drops or _generator(scenario, step, index).random() < 0.5


def is_frozen(scenario: Scenario, step: int, batch: int, index: int) -> bool:
    """Whether a micro-batch freezes a parameter.

    One parameter of each step is never frozen, and one is frozen after the first micro-batch. The
    micro-batches that freeze another one are drawn. If parameters are unfrozen later, all
    micro-batches of the steps before freeze them.
    """
    if step < trained_from(scenario, index):
        return True
    if scenario.variant != "freezing":
        return False
    count = len(scenario.params)
    trained, first_alone = _generator(scenario, step).sample(range(count), 2)
    if index in (trained, first_alone):
        return index == first_alone and batch > 0
    return _generator(scenario, step, batch, index).random() < 0.5


def uses(
    scenario: Scenario,
    size: int,
    place: int,
    step: int,
    batch: int,
    index: int,
    first_rank: int = 0,
) -> bool:
    """Whether the micro-batch of a rank uses a parameter.

    Args:
        size: the size of the group.
        place: the rank's number within the group.
        step: the step.
        batch: the micro-batch of the step.
        index: the parameter.
        first_rank: the first global rank of the group.
    """
    if scenario.params[index].frozen or is_empty(scenario, size, place, step, batch):
        return False
    broken = fails_and_goes_on(scenario, step)
    if broken is not None and scenario.variant in (RECOVERED, RECOVERED_EARLY):
        return uses_around_break(scenario, broken, place, step, batch, index)
    if batch == broken:
        return False
    last = batch == batches(scenario, step) - 1
    match scenario.variant:
        case "microbatches" | "claim":
            by_parameter = (
                True,
                batch == 0,
                last,
                0 < batch < 3,
                False,
                batch in (0, 3),
                batch == 1,
                batch != 2,
            )
            return by_parameter[index]
        case "ranks":
            unused_by_all = len(scenario.params) - 1
            return index not in (unused_by_all, (place + step) % unused_by_all)
        case "added":
            first_step, indices = added(scenario)
            return step >= first_step or index not in indices
        case "swapped":
            swap = swap_of(scenario)
            return swap is None or index not in swap.unused(step)
        case "freezing" | "unfrozen":
            return not is_frozen(scenario, step, batch, index)
        case variant if variant == TWO_MODELS:
            return uses_of_two(scenario, step, batch, index)
        case variant if variant == LARGE_TWINS:
            return uses_twin(scenario, size, place, step, index)
        case variant if variant == BY_GROUP:
            return uses_in_group(scenario, first_rank, place, step, index)
        case "turns":
            return part_of(scenario, index) in turns(scenario, step)
        case "combined" | "together":
            # One rank uses the second parameter, and its neighbour the third one.
            first = place == step % size
            second = place == (step + 1) % size
            by_parameter = (
                True,
                first and last,
                second and not last,
                False,
                batch % 2 == place % 2,
                place > 0,
                last,
                not last,
            )
            return by_parameter[index]
    return True

"""The scenarios for averagers as training uses them: sizes, values, models and changes.

Their numbers are drawn from the session's seed, and their lengths follow the claimed schedule (see
``subjects/kinds/_averager_schedule.py``). ``Scenario.options`` holds the drawn numbers that both
the ranks and the rules need, as ``name=value``.
"""

import math
import random
from dataclasses import replace
from functools import lru_cache

from conformance.scenarios.averager import _PARAMS, PLAIN, RANDOM, SAVED
from conformance.scenarios.model import Observation, Param, Scenario
from conformance.scenarios.tables import prime_from

# The first parameters are made like the values of this step, the same on all ranks.
START = 100_003
TIED = "tied"
ONE_MODEL = "one_model"
# All ranks load the state that rank 0 has saved.
LOADS_FIRST = "loads_first"
# The ranks of the first group make more calls than the others; then come calls outside of a group.
GOES_ON = "goes_on"
# After the steps other models come in turn, each with an averager that is called so often.
MODELS_COME = "models_come"
# Values of steps that are rolled back are those of so many steps later.
ROLLED = 200_003

LARGE = replace(
    PLAIN,
    name="averager_large",
    summary="some hundred parameters, one of them of a million elements and more, after two large "
    "ones of half precision; drawn sizes",
    steps=("crafted", "normal"),
    world_sizes=(2,),
    variant="large",
)

SPECIAL = replace(
    PLAIN,
    name="averager_special",
    summary="NaN, infinities, and values of float16 whose sum overflows; on a rank alone, and on "
    "several",
    params=(
        *_PARAMS,
        Param((13,), "float64"),
        Param((31,), "float16"),
        Param((17,), "bfloat16"),
    ),
    steps=("limit", "nan", "inf", "crafted"),
    world_sizes=(2, 3),
    variant="special",
)

NEAR_LIMIT = replace(
    PLAIN,
    name="averager_near_limit",
    summary="two large parameters of float16 whose sum overflows; drawn sizes",
    params=(Param((7,)),),
    steps=("limit", "limit"),
    world_sizes=(2,),
    prerequisite="averager_special",
)

EMPTY = replace(
    RANDOM,
    name="averager_empty",
    summary="in some steps one rank has no gradient at all",
    world_sizes=(2, 3),
    variant="empty",
)

TWO = replace(
    PLAIN,
    name="averager_two",
    summary="two averagers of two models take turns in a drawn order; two moving averages are of "
    "one model",
    world_sizes=(2,),
    variant="two",
)

# A process of training may have models on all ranks, and on fewer.
TWO_GROUPS = replace(
    TWO,
    name="averager_two_groups",
    summary="the scenario `averager_two` on two groups of different sizes: WORLD, and a part of "
    "it; their order and the parts are drawn",
    world_sizes=(),
    size=4,
    twin_groups=((0, 2), (1, 3)),
)

CHANGING = replace(
    PLAIN,
    name="averager_changing",
    summary="between the first two averages one parameter is unfrozen, and another of the same "
    "shape frozen; before the third one a parameter is added, and before the fourth one it and "
    "another leave the list",
    params=(_PARAMS[0], *_PARAMS, Param((9,))),
    world_sizes=(2,),
    variant="changing",
)
# A plan of buffers or a cache may be trusted after some averages.
CHANGING_LATE = replace(
    CHANGING,
    name="averager_changing_late",
    summary="the scenario `averager_changing` after 17 to 150 averages",
)
LATE = (17, 150)
UNFROZEN = 0
FROZEN = 1
ADDED = len(CHANGING.params) - 1
# The end of the list: what is left of it is the beginning of the earlier one.
REMOVED = (ADDED - 1, ADDED)

# A GAN's discriminator is frozen in the generator's turns, and its averager is called in all steps.
IDLE = replace(
    PLAIN,
    name="averager_idle",
    summary="in drawn steps all parameters are frozen, or none are given",
    world_sizes=(2,),
    variant="idle",
)
# The options with the drawn steps.
IDLE_FROZEN = "all_frozen"
IDLE_NONE = "none_given"

# As model.to(dtype), load_state_dict(assign=True) and a flat buffer that is made anew do.
MOVED = replace(
    PLAIN,
    name="averager_moved",
    summary="between averages each parameter gets new memory, another dtype, or is replaced; drawn "
    "for each",
    params=(*_PARAMS, Param((9,))),
    world_sizes=(2,),
    variant="moved",
)

SAVED_EARLY = replace(
    SAVED,
    name="averager_saved_early",
    summary="the state is saved within the warm-up",
    world_sizes=(2,),
)

RESUMED_EARLY = replace(
    SAVED_EARLY,
    name="averager_resumed_early",
    summary="new processes load that state twice, save it and load that, and continue; if results "
    "are plain means, all ranks load the state of rank 0",
    prerequisite="averager_saved_early",
    variant="loaded_twice",
    resume=replace(SAVED_EARLY.resume, resumes=True),
)

# The state is not the run's: the same process loads it.
ROLLED_BACK = replace(
    PLAIN,
    name="averager_rolled_back",
    summary="the state is saved at a drawn step; after a drawn number of steps on other values, "
    "which leave no record, the same averager loads it again",
    world_sizes=(2,),
    variant="rolled_back",
    prerequisite="averager_saved",
)

ROLLED_TO_START = replace(
    ROLLED_BACK,
    name="averager_rolled_to_start",
    summary="the scenario `averager_rolled_back` with a state that is saved before the first step; "
    "an average or more comes before it is loaded",
)

DRIFTING = replace(
    PLAIN,
    name="averager_drifting",
    summary="parameters move once, and then stay for up to 200 averages; before one of the first "
    "the averager loads the state that it has just saved",
    params=(Param((5, 3)), Param((11,), "float16"), Param((13,), "bfloat16")),
    world_sizes=(2,),
    variant="drifting",
)

AUTOCAST = replace(
    RANDOM,
    name="averager_autocast",
    summary="random values, in two large parameters too, under autocast to bfloat16; drawn sizes",
    world_sizes=(2,),
    variant="autocast",
)

AUTOCAST_HALF = replace(
    AUTOCAST,
    name="averager_autocast_half",
    summary="the scenario `averager_autocast` under autocast to float16",
    options=("autocast=float16",),
)

# The least and the largest number of steps of a long run.
LONG_STEPS = (400, 700)

LONG = replace(
    PLAIN,
    name="averager_long",
    summary=f"a small model in {LONG_STEPS[0]} to {LONG_STEPS[1]} steps; every other rank has "
    "another hash seed; unless it is like an averager with a state, one parameter has no gradient "
    "on any rank in the first 17 to 150 averages, and another one in as many later ones; each has "
    "its next ones on one rank alone; then eight further models "
    "come one after another",
    params=(Param((3,)), Param((2, 2)), Param((5,)), Param((2, 3))),
    world_sizes=(2,),
    hash_seeds_differ=True,
    variant="long",
    observe=Observation(growth=True),
)

ALL = (
    *(LARGE, SPECIAL, NEAR_LIMIT, EMPTY, TWO, TWO_GROUPS, CHANGING, CHANGING_LATE, MOVED),
    *(
        SAVED_EARLY,
        RESUMED_EARLY,
        ROLLED_BACK,
        ROLLED_TO_START,
        DRIFTING,
        AUTOCAST,
        AUTOCAST_HALF,
        LONG,
    ),
)


def with_option(scenario: Scenario, name: str, value: object) -> Scenario:
    """Return the scenario with a drawn number, or text, for ranks and rules."""
    return replace(scenario, options=(*scenario.options, f"{name}={value}"))


def option(scenario: Scenario, name: str) -> str:
    """Return a drawn number, or text, of a scenario; '' if it has none of this name."""
    return _values_of(scenario.options).get(name, "")


@lru_cache(maxsize=256)
def _values_of(options: tuple[str, ...]) -> dict[str, str]:
    """Return the values by name; the first one counts if there are several of a name."""
    return {name: value for name, _, value in (one.partition("=") for one in options[::-1])}


def with_tied(scenario: Scenario, draw: random.Random) -> Scenario:
    """Add a parameter that shares its memory with another one, which is drawn."""
    tied = draw.choice([i for i, spec in enumerate(scenario.params) if math.prod(spec.shape) > 1])
    params = (*scenario.params, scenario.params[tied])
    return with_option(replace(scenario, params=params), TIED, tied)


def rolled_back(scenario: Scenario, step: int) -> int | None:
    """Return the number of steps that come before a step, and are rolled back then.

    It is None if no state is loaded before the step, and 0 if it is loaded as soon as it is saved.
    """
    if option(scenario, "rolls_back_at") != str(step):
        return None
    return int(option(scenario, "lost_steps"))


def turn(scenario: Scenario, step: int) -> tuple[int, int]:
    """Return the model whose turn a step is, and the number of the model's earlier steps."""
    turns = option(scenario, "turns")
    if not turns:
        return 0, step
    return int(turns[step]), _counts(turns)[step]


def on_two_groups(scenario: Scenario, draw: random.Random, least: int = 2) -> Scenario:
    """Give one of two models all ranks, and the other one fewer.

    The ranks of each part, and the model that has all ranks, are drawn. Without a minimum there are
    four or five ranks.

    Args:
        scenario: of two models that take turns.
        draw: the source of the numbers.
        least: the number of ranks that the subject needs.
    """
    sizes = (least, least) if least > 2 else (2, draw.choice((2, 3)))
    ranks = draw.sample(range(sum(sizes)), sum(sizes))
    parts = tuple(tuple(sorted(part)) for part in (ranks[: sizes[0]], ranks[sizes[0] :]))
    every = (tuple(range(sum(sizes))),)
    groups = ((), parts) if draw.random() < 0.5 else (parts, every)
    return replace(scenario, size=sum(sizes), groups=groups[0], twin_groups=groups[1])


def on_one_group(scenario: Scenario, size: int) -> Scenario:
    """Give both of two models all ranks."""
    return replace(scenario, size=size, groups=(), twin_groups=())


def group_of_turn(scenario: Scenario, rank: int, world: int, step: int) -> tuple[int, ...]:
    """Return the global ranks of a rank's group, for its model whose turn a step is."""
    is_twin = turn(scenario, step)[0] == 1
    return (scenario.twin_group_of if is_twin else scenario.group_of)(rank, world)


@lru_cache(maxsize=8)
def _counts(turns: str) -> tuple[int, ...]:
    counts = {"0": 0, "1": 0}
    found = []
    for model in turns:
        found.append(counts[model])
        counts[model] += 1
    return tuple(found)


def is_frozen(scenario: Scenario, step: int, index: int) -> bool:
    """Whether a parameter requires no gradient at a step."""
    if scenario.variant == "changing":
        changed = step >= int(option(scenario, "change") or 0)
        return (index == UNFROZEN and not changed) or (index == FROZEN and changed)
    return scenario.params[index].frozen or str(step) in option(scenario, IDLE_FROZEN).split()


def is_written_to_data(scenario: Scenario, index: int) -> bool:
    """Whether local steps write a parameter by ``p.data``, as the optimizers of some packages do.

    This leaves the parameter's version as it was. Half of the parameters are drawn, so that a run
    has one at least.
    """
    draw = random.Random(f"{scenario.session_seed}/{scenario.name}/written to data")
    count = len(scenario.params)
    return index in draw.sample(range(count), (count + 1) // 2)


def is_given(scenario: Scenario, step: int, index: int) -> bool:
    """Whether a parameter is among those that the averager is given at a step."""
    if str(step) in option(scenario, IDLE_NONE).split():
        return False
    if scenario.variant != "changing":
        return True
    removal = option(scenario, "removal")
    if removal and index in REMOVED and step >= int(removal):
        return False
    return index != ADDED or step >= int(option(scenario, "addition") or 0)


def is_idle(scenario: Scenario, step: int) -> bool:
    """Whether all parameters are frozen at a step, or none are given."""
    steps = f"{option(scenario, IDLE_FROZEN)} {option(scenario, IDLE_NONE)}".split()
    return str(step) in steps


def is_empty(scenario: Scenario, step: int, place: int, size: int) -> bool:
    """Whether a rank has no gradient at all at a step.

    Args:
        place: the rank's number within its group.
        size: the size of the group.
    """
    if scenario.variant != "empty":
        return False
    draw = random.Random(f"{scenario.session_seed}/empty/{step}")
    # On average in two of three steps. The draw is of a rank, so that one rank is left at least.
    return place == draw.randrange(3 * size) % (2 * size)


def special_source(scenario: Scenario, step: int, place: int, size: int) -> int:
    """Return the place whose values a rank is given, so that any rank may have the special ones."""
    if scenario.variant != "special":
        return place
    shift = random.Random(f"{scenario.session_seed}/special/{step}").randrange(size)
    return (place + shift) % size


def many_params(draw: random.Random, largest: int) -> tuple[Param, ...]:
    """Return a large model's parameters, with drawn sizes.

    There are 170 to 400 small parameters of 1 to 40 elements. Among them lie one parameter of 2**17
    to 2**18 elements, and one of ``largest`` to twice as many.
    """
    small = [Param((draw.randint(1, 40),)) for _ in range(draw.randint(170, 400))]
    medium = Param((prime_from(draw.randint(2**17, 2**18)),))
    large = Param((prime_from(draw.randint(largest, 2 * largest)),))
    for param in (medium, large):
        small.insert(draw.randrange(len(small)), param)
    return tuple(small)


def large_halves(draw: random.Random) -> tuple[Param, ...]:
    """Return two parameters of float16: one of 2**16 to 2**20 elements, every size as likely as its
    double, and one of 2**20 to 2**21.
    """
    sizes = [prime_from(round(2 ** draw.uniform(16, 20))), prime_from(draw.randint(2**20, 2**21))]
    draw.shuffle(sizes)
    return tuple(Param((size,), "float16") for size in sizes)


def large_halves_first(draw: random.Random) -> tuple[Param, ...]:
    """Return two parameters of 2**16 to 2**17 elements that come before those of float32: one of
    bfloat16 and one of float16, in a drawn order.
    """
    made = [Param((draw.randint(2**16, 2**17),), dtype) for dtype in ("bfloat16", "float16")]
    draw.shuffle(made)
    return tuple(made)


def large_twins(draw: random.Random) -> tuple[Param, ...]:
    """Return two parameters of one size: 2**16 to 2**20 elements, every size as likely as its
    double.
    """
    return (Param((round(2 ** draw.uniform(16, 20)),)),) * 2


def two_large(draw: random.Random) -> tuple[Param, ...]:
    """Return a parameter of 2**10 to 2**20 elements, every size as likely as its double, and one
    of 2**20 to 2**21.
    """
    sizes = [round(2 ** draw.uniform(10, 20)), prime_from(draw.randint(2**20, 2**21))]
    draw.shuffle(sizes)
    return tuple(Param((size,)) for size in sizes)

"""Scenarios in which a state serves more than the ranks and the DDP that it was made for.

resumed_from_rank_0       as many ranks continue as have saved, all from the state of rank 0
resumed_by_other_ranks    three or four ranks continue from the state of rank 0 of two
rewrapped                 layers thaw, then others freeze, then two of one shape change places: DDP
                          is made anew each time, and the same hook and state are registered on it
recast                    the same if parameters change their dtype, layers grow, and options of DDP
                          change
rolled_back               a process loads the state that it has saved some steps before, and at last
                          the one from before its first step; models on two groups of ranks
"""

import math
import random
from dataclasses import replace
from itertools import accumulate

from conformance.scenarios.hook import FROZEN, RESUMED, RESUMED_ONE, SAVED, SAVED_ONE
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.seeds import generator

_OF_RANK_0 = replace(RESUMED.resume, of_rank_0=True)

RESUMED_FROM_RANK_0 = replace(
    RESUMED,
    name="resumed_from_rank_0",
    summary="all ranks continue from the state that rank 0 saved",
    resume=_OF_RANK_0,
)

RESUMED_BY_OTHER_RANKS = replace(
    RESUMED,
    name="resumed_by_other_ranks",
    summary="another number of ranks continues from the state that rank 0 saved; it is drawn",
    world_sizes=(),
    size=3,
    resume=_OF_RANK_0,
)

RESUMED_ELSEWHERE = (RESUMED_FROM_RANK_0, RESUMED_BY_OTHER_RANKS)

# The first and the last parameter thaw. Later the last one freezes again, and one in the middle. At
# last one of two neighbours of the same shape freezes, and the other one thaws: buckets then have
# the same shapes as before, and other parameters.
REWRAPPED = replace(
    FROZEN,
    name="rewrapped",
    summary="after three to five steps frozen parameters thaw, later others freeze, and at last "
    "two of one shape change places: DDP is made anew over the same model each time, and the same "
    "hook and state are registered on it; sizes of parameters and buckets are drawn",
    params=(
        Param((40,), frozen_under=(0,)),
        Param((30,)),
        Param((50,), frozen_under=(3,)),
        Param((50,), frozen_under=(0, 1, 2)),
        Param((20,)),
        Param((11,), frozen_under=(2, 3)),
        Param((7,)),
        Param((60,), frozen_under=(0, 2, 3)),
    ),
    steps=("crafted",) * 16,
    rewraps=(4, 8, 12),
    # A hook may refuse the other runs of parameters that are frozen, and not this one.
    prerequisite="values",
)

# Each DDP has other versions of the three parameters: of another dtype each time, and from the
# third on two parameters have other shapes. The first dtype is narrower than the second, so that
# memory that is kept loses digits, and the third one is another again.
_OF_DDPS = ("bfloat16", "float32", "float64", "float32")
RECAST = replace(
    REWRAPPED,
    name="recast",
    summary="all parameters change their dtype after three or four steps, and twice more after as "
    "many, two change their sizes, and so do the options of DDP: it is made anew over the "
    "same model each time, and the same hook and state are registered on it; all of it is drawn",
    params=tuple(
        Param(
            (17 + 8 * place,),
            dtype,
            frozen_under=tuple(other for other in range(len(_OF_DDPS)) if other != number),
            version_of=place if number else -1,
        )
        for number, dtype in enumerate(_OF_DDPS)
        for place in range(3)
    ),
    steps=("crafted", "normal") * 6,
    rewraps=(3, 6, 9),
    in_eval_mode=False,
    renews_storage=False,
    prerequisite="values",
)

# All steps from the save on feed the same gradients. A state keeps its process group if it loads
# what it has saved. (New processes may unpickle one that has lost it: PowerSGDState of torch does.)
ROLLED_BACK = replace(
    SAVED_ONE,
    name="rolled_back",
    summary="after three to seven more steps a process loads the state that it has saved, and "
    "repeats these steps; on two groups, of two ranks and of one; the groups and the number of "
    "steps are drawn",
    steps=("crafted", "crafted", "normal", *("constant",) * 8),
    world_sizes=(),
    groups=((0, 2), (1,)),
    resume=replace(SAVED_ONE.resume, rolls_back_at=7),
)

ALL = (*RESUMED_ELSEWHERE, REWRAPPED, RECAST, ROLLED_BACK)

_BUCKET_CAPS = (16, 4096, 25 * 2**20)  # bytes


def _draw_size(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw three or four ranks; two have saved."""
    return replace(scenario, size=numbers.choice((3, 4)))


def _draw_large(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw one parameter of 2**20 to 3 * 2**19 elements, the same for all runs of one state."""
    del numbers
    numel = generator(replace(scenario, name=SAVED_ONE.name)).randint(2**20, 3 * 2**19)
    return replace(scenario, params=(Param((numel,)),))


def _draw_many(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Add 7 to 24 parameters of 1 to 1,000 elements, the same for all runs of one state.

    So there are more than ten: names with numbers have another order as texts, and counts more than
    one digit. A new process has them in one bucket until DDP rebuilds it after the first step, and
    in several from then on: a bucket is closed at a fifth to a half of the elements that are not in
    the largest parameter, so that there are two or more, and one has several parameters.
    """
    del numbers
    draw = generator(replace(scenario, name=SAVED.name), "many")
    sizes = [round(2 ** draw.uniform(0, 10)) for _ in range(draw.randint(7, 24))]
    more = tuple(Param((size,)) for size in sizes)
    params = (*scenario.params, *more)
    numels = sorted(math.prod(spec.shape) for spec in params)
    cap = 4 * sum(numels[:-1]) * draw.uniform(1 / 5, 1 / 2)
    return replace(scenario, params=params, ddp=replace(scenario.ddp, bucket_cap_mb=cap / 2**20))


def _draw_size_and_many(scenario: Scenario, numbers: random.Random) -> Scenario:
    return _draw_many(_draw_size(scenario, numbers), numbers)


def _draw_sizes(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the steps, the largest size of a bucket, and seven sizes from 1 to 4,000 elements.

    The parameter that thaws last in the model is two to three times as large as the one before it,
    which is in the first bucket until then: that bucket grows.
    """
    sizes = [round(2 ** numbers.uniform(0, 10)) for _ in scenario.params]
    sizes[-2] += 8
    sizes[-1] = round(sizes[-2] * numbers.uniform(2, 3))
    sizes[2] = sizes[3] = 16 + sizes[2]
    params = zip(scenario.params, sizes, strict=True)
    first = numbers.randint(3, 5)
    second = first + numbers.randint(3, 5)
    third = second + numbers.randint(5, 8)
    cap = numbers.choice(_BUCKET_CAPS) / 2**20
    steps = ["normal" if step % 2 else "crafted" for step in range(third + 3)]
    # What is left of these gradients is far from what the next parameter of that shape is fed.
    steps[third - 1] = "large"
    return replace(
        scenario,
        params=tuple(replace(spec, shape=(size,)) for spec, size in params),
        steps=tuple(steps),
        rewraps=(first, second, third),
        ddp=replace(scenario.ddp, bucket_cap_mb=cap),
    )


def _draw_versions(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the steps, the dtypes, the options of each DDP, and sizes from 8 to 4,000 elements.

    Under the third DDP the second parameter has as many elements more as the last one has less: a
    bucket of both has the same size. Under the fourth the last one has grown.
    """
    half, other_half = numbers.sample(("float16", "bfloat16"), 2)
    dtypes = (half, "float32", numbers.choice((other_half, "float64")), "float32")
    first, second, third = (round(2 ** numbers.uniform(3, 12)) for _ in range(3))
    moved = numbers.randint(1, third - 1)
    sizes = (
        (first, second, third),
        (first, second, third),
        (first, second + moved, third - moved),
        (first, second + moved, third + numbers.randint(1, third)),
    )
    lengths = [numbers.randint(3, 4) for _ in sizes]
    caps = numbers.sample((16, 1024, 4096, 25 * 2**20), 4)
    # The second DDP has the options of the first: there the dtype alone differs.
    caps[1] = caps[0]
    is_view = numbers.random() < 0.5
    options = [
        replace(scenario.ddp, bucket_cap_mb=cap / 2**20, gradient_as_bucket_view=as_view)
        for cap, as_view in zip(caps, (is_view, is_view, not is_view, is_view), strict=True)
    ]
    params = tuple(
        replace(spec, dtype=dtypes[number // 3], shape=(sizes[number // 3][number % 3],))
        for number, spec in enumerate(scenario.params)
    )
    kinds = ("crafted", "normal")
    return replace(
        scenario,
        params=params,
        steps=tuple(kinds[step % 2] for step in range(sum(lengths))),
        rewraps=tuple(accumulate(lengths[:-1])),
        ddp=options[0],
        ddp_anew=tuple(options[1:]),
    )


def _draw_repeated_steps(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the number of steps that are repeated, 3, 5 or 7, and the rank that trains alone."""
    count = numbers.choice((3, 5, 7))
    alone = numbers.randrange(3)
    others = tuple(rank for rank in range(3) if rank != alone)
    saves_at = scenario.resume.saves_at
    return replace(
        scenario,
        steps=scenario.steps[:saves_at] + ("constant",) * (2 * count),
        groups=(others, (alone,)),
        resume=replace(scenario.resume, rolls_back_at=saves_at + count),
    )


DRAWS = {
    SAVED.name: _draw_many,
    RESUMED.name: _draw_many,
    SAVED_ONE.name: _draw_large,
    RESUMED_ONE.name: _draw_large,
    RESUMED_FROM_RANK_0.name: _draw_many,
    RESUMED_BY_OTHER_RANKS.name: _draw_size_and_many,
    REWRAPPED.name: _draw_sizes,
    RECAST.name: _draw_versions,
    ROLLED_BACK.name: _draw_repeated_steps,
}

"""A run as long as training's schedules, as data.

A hook may count its steps or calls, and do something else beyond a number: end a warm-up, log,
restart, clip by statistics of the first steps, wrap a counter. The run ``endurance`` has more
steps than such numbers usually are, on a model so small that a step of DDP takes a millisecond.
Its length, the period in which gradients come again, and the places of special steps are drawn
from the session's seed:

    rounds of the run        1,200 to 1,500, after the steps of a claimed warm-up
    period                   one of the eight primes from 29 to 59

Gradients come again after a prime number of rounds, so that the ranks compute few of them, and no
schedule of a hook is in step with them.
"""

import random
from dataclasses import replace

from conformance.scenarios.model import DDPOptions, LongRun, Param, Scenario

FEWEST_ROUNDS = 1_200
MOST_ROUNDS = 1_500
PERIODS = (29, 31, 37, 41, 43, 47, 53, 59)
# Records have a row for each round. A longer run has more steps in a round.
MOST_ROWS = 2_048

# DDP closes a bucket once it holds 64 bytes, and takes parameters in reverse order: three buckets,
# of one, two and one parameters.
ENDURANCE = Scenario(
    name="endurance",
    summary="1,200 to 1,500 steps after the warm-up, three buckets; the number of steps, the "
    "period of the gradients and the places of special steps are drawn; now and then the model is "
    "evaluated, between steps or within one; some steps have several forwards; gradients are "
    "zeroed in place in some steps, and freed in others; parameters move after each step, unless "
    "the hook steps them; every other rank has another hash seed",
    params=(Param((5, 3)), Param((17,)), Param((2, 3)), Param((3, 3, 3))),
    steps=("crafted",) * FEWEST_ROUNDS,
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=64 / 2**20),
    long_run=LongRun(FEWEST_ROUNDS, PERIODS[0]),
    hash_seeds_differ=True,
)


def draw_endurance(scenario: Scenario, draws: random.Random) -> Scenario:
    """Draw the number of rounds and the period."""
    rounds = draws.randint(FEWEST_ROUNDS, MOST_ROUNDS)
    return replace(scenario, long_run=LongRun(rounds, draws.choice(PERIODS)))


def lengthened(scenario: Scenario, steps: int) -> Scenario:
    """Return a long run with at least ``steps`` steps after the warm-up."""
    if not scenario.long_run or steps <= scenario.long_run.drawn:
        return scenario
    steps_per_round = -(-steps // MOST_ROWS)
    rounds = -(-steps // steps_per_round)
    long_run = replace(scenario.long_run, drawn=rounds, steps_per_round=steps_per_round)
    return replace(scenario, long_run=long_run)

"""The learning rates of the trainer's optimizer: of a long run, in which a scheduler sets them, and
of other runs.

A factory or a set-up may take the optimizer, and a hook may read its learning rate: to convert what
it has held back, or to communicate less as the rate falls. Rates are drawn from the session's seed:

    first rate      0.05 to 0.5; of fused hooks 1.25 to 2 times the rate that they claim
    falls           to a half at four drawn steps, and by as much again for each further bit of the
                    fall, evenly over the run
    bits of a fall  5; 20 for local claims, under which a period may be longer than the run at last
    rests           of fused hooks, 5 to 40 steps at a rate of 0, as before a warm-up; not under
                    lossy claims, under which residuals may be divided by the rate
    rises           of fused hooks, 5 to 40 steps at two to four times the rate before them, as
                    after a restart; neither rises nor rests are in the run's first or last eighth
    short runs      0.05 to 0.5 in all steps; of fused hooks the rate that they claim
    saved states    in all runs that save or load the state of a fused hook, its claimed rate until
                    the save; from then on 1.5 to 3 times that rate, or the claimed rate divided by
                    such a factor
    two models      of fused hooks; one optimizer has the claimed rate, and the other one such a
                    multiple or part: in half of the scenarios the model's, in the others the twin's
    loads           of fused hooks, one to three times before the last eighth of the run, and once
                    before the rise, the optimizer loads the state that it has: as in a resumed
                    training, its parameter groups are new dictionaries then
"""

import random
from dataclasses import replace
from functools import lru_cache

from conformance.scenarios.feed import feed_of
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

FIRST_RATES = (0.05, 0.5)
MILESTONES = 4
FALLS = 5
FALLS_OF_LOCAL = 20
STRETCH = (5, 40)  # steps
LOADS = (1, 3)
OTHER_RATE = (1.5, 3.0)  # of one of two models, and after a state was saved
# The twin has the rate that is claimed, and the model another one.
_MODEL_HAS_OTHER_RATE = ("joint_alike", "equal_groups")
RISE = (2.0, 4.0)


def rate_of_short_runs(scenario: Scenario) -> float:
    """Return the rate of a run whose rates do not change.

    It is that of all other runs of the session, since rules compare some of them.
    """
    draws = random.Random(f"{scenario.session_seed}/learning rate")
    return draws.uniform(*FIRST_RATES)


def rate_of_fused(scenario: Scenario, *, of_twin: bool) -> float:
    """Return the rate of the optimizer of a fused hook's model, or of its twin."""
    rate = scenario.fused_rate
    if not scenario.twin or of_twin == (scenario.name in _MODEL_HAS_OTHER_RATE):
        return rate
    return rate * _other_factor(generator(scenario, "learning rate of another model"))


def _other_factor(draws: random.Random) -> float:
    factor = draws.uniform(*OTHER_RATE)
    return draws.choice((factor, 1 / factor))


def rate_after_save(scenario: Scenario) -> float | None:
    """Return the rate of a fused hook's optimizer from the step on after which its state is saved.

    It is None if no state is saved or if the hook steps nothing.
    """
    if not scenario.fused or not scenario.resume.saves_at:
        return None
    draws = random.Random(f"{scenario.session_seed}/learning rate after a save")
    return scenario.fused_rate * _other_factor(draws)


@lru_cache(maxsize=16)
def learning_rates(scenario: Scenario) -> tuple[float, ...]:
    """Return the rate of each step of a long run; () if rates do not change."""
    falls = scenario.long_run.rate_falls
    if not falls:
        return ()
    draws = generator(scenario, "learning rates")
    steps = feed_of(scenario).steps
    first = draws.uniform(*FIRST_RATES)
    if scenario.fused:
        # Another one than claimed: a hook that reads the rate once keeps to neither.
        first = scenario.fused_rate * draws.uniform(1.25, 2.0)
    milestones = draws.sample(range(steps // 8, steps - steps // 8), MILESTONES)
    even = (falls - MILESTONES) / steps
    rates = [
        first * 2.0 ** -(step * even + sum(step >= one for one in milestones))
        for step in range(steps)
    ]
    if scenario.fused:
        _put_stretches(rates, draws, rests=scenario.long_run.rate_rests)
    return tuple(rates)


def _put_stretches(rates: list[float], draws: random.Random, *, rests: bool) -> None:
    """Put a stretch of higher rates into one half of the run, and one at 0 into the other one."""
    middle = len(rates) // 2
    halves = [range(len(rates) // 8, middle), range(middle, len(rates) - len(rates) // 8)]
    for half, is_rest in zip(draws.sample(halves, 2), (False, True), strict=True):
        length = draws.randint(*STRETCH)
        begin = draws.choice(half[:-length])
        rate = 0.0 if is_rest else rates[begin - 1] * draws.uniform(*RISE)
        if rests or not is_rest:
            rates[begin : begin + length] = [rate] * length


@lru_cache(maxsize=16)
def optimizer_loads(scenario: Scenario) -> tuple[int, ...]:
    """Return the steps of a long run before which the trainer's optimizer loads its own state."""
    rates = learning_rates(scenario)
    if not scenario.fused or not rates:
        return ()
    draws = generator(scenario, "loads of the optimizer")
    rise = next(step for step in range(1, len(rates)) if 0 < rates[step - 1] < rates[step])
    before_rise = draws.randrange(1, rise + 1)
    others = draws.sample(range(1, len(rates) * 7 // 8), draws.randint(*LOADS) - 1)
    return tuple(sorted({before_rise, *others}))


def with_learning_rates(scenario: Scenario, *, is_local: bool, is_lossy: bool) -> Scenario:
    """Return a long run whose learning rates change."""
    falls = FALLS_OF_LOCAL if is_local and not scenario.fused else FALLS
    long_run = replace(scenario.long_run, rate_falls=falls, rate_rests=not is_lossy)
    return replace(scenario, long_run=long_run)

"""The schedule of a long run: which kind of gradient each round feeds, by the subject's claims.

The kinds of most rounds decide which claim can be judged; special rounds lie at drawn places.

    exact, rounded, sum     crafted values, and random ones in a quarter of the period; zeros of
                            one parameter for hundreds of rounds, and of another one in the first 2
                            to 300; zeros, NaN, infinities, wide, small and large values in special
                            rounds
    fused                   the same without the zeros in the first rounds; with a parameter of
                            float64 more, which shows options that are lost in the roundings of
                            float32; and the same values in more than a hundred rounds, so that
                            what an optimizer keeps grows to its limits
    compressed              infinities on one rank in a claimed warm-up; a constant plus random
                            values, so that losses add up; rounds with four times as much, small
                            ones, zeros; zeros until residuals are empty, once on the way and at the
                            end; before the end small ones alone
    compressed(ef21)        random values, held until the estimates have converged to them; in
                            three to six rounds those of one rank alone are 2**3 to 2**9 times as
                            large
    compressed(False)       random values; each element is among the largest in two rounds
    unbiased                the same values in five of eight rounds, random ones in two, and in one
                            the same values on all ranks, or on rank 0 alone; gradients that grow
                            again and again; one parameter has 1 to 8 elements
    local                   random values; far smaller ones for a fifth of the run, and far larger
                            ones for another; in three to six rounds those of one rank alone are
                            2**3 to 2**9 times as large
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from conformance.scenarios.growth import GROWN, put_lone_spikes, put_staircases
from conformance.scenarios.learning_rates import with_learning_rates
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.resting_parameter import put_first_rest, put_rest
from conformance.scenarios.seeds import generator
from conformance.scenarios.turns import turns
from conformance.subjects.claims import (
    CONTRACTION,
    DIFFERENCE,
    FEEDBACK,
    LOCAL,
    UNBIASED,
    Claims,
)

# Part of a residual, or of the distance to a held gradient, that is left when it counts as gone.
LEFT = 1 / 1024
SETTLED = 1 / 4096
SMALL_AT_LAST = 1 / 64  # of an uneven residual, when small gradients end
REPEATS = 2  # special rounds of each kind
SPIKES = 8  # rounds with four times as much as usual, and small ones
# Factors of gradients that stay small or large for longer than ranks may be silent (rule 23.5), and
# the rounds of each: a period that follows the length of gradients grows to hundreds of steps.
_OTHER_LENGTHS = (-20, 17)
_ROUNDS_OF_A_LENGTH = 260
_ROUNDS_BEFORE = 300
_ALONE_IN_BUCKETS = (0, 3)  # the first parameter and the last one
_RANKS = 2  # of the run
_FEW = (1, 8)  # elements of the smallest parameter of random results, and of that of float64
# Rounds of the same values: Rprop's steps grow by 1.2 in each, from 1e-6 to 50 in 98 rounds.
_STEADY = (110, 140)
_RARE = ("nan", "inf", "tiny", "wide")  # kinds that some claims do not take


def schedule_long_run(scenario: Scenario, claims: Claims) -> Scenario:
    """Return a long run with the kinds of its rounds, for a subject with these claims."""
    draws = generator(scenario, "schedule")
    period = scenario.long_run.period
    exact = draws.sample(
        ("normal",) * (period // 4) + ("crafted",) * (period - period // 4), period
    )
    warm_up = [exact[number % period] for number in range(claims.steps_of_warmup)]
    if warm_up:
        # Crafted values are exact in narrower dtypes, too.
        with_random_values = draws.randrange(len(warm_up))
        warm_up[with_random_values] = "normal"
    if len(warm_up) > 1 and claims.lossy == FEEDBACK and not claims.fused:
        # One rank alone overflows, as under the first scales of a GradScaler.
        others = [place for place in range(len(warm_up)) if place != with_random_values]
        warm_up[draws.choice(others)] = f"inf/{draws.randrange(_RANKS)}"
    hold = 1
    drawn = scenario.long_run.drawn
    if not claims.lossy:
        after = [exact[number % period] for number in range(drawn)]
        rest = put_rest(after, _ALONE_IN_BUCKETS, draws)
        places = [place for place in range(1, drawn) if place not in rest]
        if not claims.fused:
            first_draws = generator(scenario, "first rest")
            first_rest = put_first_rest(after, _ALONE_IN_BUCKETS, rest, first_draws)
            places = [place for place in places if place not in first_rest]
        else:
            scenario = _with_float64(scenario, claims, draws)
            steady = _put_steady(after, rest, draws)
            places = [place for place in places if place not in steady]
        _put(after, _special_kinds(claims), REPEATS, draws, places)
    elif claims.lossy == FEEDBACK:
        after = _with_feedback(drawn, claims.delta, draws)
    elif claims.lossy == DIFFERENCE:
        hold = steps_until(claims.delta, SETTLED)
        segments = max(3, -(-drawn // hold))
        after = ["normal"] * (segments * hold)
        _put_spikes_of_estimates(after, hold, generator(scenario, "lone spikes"))
    elif claims.lossy == CONTRACTION:
        after = draws.choices(("normal", "drift"), (3, 1), k=drawn)
        special = ["small", "large", "spike", "zero_all"]
        in_turn = turns(scenario.params, claims.delta)
        if REPEATS * len(in_turn) <= drawn // 4:
            special += in_turn
        _put(after, special, REPEATS, draws)
    elif claims.lossy == UNBIASED:
        after = draws.choices(("constant", "normal", "same", "same_one"), (10, 4, 1, 1), k=drawn)
        put_staircases(after, draws)
        scenario = _with_few_elements(scenario, draws)
    else:
        assert claims.lossy == LOCAL
        after = _of_other_lengths(drawn, draws)
        _put(after, ("small", "large"), REPEATS, draws)
        usual = [place for place in range(_ROUNDS_BEFORE, drawn) if after[place] == "normal"]
        ranks = scenario.world_sizes[0]
        put_lone_spikes(after, usual, ranks, generator(scenario, "lone spikes"))
    is_local = claims.lossy == LOCAL
    long_run = replace(
        scenario.long_run, hold=hold, warm_up=claims.steps_of_warmup, moves_apart=is_local
    )
    scenario = replace(scenario, steps=(*warm_up, *after), long_run=long_run)
    return with_learning_rates(scenario, is_local=is_local, is_lossy=bool(claims.lossy))


def _put_spikes_of_estimates(rounds: list[str], hold: int, draws: random.Random) -> None:
    """Let the gradients of one rank grow alone, each time soon after all gradients have changed:
    the estimates have time to converge again.
    """
    segments = range(hold, len(rounds) - hold, hold)
    places = [begin + draws.randint(1, max(1, hold // 4)) for begin in segments]
    put_lone_spikes(rounds, places, _RANKS, draws)


def _with_few_elements(scenario: Scenario, draws: random.Random) -> Scenario:
    """Return the scenario with a drawn number of elements in its smallest parameter: a share of
    them may be rounded to no element."""
    sizes = [math.prod(spec.shape) for spec in scenario.params]
    smallest = sizes.index(min(sizes))
    params = list(scenario.params)
    params[smallest] = replace(params[smallest], shape=(draws.randint(*_FEW),))
    return replace(scenario, params=tuple(params))


def _with_float64(scenario: Scenario, claims: Claims, draws: random.Random) -> Scenario:
    """Return the scenario with a parameter of float64 more, if the subject takes it."""
    if claims.dtypes and "float64" not in claims.dtypes:
        return scenario
    more = Param((draws.randint(*_FEW),), "float64")
    return replace(scenario, params=(*scenario.params, more))


def _put_steady(rounds: list[str], rest: range, draws: random.Random) -> range:
    """Feed the same values for drawn rounds beside those of ``rest``, and return these rounds."""
    count = draws.randint(*_STEADY)
    begins = [
        begin
        for begin in range(1, len(rounds) - count)
        if begin + count <= rest.start or begin >= rest.stop
    ]
    begin = draws.choice(begins)
    rounds[begin : begin + count] = ["constant"] * count
    return range(begin, begin + count)


def steps_until(delta: float, left: float) -> int:
    """Return the number n of steps after which (1 - delta)**(n / 2) <= ``left``."""
    return math.ceil(2 * math.log(left) / math.log(1 - delta)) if delta < 1 else 2


def _special_kinds(claims: Claims) -> Sequence[str]:
    """Return the kinds of special rounds that an exact result must get right."""
    kinds = ("zero_all", "zero_one", "minus_zero", "small", "nan", "inf", "wide", "tiny", "large")
    if claims.fused:
        # Parameters are followed: they would not be finite again, or lose later steps.
        return [kind for kind in kinds if kind not in (*_RARE, "large")]
    if claims.rounded:
        return [kind for kind in kinds if kind != "tiny"]
    return kinds


def _with_feedback(drawn: int, delta: float, draws: random.Random) -> list[str]:
    """Return the kinds for compression with feedback, with faint gradients at the end."""
    drain = steps_until(delta, LEFT)
    # The limit at the end is relative to the last gradients: after small ones it shows a leak.
    # An uneven residual fades half as fast as others (``oracles/long_runs.py``).
    ebb = min(2 * steps_until(delta, SMALL_AT_LAST), drawn // 4)
    after = ["drift"] * (drawn - ebb) + ["small"] * ebb
    begin = drawn
    if drain <= drawn // 8:
        begin = draws.randrange(drawn // 4, drawn // 2)
        after[begin : begin + drain] = ["faint"] * drain
    # The residual that a spike leaves is uneven: it has time to even out before the drain.
    even = min(drain, drawn // 8)
    places = [
        place for place in range(1, drawn - ebb - even) if not begin - even <= place < begin + drain
    ]
    _put(after, ("spike", "small"), SPIKES, draws, places)
    return after + ["faint"] * drain


def _of_other_lengths(drawn: int, draws: random.Random) -> list[str]:
    """Return random values, with some that are far smaller or larger for many rounds."""
    after = ["normal"] * drawn
    exponents = draws.sample(_OTHER_LENGTHS, len(_OTHER_LENGTHS))
    begin = _ROUNDS_BEFORE
    spare = drawn - begin - len(exponents) * _ROUNDS_OF_A_LENGTH
    for exponent in exponents:
        begin += draws.randint(0, spare // len(exponents))
        after[begin : begin + _ROUNDS_OF_A_LENGTH] = [f"{GROWN}/{exponent}"] * _ROUNDS_OF_A_LENGTH
        begin += _ROUNDS_OF_A_LENGTH
    return after


def _put(
    rounds: list[str],
    kinds: Sequence[str],
    times: int,
    draws: random.Random,
    places: Sequence[int] = (),
) -> None:
    """Put special kinds at drawn places, but not into the first round.

    Args:
        rounds: the kinds of rounds.
        kinds: the special kinds.
        times: the number of rounds of each kind.
        draws: the generator.
        places: the places to choose from; () for all.
    """
    chosen = draws.sample(places or range(1, len(rounds)), times * len(kinds))
    for place, kind in zip(chosen, [*kinds] * times, strict=True):
        rounds[place] = kind

"""Gradients that grow from step to step, as after a warm-up or at a spike of the loss.

A hook may take the range of its numbers from the largest gradient of the steps before. If gradients
then grow by more than its margin, those of the step are cut off. In a staircase the gradients of a
few successive rounds grow, in each round by a factor of 2**3, and once of 2**4, from ordinary ones
to some 2**19 times as large. The kind of such a round is ``grown/E``, for gradients that are 2**E
times ``constant``.

A staircase ends in ordinary gradients, so that after as many steps as a history has the next one
grows again. Staircases are spread evenly over a run of 1,200 rounds or more, and at drawn places
within their shares: 60 rounds or more lie between two.

In rounds of the kind ``lone/RANK/E`` the gradients of one rank alone are 2**E times ``normal``. A
rank may take them for a spike of the loss, and begin something anew on which all ranks have to
agree.
"""

import random
from collections.abc import Sequence

GROWN = "grown"
LONE = "lone"
LONE_EXPONENTS = (3, 9)
STAIRCASES = 16
_ROUNDS = 6  # of a staircase: 96 of a run, and 58 are needed (``oracles/long_runs.py``, "Growth")


def growth_of(kind: str) -> int:
    """Return the exponent of the factor by which a kind of gradient has grown; 0 for others."""
    base, _, exponent = kind.partition("/")
    return int(exponent) if base == GROWN else 0


def lone_growth(kind: str, rank: int) -> int:
    """Return the exponent of the factor by which a kind of gradient has grown on one rank alone."""
    base, *words = kind.split("/")
    if base != LONE:
        return 0
    grown, exponent = map(int, words)
    return exponent if rank == grown else 0


def put_lone_spikes(
    rounds: list[str], places: Sequence[int], ranks: int, draws: random.Random
) -> None:
    """Let the gradients of one rank grow alone in single rounds, three to six, each by another
    factor of 2**3 to 2**9.

    Args:
        rounds: the kinds of rounds.
        places: the rounds to choose from.
        ranks: the number of ranks.
        draws: the generator.
    """
    count = min(draws.randint(3, 6), len(places))
    low, high = LONE_EXPONENTS
    exponents = draws.sample(range(low, high + 1), count)
    for place, exponent in zip(draws.sample(places, count), exponents, strict=True):
        rounds[place] = f"{LONE}/{draws.randrange(ranks)}/{exponent}"


def put_staircases(rounds: list[str], draws: random.Random) -> None:
    """Let gradients grow at drawn places."""
    share = len(rounds) // STAIRCASES
    slack = share // 8
    for number in range(STAIRCASES):
        begin = (number + 1) * share - _ROUNDS - draws.randint(0, slack)
        rounds[begin : begin + _ROUNDS] = _staircase(draws)


def _staircase(draws: random.Random) -> list[str]:
    larger_from = draws.randrange(_ROUNDS)
    return [f"{GROWN}/{3 * (number + 1) + (number >= larger_from)}" for number in range(_ROUNDS)]

"""Gradients that are zero for one parameter on all ranks in hundreds of steps, and then return.

In training the weight of a loss may be zero at first, or the layers of a task may rest: DDP has the
parameter in its bucket all the same. A hook that gives it up after so many steps of zeros keeps the
ranks' own gradients from then on. So does one that watches the first steps alone, and leaves out
the parameters that no rank has used by then. Another parameter therefore rests from the first round
on.

``resting/3`` is ``crafted``, but for the parameter of index 3.
"""

import math
import random
from collections.abc import Sequence

RESTING = "resting"
_ROUNDS = (150, 350)
_FIRST_ROUNDS = (2, 300)


def rests(kind: str, param: int) -> bool:
    """Whether the gradients of a parameter are zero in steps of a kind."""
    return kind == f"{RESTING}/{param}"


def put_rest(rounds: list[str], params: Sequence[int], draws: random.Random) -> range:
    """Let one of some parameters rest for drawn rounds, and return these.

    They end in the first two thirds, so that its gradients return for long.

    Args:
        rounds: the kinds of rounds.
        params: the indices of the parameters to choose from.
        draws: the generator.
    """
    count = draws.randint(*_ROUNDS)
    begin = draws.randint(_ROUNDS[0], len(rounds) * 2 // 3 - count)
    rounds[begin : begin + count] = [f"{RESTING}/{draws.choice(params)}"] * count
    return range(begin, begin + count)


def put_first_rest(
    rounds: list[str], params: Sequence[int], later: range, draws: random.Random
) -> range:
    """Let another parameter rest from the first round on, and return these rounds.

    They are 2 to 300, each number as likely as its double, and end before the later rest begins.

    Args:
        rounds: the kinds of rounds.
        params: the indices of the parameters to choose from.
        later: the rounds in which one of them rests already.
        draws: the generator.
    """
    others = [param for param in params if not rests(rounds[later.start], param)]
    drawn = round(2.0 ** draws.uniform(*map(math.log2, _FIRST_ROUNDS)))
    count = min(drawn, later.start)
    rounds[:count] = [f"{RESTING}/{draws.choice(others)}"] * count
    return range(count)

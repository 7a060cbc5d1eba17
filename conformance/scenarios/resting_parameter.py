"""Gradients that are zero for one parameter on all ranks in hundreds of steps, and then return.

In training the weight of a loss may be zero at first, or the layers of a task may rest: DDP has the
parameter in its bucket all the same. A hook that gives it up after so many steps of zeros keeps the
ranks' own gradients from then on.

``resting/3`` is ``crafted``, but for the parameter of index 3.
"""

import random
from collections.abc import Sequence

RESTING = "resting"
_ROUNDS = (150, 350)


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

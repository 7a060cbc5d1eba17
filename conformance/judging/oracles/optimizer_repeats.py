"""Steps of an optimizer wrapper that are repeated from a restored state.

No bound is needed: with the same gradients, two ranks, and the same state, a step gives the same
bits, in an optimizer that was made anew, too. A wrapper that draws random numbers of its own, as
for stochastic rounding, does not repeat a step, and is recognised by that: no two passes are alike
that begin with a load of the same state.
"""

from itertools import combinations

import torch

from conformance.judging.oracles.optimizer_steps import result
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.optimizer_repeats import PASSES, REPEATED_STEPS
from conformance.scenarios.optimizer_training import kept_plan

OWN_RANDOM_NUMBERS = (
    "bits after a load are not judged: steps from one loaded state differ, as with random numbers "
    "of its own"
)
NOT_REMADE = (
    "states that are loaded into an optimizer that was made anew are not judged: the target is one "
    "existing object, which cannot be made twice"
)
_CAUSE = (
    "the state was rounded or lost: load_state_dict of torch.optim.Optimizer gives a state the "
    "dtype of its parameter"
)
_CAUSE_IF_REMADE = (
    "an optimizer that was made anew has lost a part of the state, as copies of parameters in "
    "float32 that are made in the first step"
)


def require_repeated(run: Run, found: Found) -> None:
    """Require that repeated steps give the bits that they gave before the state was loaded."""
    passes = PASSES
    if any(rank.first("not_remade") for rank in run.ranks):
        found.leaves_out(NOT_REMADE)
        passes -= 1
    if not any(_are_equal(run, *pair) for pair in combinations(range(1, passes), 2)):
        found.leaves_out(OWN_RANDOM_NUMBERS)
        return
    restored, saved = kept_plan(run.scenario).back
    for number in range(1, passes):
        for rank in run.ranks:
            for later in range(REPEATED_STEPS):
                step = restored + (number - 1) * REPEATED_STEPS + later
                for index in range(len(run.scenario.params)):
                    first = result(run, rank.rank, saved + 1 + later, index)
                    got = result(run, rank.rank, step, index)
                    # NaN would differ from itself; other rules judge such values.
                    wrong = (first != got).nonzero()
                    found.checked(1)
                    if not len(wrong):
                        continue
                    at = int(wrong[0])
                    is_remade = number == PASSES - 1
                    found.require(
                        False,
                        f"the bits of step {saved + 1 + later}, which it repeats from the same "
                        f"state: {first[at].item():.9g}",
                        f"rank {rank.rank}, step {step}, p{index}, index {at}: "
                        f"{got[at].item():.9g} ({len(wrong)} of {len(got)} elements differ)",
                        _CAUSE_IF_REMADE if is_remade else _CAUSE,
                    )


def _are_equal(run: Run, one: int, other: int) -> bool:
    """Whether two passes of the same steps have given the same bits."""
    first = kept_plan(run.scenario).back[1] + 1
    return all(
        torch.equal(
            result(run, rank.rank, first + one * REPEATED_STEPS + later, index),
            result(run, rank.rank, first + other * REPEATED_STEPS + later, index),
        )
        for rank in run.ranks
        for later in range(REPEATED_STEPS)
        for index in range(len(run.scenario.params))
    )

"""Steps of an optimizer wrapper that are repeated from a restored state.

No bound is needed: with the same gradients, two ranks, and the same state, a step gives the same
bits. A wrapper that draws random numbers of its own, as for stochastic rounding, does not repeat a
step, and is recognised by that: the second and the third pass differ too, and both begin with a
load of the same state.
"""

from collections.abc import Iterator

import torch

from conformance.judging.oracles.optimizer import result
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.optimizer_repeats import PASSES, REPEATED_STEPS
from conformance.scenarios.optimizer_training import plan_of

OWN_RANDOM_NUMBERS = (
    "bits after a load are not judged: steps from one loaded state differ, as with random numbers "
    "of its own"
)
_CAUSE = (
    "the state was rounded or lost: load_state_dict of torch.optim.Optimizer gives a state the "
    "dtype of its parameter"
)


def require_repeated(run: Run, found: Found) -> None:
    """Require that repeated steps give the bits that they gave before the state was loaded."""
    if not all(torch.equal(one, other) for one, other in _pairs(run, 1, 2)):
        found.leaves_out(OWN_RANDOM_NUMBERS)
        return
    restored, saved = plan_of(run.scenario).back
    for number in range(1, PASSES):
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
                    found.require(
                        False,
                        f"the bits of step {saved + 1 + later}, which it repeats from the same "
                        f"state: {first[at].item():.9g}",
                        f"rank {rank.rank}, step {step}, p{index}, index {at}: "
                        f"{got[at].item():.9g} ({len(wrong)} of {len(got)} elements differ)",
                        _CAUSE,
                    )


def _pairs(run: Run, one: int, other: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters after the same steps of two passes."""
    first = plan_of(run.scenario).back[1] + 1
    for rank in run.ranks:
        for later in range(REPEATED_STEPS):
            for index in range(len(run.scenario.params)):
                steps = (first + number * REPEATED_STEPS + later for number in (one, other))
                before, after = (result(run, rank.rank, step, index) for step in steps)
                yield before, after

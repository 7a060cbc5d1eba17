"""All numbers that a joinable computes while some ranks have joined: gradients and states."""

from collections.abc import Collection
from functools import partial

from conformance.judging.oracles.join_clipping import Clipping
from conformance.judging.oracles.join_gradients import require_gradients_of_trainers
from conformance.judging.oracles.join_states import (
    require_even_bodies,
    require_last_state,
    require_replicas,
)
from conformance.judging.verdict import Found
from conformance.records.run import Run


def require_numbers(
    run: Run,
    found: Found,
    even_contexts: tuple[int, ...] = (0,),
    clipping: Clipping | None = None,
    computed: Collection[str] = (),
) -> None:
    """Require gradients, replicas, the last state and that of even bodies, as far as each of them
    applies.
    """
    require_gradients = partial(
        require_gradients_of_trainers, even_contexts=even_contexts, clipping=clipping
    )
    require_last = partial(require_last_state, computed=computed)
    requirements = (require_gradients, require_replicas, require_last, require_even_bodies)
    for require in requirements:
        trial = Found()
        require(run, trial)
        found.checked(trial.checks)
        found.failures += trial.failures

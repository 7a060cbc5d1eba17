"""The state after a join if integers that count steps or inputs are large.

A joinable is trained with even inputs, which show the integers that count up. In new ones they
begin with a large number, the same on all ranks. Such a joinable may refuse even inputs by an error
on every rank: an integer may be a place in a table. Otherwise all ranks hold the same state after
uneven inputs, as far as they do after the first context. Integers of int64 are then raised further,
beyond those of int32, in the same contexts again.
"""

from conformance.judging.oracles.join import members, raised
from conformance.judging.oracles.join_numbers import require_replicas
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.join_draws import HUGE_TRIAL, LARGE_TRIAL

NO_COUNTS = "it has no integers that count up in each step"

_IN_FLOAT32 = "an integer beyond 2**24 is handed out, or counted, in float32"
_IN_INT32 = "an integer beyond 2**31 is handed out, or counted, in int32 or float32"


def require_same_counts(run: Run, found: Found) -> None:
    """Require the same state on all ranks after uneven inputs."""
    if not any(event["names"] for rank in run.ranks for event in rank.all("counts_raised")):
        found.does_not_apply(NO_COUNTS)
        return
    errors = [(member.context, raised(member)) for member in members(run) if raised(member)]
    if any(context == LARGE_TRIAL for context, _ in errors):
        found.does_not_apply(f"it refuses large integers that count up: {errors[0][1]}")
        return
    for context, error in errors:
        if context != HUGE_TRIAL:
            found.require(False, "no exception", f"context {context}: {error}")
    contexts = sorted({member.context for member in members(run)})
    large = [context for context in contexts if LARGE_TRIAL <= context < HUGE_TRIAL]
    require_replicas(run, found, _IN_FLOAT32, large)
    refused = any(context == HUGE_TRIAL for context, _ in errors)
    huge = [context for context in contexts if context >= HUGE_TRIAL and not refused]
    require_replicas(run, found, _IN_INT32, huge)

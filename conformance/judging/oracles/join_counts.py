"""The state after a join if counts of steps or inputs are large.

A joinable is trained with even inputs, which show the integers that count up. In new ones they
begin with a large number, the same on all ranks. Such a joinable may refuse even inputs by an error
on every rank: an integer may be a place in a table. Otherwise all ranks hold the same state after
uneven inputs, as far as they do after the first context. Integers of int64 are then raised further,
beyond those of int32, in the same contexts again; and in these once more whole numbers in float64.

A number in float64 among the attributes of a joinable may be a rank's own, such as a count of its
inputs. Uneven inputs without a raised count show which numbers all ranks hold alike after a join.
"""

from conformance.judging.oracles.join import members, raised
from conformance.judging.oracles.join_states import require_replicas
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.join_draws import (
    FLOAT64_TRIAL,
    HUGE_TRIAL,
    LARGE_TRIAL,
    NONE_RAISED,
    TRIALS,
)

NO_COUNTS = "it has no integers, and no whole numbers in float64, that count up in each step"

_CAUSES = {
    LARGE_TRIAL: "an integer beyond 2**24 is handed out, or counted, in float32",
    HUGE_TRIAL: "an integer beyond 2**31 is handed out, or counted, in int32 or float32",
    FLOAT64_TRIAL: "a count in float64 is handed out, or counted, in float32 or int32",
}


def require_same_counts(run: Run, found: Found) -> None:
    """Require the same state on all ranks after uneven inputs."""
    if not any(event["names"] for rank in run.ranks for event in rank.all("counts_raised")):
        found.does_not_apply(NO_COUNTS)
        return
    errors = {member.context: raised(member) for member in members(run) if raised(member)}
    for context, error in errors.items():
        if context not in TRIALS:
            found.require(False, "no exception", f"context {context}: {error}")
    present = sorted({member.context for member in members(run)})
    are_judged = False
    for trial in TRIALS:
        contexts = [context for context in present if trial <= context < trial + 3]
        if not contexts or trial in errors:
            continue
        are_judged = True
        require_replicas(run, found, _CAUSES[trial], contexts)
        if trial == FLOAT64_TRIAL:
            _require_same_numbers(run, found, contexts)
    if not are_judged and not found.failures:
        refused = next(iter(errors.values()))
        found.does_not_apply(f"it refuses large numbers that count up: {refused}")


def _require_same_numbers(run: Run, found: Found, contexts: list[int]) -> None:
    """Require the same numbers on all ranks, as far as they are after a join without large ones."""
    alike = {name for name, held in _numbers_of(run, NONE_RAISED).items() if len(set(held)) == 1}
    for context in contexts:
        for name, held in _numbers_of(run, context).items():
            if name in alike:
                found.require(
                    len(set(held)) == 1,
                    f"the same {name} on all ranks",
                    f"context {context}: {name} is {', '.join(held)} on ranks 0 to {len(held) - 1}",
                    _CAUSES[FLOAT64_TRIAL],
                )


def _numbers_of(run: Run, context: int) -> dict[str, list[str]]:
    """Return the counts that are numbers on all ranks, after the join of a context, by name."""
    held = [rank.first("counts_left", step=context) for rank in run.ranks]
    values = [event["values"] for event in held if event]
    return {
        name: [of_rank[name] for of_rank in values]
        for name in (values[0] if values else ())
        if all(name in of_rank for of_rank in values)
    }

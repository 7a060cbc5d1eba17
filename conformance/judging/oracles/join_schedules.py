"""Schedules and optimizers that a joinable goes on to use after a join.

A schedule changes a hyperparameter by the number of steps. After a join it goes on, even if a rate
follows the number of contexts besides: it has lost its optimizer if the hyperparameter stays where
it was at the join, in so many steps that it had to change.

Rates of each step. A hyperparameter that changes in each step of one context, and at the place of
the second context too, has to change in the second context.

Steps of a staircase. Let w(0), ..., w(T + M - 1) be its values after the steps of one context. In a
second run T steps are taken in two contexts, one with uneven inputs, and M in a third. The schedule
may count the steps of the ranks that train, or those of this rank, or begin anew with the context:
its first step there is one of 0 to T. If each window w(t), ..., w(t + M - 1) with t from 0 to T has
two values or more, then so has the third context; and if it has only the value at the join before,
the schedule writes to something that the optimizer no longer reads.

Parameters. The same holds for the optimizer: if all parameters that have gradients in one context
are in the groups of an optimizer, then they are so after a join.
"""

from conformance.judging.oracles.join import Event
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.join_part_draws import (
    AFTER_EVEN,
    FIRST_PART,
    INTERRUPTED,
    SCHEDULE,
    SCHEDULE_AFTER_JOINS,
    SECOND_PART,
    WHOLE,
    part_contexts,
    uneven_contexts,
)

Traces = list[dict[int, Event]]

LOST = "a schedule writes to a group that load_state_dict() has replaced"


def require_lasting_schedules(run: Run, found: Found) -> None:
    """Require that hyperparameters go on changing, and that optimizers keep their parameters."""
    whole = traced(run, WHOLE)
    contexts = [(FIRST_PART, SECOND_PART, list(range(run.world)))]
    # A rank that joins early has taken other steps than the single context has at that place.
    contexts += [
        (one.plain, one.rest, [one.late])
        for one in uneven_contexts(run.scenario, run.world)
        if one.rest is not None
    ]
    for first, second, ranks in contexts:
        before, after = traced(run, first), traced(run, second)
        for rank in ranks:
            if whole[rank] and before[rank] and after[rank]:
                _require_changes(whole[rank], before[rank], after[rank], rank, second, found)
    seconds = [second for _, second, _ in contexts]
    for rank, steps in enumerate(whole):
        _require_parameters_of_optimizers(run, steps, rank, [*seconds, INTERRUPTED[-1]], found)
    _require_stairs(run, found)


def traced(run: Run, context: int) -> Traces:
    """Return the traces of a context's steps by their number, for each rank."""
    planned = part_contexts(run.scenario, run.world)[context]
    return [
        {
            at: rank.one("traced", step=context, at=at)
            for at in range(planned.begin, planned.begin + planned.taken(place))
        }
        for place, rank in enumerate(run.ranks)
    ]


def _require_changes(
    whole: dict[int, Event],
    before: dict[int, Event],
    after: dict[int, Event],
    rank: int,
    second: int,
    found: Found,
) -> None:
    last = max(before)
    for name, value in before[last]["settings"].items():
        rates = [whole[at]["settings"].get(name) for at in (last, *sorted(after))]
        if rates[0] != value or len(set(rates)) < len(rates):
            continue
        later = {event["settings"].get(name) for event in after.values()}
        found.require(
            later != {value},
            f"{name} that goes on changing in each step, as in one context",
            f"rank {rank}, context {second}: {name} stays {value}, as at the join before",
            LOST,
        )


def _require_parameters_of_optimizers(
    run: Run, whole: dict[int, Event], rank: int, contexts: list[int], found: Found
) -> None:
    if not whole or not all(event["is_held"] and event["local"] for event in whole.values()):
        return
    for context in contexts:
        for at, event in traced(run, context)[rank].items():
            found.require(
                event["is_held"],
                "parameters with gradients in the groups of an optimizer, as in one context",
                f"rank {rank}, context {context}, step {at}: no optimizer has some of them",
                "a join has replaced a model, or its parameters, and the optimizer goes on to step "
                "the old ones",
            )


def _require_stairs(run: Run, found: Found) -> None:
    contexts = part_contexts(run.scenario, run.world)
    taken = contexts[SCHEDULE_AFTER_JOINS].begin
    for place in range(run.world):
        whole, before, after = (
            _values(run, place, context) for context in (SCHEDULE, AFTER_EVEN, SCHEDULE_AFTER_JOINS)
        )
        for name in sorted(whole.keys() & before.keys() & after.keys()):
            count = len(after[name])
            windows = [whole[name][at : at + count] for at in range(taken + 1)]
            if any(len(set(window)) == 1 for window in windows):
                continue
            value = before[name][-1]
            found.require(
                set(after[name]) != {value},
                f"{name} that changes in {count} steps of a context, as in those of the first one",
                f"rank {run.ranks[place].rank}, context {SCHEDULE_AFTER_JOINS}: {name} stays "
                f"{value}, as at the join before",
                LOST,
            )


def _values(run: Run, place: int, context: int) -> dict[str, list[str]]:
    """Return the values of hyperparameters after each step of a context, by their name."""
    planned = part_contexts(run.scenario, run.world)[context]
    rank = run.ranks[place]
    settings: dict[str, str] = rank.one("rates", step=context, at=planned.begin)["settings"]
    names = set(settings)
    changes = {event["at"]: event["settings"] for event in rank.all("rates", step=context)}
    found: dict[str, list[str]] = {name: [] for name in names}
    for at in range(planned.begin, planned.begin + planned.inputs[place]):
        settings = changes.get(at, settings)
        for name in names:
            found[name].append(settings.get(name, "none"))
    return found

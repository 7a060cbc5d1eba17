"""Gradients and the state that a joinable leaves in steps outside of any join context.

An epoch in which all ranks have as many inputs needs no context. The steps are taken by a joinable
of its own, before the first context: as many as that context has inputs, from the same seeds. A
joinable may refuse such a step by an error, on every rank.

Gradients have the meaning that they have in the first context, in which inputs are even too: means
or sums over all ranks. The bound is that of ``join_gradients``.

State. Gradients are read when a step is over, and do not tell what the optimizer has used, nor with
which parameters and buffers they were computed. The first context shows the state that steps keep
the same on all ranks: what is so at the end of its body, to the bit, and after the join of each
context. As many steps outside of a context have to keep it so too. This is required of two ranks:
the sum of two numbers is the same in any order, while of more ranks each may add its own number
first, and round otherwise than its peers. A tensor that parts by such a rounding can be the same
on all ranks of one context by chance.
"""

from conformance.judging.oracles.join import Member, members
from conformance.judging.oracles.join_gradients import (
    NO_GRADIENTS,
    OTHER_GRADIENTS,
    fits,
    have_shapes,
    places_of,
    ways,
)
from conformance.judging.oracles.join_states import state_of
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.joinable import lengths


def require_outside(run: Run, found: Found) -> None:
    """Require means or sums, and the same state on both ranks, in steps before the first context,
    as in that context; or an error on every rank.
    """
    first = [member for member in members(run) if member.context == 0]
    outside = [
        Member(member.rank, outside_step(run, member.group), member.inputs, member.group)
        for member in first
    ]
    refusals = {member.rank.rank: list(member.events("refused_outside")) for member in outside}
    refusing = [rank for rank, events in refusals.items() if events]
    if refusing:
        found.require(
            len(refusing) == len(refusals),
            "a step outside of a context, or an error on every rank",
            f"ranks {refusing} alone raise an error",
        )
        found.note(f"steps outside of a context: {refusals[refusing[0]][0]['error']}")
        return
    gradients, state = Found(), Found()
    _require_means(run, first, outside, gradients)
    _require_replicas(run, outside, state)
    for trial in (gradients, state):
        found.checked(trial.checks)
        found.failures += trial.failures
    if not found.checks:
        found.does_not_apply(gradients.not_applicable or NO_GRADIENTS)


def _require_means(run: Run, first: list[Member], outside: list[Member], found: Found) -> None:
    if not have_shapes(run, found):
        return
    inside = places_of(run, first)
    if not inside:
        found.does_not_apply(NO_GRADIENTS)
        return
    meanings = ways(run, inside)
    if not meanings:
        found.does_not_apply(OTHER_GRADIENTS)
        return
    for member, at, index in places_of(run, outside):
        sizes = [len(member.group) if is_mean else 1 for is_mean in meanings]
        found.require(
            any(fits(run, (member, at, index), size) for size in sizes),
            f"the sum of the gradients of ranks {list(member.group)}, divided by {sizes[0]}, as in "
            "the first context",
            f"rank {member.rank.rank}, step {at} before the first context, parameter {index}: "
            "the gradient has other values",
            "the step may need what a join hook sets up in the first context",
        )


def _require_replicas(run: Run, outside: list[Member], found: Found) -> None:
    if not outside or len(outside[0].group) != 2:
        return
    held = [state_of(member, "outside") for member in outside]
    for name in _kept_alike(run):
        digests = {state.get(name, "none") for state in held}
        if digests == {"none"}:
            continue
        found.require(
            len(digests) == 1,
            f"the same {name} on all ranks after steps outside of a context, as at the end of the "
            "body of the first context",
            f"{name} differs between the ranks after {outside[0].most_inputs} steps before the "
            "first context",
            "an average over the ranks, or a common initial state, may be set up only when the "
            "first context is entered",
        )


def _kept_alike(run: Run) -> list[str]:
    """Return the names of the state that is the same on all ranks at the end of the first body, and
    after each join.
    """
    by_context: dict[tuple[int, str], list[dict[str, str]]] = {}
    for member in members(run):
        for when in ("leaving", "left"):
            if when == "left" or member.context == 0:
                by_context.setdefault((member.context, when), []).append(state_of(member, when))
    names = by_context[0, "leaving"][0] if by_context else {}
    return [
        name
        for name in names
        if all(
            len({state.get(name, "none") for state in states}) == 1
            for states in by_context.values()
        )
    ]


def outside_step(run: Run, group: tuple[int, ...]) -> int:
    """Return the number that steps before the first context have on record."""
    return len(lengths(run.scenario, group))

"""Gradients that a joinable leaves in steps outside of any join context.

An epoch in which all ranks have as many inputs needs no context. The steps are taken by a joinable
of its own, before the first context, and their gradients have the meaning that they have in the
first context, in which inputs are even too: means or sums over all ranks. The bound is that of
``join_numbers``. A joinable may refuse such a step by an error, on every rank.
"""

from conformance.judging.oracles.join import Member, members
from conformance.judging.oracles.join_numbers import (
    NO_GRADIENTS,
    OTHER_GRADIENTS,
    fits,
    have_shapes,
    places_of,
    ways,
)
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.join_draws import OUTSIDE_STEPS
from conformance.scenarios.joinable import lengths


def require_means_outside(run: Run, found: Found) -> None:
    """Require means or sums in steps before the first context, as in that context."""
    if not have_shapes(run, found):
        return
    first = [member for member in members(run) if member.context == 0]
    inside = places_of(run, first)
    if not inside:
        found.does_not_apply(NO_GRADIENTS)
        return
    meanings = ways(run, inside)
    if not meanings:
        found.does_not_apply(OTHER_GRADIENTS)
        return
    outside = [
        Member(
            member.rank,
            outside_step(run, member.group),
            (OUTSIDE_STEPS,) * len(member.group),
            member.group,
        )
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
    for place in places_of(run, outside):
        member, at, index = place
        sizes = [len(member.group) if is_mean else 1 for is_mean in meanings]
        found.require(
            any(fits(run, place, size) for size in sizes),
            f"the sum of the gradients of ranks {list(member.group)}, divided by {sizes[0]}, as in "
            "the first context",
            f"rank {member.rank.rank}, step {at} before the first context, parameter {index}: "
            "another gradient",
            "what a join hook sets up is not there before the first context",
        )
    if not found.checks:
        found.does_not_apply(NO_GRADIENTS)


def outside_step(run: Run, group: tuple[int, ...]) -> int:
    """Return the number that steps before the first context have on record."""
    return len(lengths(run.scenario, group))

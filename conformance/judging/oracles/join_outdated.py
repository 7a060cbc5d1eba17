"""Values that are out of date on ranks that have joined.

A rank that has joined holds values that it no longer updates: those that its steps change, and its
shadows leave as they are. The ranks that train do not know these values, so the same training has
to come out if the rank holds the values of a step earlier. The driver runs a context with uneven
inputs three times, each time with a new joinable: twice as it is, and once with some values that go
back by a step after the first shadow:

    gradients
    tensors that all ranks hold alike after even inputs, and that no shadow changes
    elements of such tensors, if each step of even inputs changes them, and no shadow
    numbers in floating point among the attributes of a joinable

The state of the rank that trains is compared at the end of its body, to the bit, as far as the
first two runs leave the same bits, and its own number if one has gone back. Tensors of one rank
alone, such as a sum of its own inputs, may belong to a result of all ranks, and stay as they are.
So do elements and numbers that are not alike on all ranks after the join of the uneven inputs, too.
"""

import itertools

from conformance.judging.oracles.join import Member
from conformance.judging.oracles.join_parts import is_one_object, of_context
from conformance.judging.oracles.join_states import state_of
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.join_part_draws import long_contexts, uneven_contexts

NOTHING_OUTDATED = (
    "a rank that has joined leaves no gradient as it is, and no other value that all ranks hold "
    "alike after a join"
)


def require_nothing_outdated(run: Run, found: Found) -> None:
    """Require that ranks that train depend on nothing that a joined rank no longer updates."""
    if is_one_object(run, found):
        return
    contexts = [of(run.scenario, run.world) for of in (uneven_contexts, long_contexts)]
    for uneven in itertools.chain(*contexts):
        plain, again, outdated = (
            of_context(run, context) for context in (uneven.plain, uneven.again, uneven.outdated)
        )
        early = [member for place, member in enumerate(outdated) if place != uneven.late]
        names = list(
            dict.fromkeys(
                name
                for member in early
                for event in member.events("outdated")
                for name in event["names"]
            )
        )
        if not names:
            continue
        late = [members[uneven.late] for members in (plain, again, outdated)]
        numbers = set(names) & _numbers_at_end(late[0]).keys()
        states = [
            state_of(member, "leaving")
            | {name: _numbers_at_end(member).get(name, "none") for name in numbers}
            for member in late
        ]
        _require_same_state(states, names, numbers, early, late[-1], found)
    if not found.checks:
        found.does_not_apply(NOTHING_OUTDATED)


def _numbers_at_end(member: Member) -> dict[str, str]:
    """Return the numbers that a rank has at the end of a body."""
    numbers: dict[str, str] = member.rank.one("held", step=member.context, when="leaving")["floats"]
    return numbers


def _require_same_state(
    states: list[dict[str, str]],
    names: list[str],
    numbers: set[str],
    early: list[Member],
    late: Member,
    found: Found,
) -> None:
    """Require the same state as without the values that are out of date.

    Args:
        states: of the rank that trains: twice without such values, and with them.
        names: the names of these values.
        numbers: those names that belong to numbers.
        early: the ranks that have joined.
        late: the rank that trains.
        found: receives the findings.
    """
    right, repeated, got = states
    compared = [name for name, value in right.items() if repeated.get(name) == value]
    other = [name for name in compared if got.get(name) != right[name]]
    # Elements and numbers, as there are few, come first. Then come values that the ranks have in
    # common: one may be sent as it is.
    names.sort(
        key=lambda name: (
            name.startswith("gradient"),
            name not in numbers and not name.endswith("elements)"),
            name not in other,
        )
    )
    found.checked(len(compared) - len(other))
    ranks = " and ".join(f"rank {member.rank.rank}" for member in early)
    for name in other:
        more = ", ..." if len(names) > 3 else ""
        found.require(
            False,
            f"{name} with the same value, whatever is in the state of {ranks} that shadowed steps "
            "do not update",
            f"{late}: {name} changed when the kit put older values into that state of {ranks}",
            "a joined rank sends one of these values, or computes with it in a shadowed step: "
            f"{', '.join(names[:3])}{more}",
        )

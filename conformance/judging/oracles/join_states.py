"""The state that a joinable leaves on ranks while some of them have joined.

The driver records digests of all tensors of the state at the end of the body, and after the
join. The first context shows here too the replicated tensors: those that are the same on all
ranks after the join. They have to be so after uneven inputs. If they are also those that a rank
held at the end of its body, the join hands out a state and computes none. After uneven inputs it
has to be that of a rank that joined last: all others have missed steps. Digests are compared bit
for bit: copies round nothing.

A replicated tensor may also be the same on all ranks at the end of the even body of the first
context, as parameters are that step with mean gradients. Then it has to be so at the end of each
later even body, if the context before it has ended with a join: otherwise a part of the state has
not been handed out, as a count of steps.
"""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise

from conformance.judging.oracles.join import Member, contexts_of, members_of
from conformance.judging.oracles.join_gradients import has_own_gradients
from conformance.judging.verdict import Found
from conformance.records.run import Run

# Names of parameters and of an optimizer's state, see ``ranks/drivers/_join_numbers.py``.
_OF_TRAINING = re.compile(r"(?:^|\.)(?:parameter|group) \d")
NO_STATE = "it has no parameters, buffers or state_dict() that ranks replicate after even inputs"
COMPUTED_STATE = "its join computes a state: after even inputs it is not what a rank held before"


def require_replicas(
    run: Run,
    found: Found,
    cause: str = "ranks that joined early keep values of their own",
    contexts: Sequence[int] | None = None,
) -> None:
    """Require the same state on all ranks after uneven inputs: by default after all of these."""
    names = _replicated(run)
    if not names:
        found.does_not_apply(NO_STATE)
        return
    for context in contexts_of(run)[1:] if contexts is None else contexts:
        for name in names:
            held = {
                m.rank.rank: state_of(m, "left").get(name, "none") for m in members_of(run, context)
            }
            first = next(members_of(run, context))
            differing = [rank for rank, digest in held.items() if digest != held[first.rank.rank]]
            found.require(
                not differing,
                f"the same {name} on all ranks",
                f"{first}: {name} differs on ranks {differing}",
                cause,
            )


def require_last_state(run: Run, found: Found, computed: Collection[str] = ()) -> None:
    """Require the state that a rank with the most inputs held at the end of its body.

    Args:
        run: the run.
        found: the findings.
        computed: parts of the state that other contexts compute as they end.
    """
    replicated = _replicated(run)
    if not replicated:
        found.does_not_apply(NO_STATE)
        return
    computed = {*computed, *computed_states(run)}
    names = [name for name in replicated if name not in computed]
    if not names:
        found.does_not_apply(COMPUTED_STATE)
        return
    for context in contexts_of(run)[1:]:
        group = list(members_of(run, context))
        last = [member for member in group if member.own_inputs == member.most_inputs]
        for name in names:
            right = {state_of(member, "leaving").get(name, "none") for member in last}
            early = {
                state_of(member, "leaving").get(name, "none"): member.rank.rank
                for member in group
                if member not in last
            }
            for member in group:
                got = state_of(member, "left").get(name, "none")
                cause = ""
                if got in early:
                    cause = f"these are the values of rank {early[got]}, which joined early"
                found.require(
                    got in right,
                    f"{name} as on ranks {[m.rank.rank for m in last]} at the end of their bodies",
                    f"{member}: {name} has other values",
                    cause,
                )


def require_even_bodies(run: Run, found: Found) -> None:
    """Require the same state on all ranks at the end of even bodies that follow a join.

    If each rank has gradients of its own in the first context, then models part between averages,
    and may have been the same at the end of that context because its last step was one.
    """
    if has_own_gradients(run):
        return
    even = [state_of(member, "leaving") for member in members_of(run, 0)]
    names = [name for name in _replicated(run) if len({of.get(name, "none") for of in even}) == 1]
    for before, context in pairwise(contexts_of(run)):
        group = list(members_of(run, context))
        is_even = {member.own_inputs for member in group} == {group[0].most_inputs}
        has_joined = all(state_of(member, "left") for member in members_of(run, before))
        if context != before + 1 or not is_even or not has_joined:
            continue
        for name in names:
            held = {m.rank.rank: state_of(m, "leaving").get(name, "none") for m in group}
            right = held[group[0].rank.rank]
            differing = [rank for rank, digest in held.items() if digest != right]
            found.require(
                not differing,
                f"the same {name} on all ranks at the end of an even body, as in the first context",
                f"{group[0]}: {name} differs on ranks {differing}",
                "a part of the state is not handed out, such as a count of steps",
            )


def state_of(member: Member, when: str) -> dict[str, str]:
    """Return the digests of the state that a rank has at some point of a context."""
    for event in member.events("state_of_joinable"):
        if event["when"] == when:
            digests: dict[str, str] = event["digests"]
            return digests
    return {}


def _replicated(run: Run) -> list[str]:
    """Return the names of the state that all ranks hold alike after even inputs."""
    held = [state_of(member, "left") for member in members_of(run, 0)]
    if not held:
        return []
    return [name for name in held[0] if len({state.get(name, "none") for state in held}) == 1]


def computed_states(run: Run) -> set[str]:
    """Return the parts of the state that some context with even inputs leaves as no rank held them.

    They are computed as it ends, such as a copy of the model at the end of every third context.
    Parameters and the state of an optimizer may be computed in every context, from the first one
    on, and not in some alone: what a context then does to them is a defect.
    """
    computed = set()
    for context in contexts_of(run):
        group = list(members_of(run, context))
        if {member.own_inputs for member in group} != {group[0].most_inputs}:
            continue
        for name, after in state_of(group[0], "left").items():
            if context and _OF_TRAINING.search(name):
                continue
            if after not in [state_of(member, "leaving").get(name, "none") for member in group]:
                computed.add(name)
    return computed

"""Right modes in a join context, and other requirements of joins in loops.

The code around a context sets modes: of autograd and autocast, torch's default dtype, the mode of
training of each module, and requires_grad of each parameter. The body of the context, its hooks and
the code after it are that code's, too. So every reading in a context, and after it, has to equal
the reading before it.

The body of a context may change modes, hyperparameters and settings of torch for good, and the
driver's does so in each context: an event with ``changes`` is such a change. Later readings have to
equal it.

Random generators, gradients and hyperparameters are read with the modes. The body of a context
draws numbers and computes gradients, and the context itself does neither: after it, in its hooks
and after an exception, all are as at the end of the body. A context that puts generators back to
their states at its beginning would make every epoch draw the same numbers.

A joinable's own step may change the modes of its modules and parameters, and the first of its steps
does. Only the join is judged then: after it, they are those at the end of the body, on ranks with
an input.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.judging.oracles.join import Event, Member, is_context, members, raised
from conformance.judging.verdict import Found
from conformance.records.run import Run

_BEFORE = "before the context"
_SAVED = (
    "the context or a hook sets this value for its own work, or restores the one that it saved on "
    "entering, although the body has changed it since"
)
_IN_HOOKS = ("in a main hook", "in a post hook")
_AFTER = ("in a collective of the join", "after the context", "after an exception")


def require_modes(run: Run, found: Found) -> None:
    """Require the modes that the code around each context has set."""
    hooks = 0
    for member in members(run):
        readings = list(member.events("modes"))
        if not readings or readings[0]["place"] != _BEFORE:
            found.require(False, "modes on record", f"{member}: none")
            continue
        _require_modes_of_torch(member, readings, found)
        _require_modes_of_modules(run, member, readings, found)
        if is_context(run):
            _require_state_of_body(member, readings, found)
        hooks += _count_of_hooks(member, found)
    if not hooks and not found.failures:
        found.lacks_evidence("no hook has read the modes")


def require_collectives_of_group(member: Member, found: Found) -> None:
    """Require that a context issues collectives on ranks of its group alone."""
    for event in member.events("collective"):
        found.require(
            set(event["group"]) <= set(member.group),
            f"collectives of ranks {member.group} only",
            f"{member}: {event['what']} on ranks {event['group']}",
            "the group of another context of the process",
        )


def require_thrown(member: Member, found: Found) -> None:
    """Require an exception on every rank as soon as one has run out of inputs before others, and
    none if all have equally many.
    """
    fewest = min(member.inputs)
    error = raised(member)
    if member.most_inputs > fewest:
        actual = f"{member}: it left the context without one"
        found.require(bool(error), "an exception on every rank", actual)
    else:
        found.require(not error, "no exception", f"{member}: {error}")
    took = len(list(member.events("took")))
    found.require(took == fewest, f"{fewest} steps", f"{member}: {took} steps")


def refuses_to_be_entered_again(run: Run) -> bool:
    """Return whether a context raises on all ranks as it is entered for the second time."""
    second = [member for member in members(run) if member.context == 1]
    return len(second) == run.world and all(
        raised(member) and not list(member.events("begun")) for member in second
    )


def require_came_to_its_end(member: Member, found: Found) -> None:
    """Require that no exception has left a context."""
    error = raised(member)
    found.require(not error, "no exception", f"{member}: {error}")


def _require_modes_of_torch(member: Member, readings: list[Event], found: Found) -> None:
    first = before = readings[0]["modes"]
    for event in readings[1:]:
        if event.get("changes"):
            before = event["modes"]
            continue
        for name, value in event["modes"].items():
            right = before.get(name)
            has_changed = right != first.get(name)
            is_put_back = has_changed and value == first.get(name)
            found.require(
                value == right,
                f"{name} {right}, as {'in the body' if has_changed else 'before the context'}",
                f"{member}: {name} {value} {event['place']}",
                _SAVED if is_put_back else "the context, or a hook, changes it for its own work",
            )


def _require_modes_of_modules(
    run: Run, member: Member, readings: list[Event], found: Found
) -> None:
    before: Event = readings[0]
    judged = readings[1:]
    if not is_context(run):
        if not member.own_inputs:
            return
        before = list(_until_end_of_body(readings))[-1]
        judged = readings[readings.index(before) + 1 :]
    for event in judged:
        if event.get("changes"):
            before = event
            continue
        for mode in _OF_MODULES:
            _require_mode(mode, before, event, readings[0], run, member, found)


@dataclass(frozen=True)
class _Mode:
    """A mode of modules.

    Attributes:
        field: of the events of readings.
        name: for people.
        part: has the mode.
        cause: the likely cause of a change.
    """

    field: str
    name: str
    part: str
    cause: str


_OF_MODULES = (
    _Mode(
        "training",
        "the mode of training",
        "module",
        "train() or eval() changes all parts of a model, also those that were frozen",
    ),
    _Mode(
        "requires_grad",
        "requires_grad",
        "parameter",
        "requires_grad_() of a module changes all of its parameters, also those that were frozen",
    ),
)


def _require_state_of_body(member: Member, readings: list[Event], found: Found) -> None:
    """Require the random generators, the gradients and the hyperparameters that the code before a
    context, and its body, have left.
    """
    of_body = list(_until_end_of_body(readings))
    # The first reading of the body comes before its first draw. A reading that equals the one
    # before it is not on record.
    entered = [event for event in of_body[1:2] if not event["drawn"]]
    for event in entered:
        _require_same_state(member, of_body[0], event, "before the context", found)
    left = of_body[-1]
    if any(event["error"] and not event["same"] for event in member.events("came_out")):
        # An exception of the context has ended a step, which may have computed gradients before.
        left = {**left, "gradients": {}}
    for event in readings[len(of_body) :]:
        _require_same_state(member, left, event, "at the end of the body", found)


def _require_same_state(member: Member, left: Event, event: Event, when: str, found: Found) -> None:
    for field, cause in _STATES.items():
        changed = [name for name, value in left[field].items() if value != event[field].get(name)]
        found.require(
            not changed,
            f"the same {field} as {when}",
            f"{member}: {field} changed {event['place']}: {', '.join(changed[:3])}",
            cause,
        )


# What a context leaves alone, with the likely causes of a change.
_STATES = {
    "generators": "the context or a hook restores a saved state of the generator, seeds it, or "
    "draws a number",
    "gradients": "zero_grad() is called when the context begins or ends, or in a shadowed step",
    "hyperparameters": _SAVED,
}


def _require_mode(
    mode: _Mode,
    before: Event,
    event: Event,
    first: Event,
    run: Run,
    member: Member,
    found: Found,
) -> None:
    """Require a mode of modules.

    Args:
        mode: the mode.
        before: a right reading.
        event: the reading that is judged.
        first: the reading before the context, and before the changes that its body makes.
        run: the run.
        member: the rank in the context.
        found: receives the findings.
    """
    right = before[mode.field]
    changed = [name for name, value in event[mode.field].items() if value != right.get(name)]
    names = ", ".join(f"{name} {event[mode.field][name]}" for name in changed[:3])
    is_put_back = all(event[mode.field][name] == first[mode.field].get(name) for name in changed)
    found.require(
        not changed,
        f"{mode.name} that {_owner(run)} has set on each {mode.part}",
        f"{member}: {mode.field} is {names} {event['place']}",
        _SAVED if is_put_back else mode.cause,
    )


def _until_end_of_body(readings: list[Event]) -> Iterator[Event]:
    """Yield the readings up to the last one of the body."""
    for event in readings:
        if event["place"] in (*_IN_HOOKS, *_AFTER):
            return
        yield event


def _owner(run: Run) -> str:
    return "the trainer" if is_context(run) else "the trainer or a step"


def _count_of_hooks(member: Member, found: Found) -> int:
    """Return the number of readings in hooks, and count all of them."""
    hooks = 0
    for event in member.events("modes_read"):
        found.checked(sum(event["counts"].values()))
        hooks += sum(event["counts"].get(place, 0) for place in _IN_HOOKS)
    return hooks

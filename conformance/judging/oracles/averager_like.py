"""How far an averager may be from the reference that it claims to be like.

The reference runs on the same inputs. Both compute, for each element, a recurrence in means over
the group; W is the size of the group, n the number of averages so far, A the largest magnitude that
the element has had so far on any rank, among fed values and results of the reference. With eps the
epsilon of the parameter's dtype, and e that of the dtype in which references keep their state
(float32, or the parameter's own if it is wider), a result may be off by three errors:

    means       (W + 2) eps A if values are random, as in ``oracles/averager.py``; crafted values
                have exact means. The mean's error enters the result with a factor I.
    state       each average takes at most R = 8 operations of half an e each, relative to A. These
                errors stay in the state, and add up to S times one error.
    result      eps A, if a state is rounded to the parameter's dtype.

Two right computations are both off by that much, so that the bound is twice the sum:

    2 (I (W + 2) eps A + R S e A + eps A)

The factors follow from the reference's recurrence.

    means of the parameters alone (periodic, hierarchical, gossip)
        There is no state: I = 1, S = 0, and nothing is rounded again.
    EMA     s <- d s + (1 - d) m
        Errors of means have weights that sum to at most 1: I = 1. State errors shrink by d: S = n.
    outer steps with Nesterov's momentum: d = a - mean; v <- m v + d; a <- a - lr (d + m v)
        An error (x, y) of (a, v) becomes T (x, y) one average later, with
        T = ((1 - lr (1 + m), -lr m**2), (1, m)). With P and Q the sums of |T**k|, k < n, at the
        places (a, a) and (a, v): a mean's error enters a with lr (1 + m) and v with 1, so that
        I = P lr (1 + m) + Q. |v| is at most n times 2 A, and so is its rounding: S = P + 2 n Q.

After special values nothing is known of a state: a result has to be finite whenever the reference's
is, and the bound holds where it is.
"""

from dataclasses import dataclass
from typing import Any

import torch

from conformance.judging.oracles.averager_of_thawed import may_be_none, other_averages
from conformance.judging.oracles.averager_records import calls, fed_to, group_at, same
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.averager import COLUMNS, FLAT
from conformance.scenarios.averager_training import ADDED, CHANGING, IDLE, is_given, turn
from conformance.scenarios.averager_values import has_gradient, is_of_integers
from conformance.scenarios.averaging_schedule import HELD, QUIET
from conformance.scenarios.moved_parameters import specs_at
from conformance.subjects.claims import Claims
from conformance.subjects.kinds._averager_schedule import is_stateful, schedule_of
from conformance.subjects.target import parse_target

# The recorded tensors of a call: the parameters after it, and the averages to evaluate with: after
# it, and right after a state was loaded before it.
EVALUATED = ("parameter", "applied", "restored")
# Operations of one average on the state of a reference, at most.
OPERATIONS = 8


@dataclass(frozen=True)
class Gains:
    """The factors of the bound, for errors of means and for errors of the state."""

    means: float
    state: float
    is_rounded: bool


def gains(claims: Claims, averages: int) -> Gains:
    """Return the factors after a number of averages.

    Args:
        claims: with the claim ``like``.
        averages: the number n of averages so far.
    """
    if not is_stateful(claims.options):
        return Gains(1.0, 0.0, is_rounded=False)
    if claims.reference.startswith("EMA"):
        return Gains(1.0, float(averages), is_rounded=True)
    options = parse_target(f"hooks_ref:{claims.reference}", "--claims like").kwargs
    rate = float(options.get("lr", 0.7))
    momentum = float(options.get("momentum", 0.9))
    transition = torch.tensor(
        [[1 - rate * (1 + momentum), -rate * momentum**2], [1.0, momentum]], dtype=torch.float64
    )
    power = torch.eye(2, dtype=torch.float64)
    of_value = 0.0
    of_velocity = 0.0
    for _ in range(averages):
        of_value += abs(power[0, 0].item())
        of_velocity += abs(power[0, 1].item())
        power = power @ transition
    means = of_value * rate * (1 + momentum) + of_velocity
    return Gains(means, of_value + 2 * averages * of_velocity, is_rounded=True)


def require_like(
    run: Run, claims: Claims, found: Found, names: tuple[str, ...] = ("parameter",)
) -> None:
    """Require the results of the claimed reference after every recorded call.

    Args:
        run: the run, with its reference.
        claims: with the claim ``like``.
        found: receives the findings.
        names: of the recorded tensors.

    If no rank has a gradient of a parameter, the averager may leave it out where the reference does
    not, or the other way: from then on ranks that agree under the reference have to agree here,
    too, and nothing else is required.
    """
    reference = run.reference
    assert reference is not None
    may_leave_out = run.scenario.variant in ("unused", "empty")
    if may_leave_out:
        require_same_agreement(run, found)
    magnitudes = _Magnitudes(run, reference)
    for step in sorted({step for _, step in calls(run)}):
        for index in range(len(run.scenario.params)):
            if may_leave_out and not _is_always_used(run, step, index):
                continue
            largest = magnitudes.after(step, index)
            if _may_differ(run, reference, step, index):
                continue
            bound = _bound(run, claims, step, index, largest)
            for rank in run.ranks:
                for name in names:
                    if name == "applied" and may_be_none(run, claims, rank.rank, step):
                        continue
                    others = other_averages(run, claims, rank.rank, step, index)
                    key = f"{step}/{name}/p{index}"
                    _require_close(
                        run, found, rank.rank, key, bound, claims, others * (name == "applied")
                    )


def _is_always_used(run: Run, step: int, index: int) -> bool:
    """Whether some rank of each group has had a gradient of a parameter in every step so far."""
    groups = {group_at(run, rank.rank, step) for rank in run.ranks}
    return all(
        any(has_gradient(run.scenario, len(group), place, at, index) for place in range(len(group)))
        for group in groups
        for at in range(step + 1)
    )


def require_same_agreement(run: Run, found: Found) -> None:
    """Require that two ranks hold the same bits of a parameter whenever the reference's do.

    The rule does not apply to a run in which they never do, as with gossip among three ranks.
    """
    reference = run.reference
    assert reference is not None
    has_agreed = False
    for first in run.ranks:
        for other in run.ranks[first.rank + 1 :]:
            for key, right in reference.ranks[first.rank].tensors.items():
                agree = same(right, reference.ranks[other.rank].tensors[key]).all()
                if not agree:
                    continue
                has_agreed = True
                if key not in first.tensors:
                    continue
                found.require(
                    bool(same(first.tensors[key], other.tensors[key]).all()),
                    "replicas that agree whenever those of the reference agree",
                    f"ranks {first.rank} and {other.rank} differ in {key} of {run.name}",
                )
    if not has_agreed:
        found.does_not_apply("ranks of the reference hold the same values in no step")


class _Magnitudes:
    """The largest magnitude of each element so far, over ranks, fed values and right results.

    Results from before a state was saved are not on record. Outer steps may have gone beyond the
    fed values, so that a resumed run counts them twice.
    """

    def __init__(self, run: Run, reference: Run) -> None:
        self._run = run
        self._reference = reference
        self._largest: dict[tuple[int, int], torch.Tensor] = {}
        self._seen: dict[tuple[int, int], int] = {}

    def after(self, step: int, index: int) -> torch.Tensor:
        """Return the magnitudes after a step; steps come in their order."""
        scenario = self._run.scenario
        key = turn(scenario, step)[0], index
        for earlier in range(self._seen.get(key, 0), step + 1):
            is_ordinary = scenario.steps[earlier] not in (QUIET, HELD)
            if is_ordinary and turn(scenario, earlier)[0] == key[0]:
                for rank in self._reference.ranks:
                    fed = fed_to(self._run, rank.rank, earlier, index)
                    self._add(key, (1 + scenario.resume.resumes) * fed)
        self._seen[key] = step + 1
        for rank in self._reference.ranks:
            for name in EVALUATED:
                right = rank.tensors.get(f"{step}/{name}/p{index}")
                if right is not None:
                    self._add(key, right.reshape(-1).double())
        return self._largest[key]

    def _add(self, key: tuple[int, int], values: torch.Tensor) -> None:
        finite = values.abs().nan_to_num(0.0, 0.0, 0.0)
        before = self._largest.get(key)
        self._largest[key] = finite if before is None else torch.maximum(before, finite)


def _may_differ(run: Run, reference: Run, step: int, index: int) -> bool:
    """Return whether the averager knew an added parameter earlier than the reference, or knows one
    that was taken out of the list, or is given none while the reference is.
    """
    if run.scenario.variant not in (CHANGING.variant, IDLE.variant):
        return False
    is_added = run.scenario.variant == CHANGING.variant and index == ADDED
    if not is_added and is_given(run.scenario, step, index):
        return False
    made = [one.ranks[0].first("averagers_made") or {} for one in (run, reference)]
    return made[0].get("takes_params") != made[1].get("takes_params")


def _bound(run: Run, claims: Claims, step: int, index: int, largest: torch.Tensor) -> torch.Tensor:
    scenario = run.scenario
    if is_of_integers(scenario.params[index]):
        return torch.zeros_like(largest)
    schedule = schedule_of(claims.options)
    assert schedule is not None
    model, count = turn(scenario, step)
    averages = sum(schedule.is_due(earlier) for earlier in range(count + 1))
    factors = gains(claims, max(averages, 1))
    dtype = getattr(torch, specs_at(scenario, step)[index].dtype)
    eps = torch.finfo(dtype).eps
    eps_of_state = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    earlier_kinds = {
        kind
        for earlier, kind in enumerate(scenario.steps[: step + 1])
        if turn(scenario, earlier)[0] == model
    }
    is_random = "normal" in earlier_kinds
    size = len(group_at(run, 0, step))
    error = factors.means * (size + 2) * eps * is_random
    error += OPERATIONS * factors.state * eps_of_state + factors.is_rounded * eps
    return 2 * error * largest


def require_restored(run: Run, found: Found) -> None:
    """Require that parameters are restored after the averages were written into them, and that the
    state stays the same meanwhile.
    """
    for rank in run.ranks:
        for event in rank.all("evaluated"):
            how = "an exception" if event["failed"] else "the end"
            cause = ""
            if event["failed"]:
                cause = "the parameters are not restored if an exception ends the context"
            elif event.get("nests"):
                cause = (
                    "another applied() was entered inside, and the parameters that are kept for "
                    "the end are those of the inner context"
                )
            found.require(
                not event["changed"],
                f"the parameters as they were, after {how} of an evaluation inside applied()",
                f"rank {rank.rank}, step {event['step']}: other values of "
                f"{', '.join(f'p{index}' for index in event['changed'])}",
                cause,
            )
            _require_same_memory(run, found, rank.rank, event, how)
            others = event.get("changed_gradients", [])
            found.require(
                not others,
                f"the gradients and requires_grad as they were, after {how} of an evaluation "
                "inside applied()",
                f"rank {rank.rank}, step {event['step']}: others for "
                f"{', '.join(f'p{index}' for index in others)}",
                "the evaluation without gradients is not undone: use torch.no_grad()",
            )
            swallowed = event.get("swallowed")
            found.require(
                not swallowed,
                "the exception that ends an evaluation inside applied(), outside of it",
                f"rank {rank.rank}, step {event['step']}: the exception is gone ({swallowed})",
                "__exit__ returns a value that is true, or a return in a finally block",
            )
            found.require(
                event["same_state"],
                "the same state_dict() within applied() as before it",
                f"rank {rank.rank}, step {event['step']}: another one",
                "averages and parameters have changed places: a state that is saved while the "
                "averages are evaluated has the wrong ones",
            )


def _require_same_memory(
    run: Run, found: Found, rank: int, event: dict[str, Any], how: str
) -> None:
    """Require strides as before an evaluation and, of views of a buffer, the memory, too."""
    place = f"rank {rank}, step {event['step']}"
    after = f"after {how} of an evaluation inside applied()"
    strides = ", ".join(f"p{index}" for index in event.get("strides_changed", []))
    found.require(
        not strides,
        f"the same strides as before, {after}",
        f"{place}: others of {strides}",
        "a view of a vector in parameter.data: write the values with parameter.copy_()",
    )
    moved = ", ".join(f"p{index}" for index in event.get("moved", []))
    found.require(
        not moved or run.scenario.variant not in (FLAT.variant, COLUMNS.variant),
        f"the parameters as views of the trainer's buffer, {after}",
        f"{place}: {moved} in other memory",
        "another tensor in parameter.data: write the values with parameter.copy_()",
    )


def require_nested(run: Run, found: Found) -> None:
    """Require that parameters are the averages in an evaluation inside another one, and after it
    until the outer one ends.
    """
    for rank in run.ranks:
        for event in rank.all("nested"):
            places = (("inside", "in the inner of two evaluations"), ("after", "after the inner"))
            for name, where in places:
                found.require(
                    not event[name],
                    "the averages in both of two nested evaluations inside applied()",
                    f"rank {rank.rank}, step {event['step']}: other values of "
                    f"{', '.join(f'p{index}' for index in event[name])} {where}",
                    "the inner context restores the parameters that the outer one has kept",
                )


def _require_close(
    run: Run,
    found: Found,
    rank: int,
    key: str,
    bound: torch.Tensor,
    claims: Claims,
    others: list[torch.Tensor],
) -> None:
    assert run.reference is not None
    expected = run.reference.ranks[rank].tensors.get(key)
    if expected is None:
        return
    got = run.ranks[rank].tensors.get(key)
    if got is None:
        step = int(key.partition("/")[0])
        refused = list(run.ranks[rank].all("not_applied", step=step))
        why = "".join(f"; applied() raised {event['error']}" for event in refused)
        if "/applied/" in key and not refused:
            why = "; the averager has no applied(params), or refuses to be evaluated"
        expected_value = f"a value for {_in_words(key)}, as the reference has"
        found.require(False, expected_value, f"rank {rank}: none{why}")
        return
    right = expected.reshape(-1).double()
    values = got.reshape(-1).double()
    is_fine = same(values, right)
    is_fine |= ((values - right).abs() <= bound) & right.isfinite()
    # An infinity minus an infinity depends on the formula.
    is_fine |= ~values.isfinite() & ~right.isfinite()
    wrong = (~is_fine).nonzero()
    if not len(wrong) or any(bool(((values - other).abs() <= bound).all()) for other in others):
        found.checked(1)
        return
    at = int(wrong[0])
    found.require(
        False,
        f"the result of {claims}: {right[at].item():.9g} within {bound[at].item():.3g}",
        f"rank {rank}, {_in_words(key)} of {run.name}, index {at}: {values[at].item():.9g} "
        f"({len(wrong)} of {len(values)} elements differ)",
    )


def _in_words(key: str) -> str:
    """Return the step, the parameter and the moment of a recorded tensor in words."""
    step, name, parameter = key.split("/")
    moments = {"applied": " in applied()", "restored": " after applied()"}
    return f"step {step}, {parameter}{moments.get(name, '')}"

"""Requires right parameters after the steps of an optimizer wrapper."""

from collections.abc import Callable

import torch

from conformance.judging.oracles.averager_records import same
from conformance.judging.oracles.optimizer_gradients import (
    construction,
    fed_gradient,
)
from conformance.judging.oracles.optimizer_mistakes import cause
from conformance.judging.oracles.optimizer_steps import (
    Steps,
    is_exact_step,
    result,
    right_steps,
    start,
    steps,
)
from conformance.judging.verdict import Found
from conformance.records.run import Run

# Looking for causes takes longer than judging: only the first failures of a run have one.
MAX_EXPLAINED = 50

NO_ADDED_GROUPS = (
    "groups that are added are not judged: it has no add_param_group(), and gets all groups at its "
    "construction"
)

Judged = Callable[[int, int], bool]
"""Whether a parameter is judged, from a step and the parameter's index."""


def require_right(run: Run, found: Found, is_judged: Judged = lambda *_: True) -> None:
    """Require right parameters after every recorded step, or those that are judged."""
    right = right_steps(run)
    note_added_groups(run, found)
    for rank, step in steps(run):
        for index in range(len(run.scenario.params)):
            if is_judged(step, index):
                _require_parameter(run, found, right, rank, step, index)


def note_added_groups(run: Run, found: Found) -> None:
    """Note that no group is added, if the optimizer cannot add any."""
    if run.ranks[0].first("adds_no_groups"):
        found.note(NO_ADDED_GROUPS)


def note_other_names(run: Run, found: Found) -> None:
    """Note the calls that the optimizer does not take, since its parameters have other names."""
    calls = {event["call"] for rank in run.ranks for event in rank.all("not_called")}
    for call in sorted(calls):
        found.note(f"{call} is not judged: its signature does not take this")


def _require_parameter(
    run: Run, found: Found, right: Steps, rank: int, step: int, index: int
) -> None:
    place = f"rank {rank}, step {step}"
    dtype = run.scenario.params[index].dtype
    got_dtype = run.ranks[rank].tensors[f"{step}/parameter/p{index}"].dtype
    found.require(
        got_dtype == getattr(torch, dtype),
        f"a parameter of {dtype}",
        f"{place}: p{index} is {got_dtype}",
    )
    right_step = right[rank, step]
    expected = right_step.after[index]
    got = result(run, rank, step, index)
    is_right = same(got, expected)
    # A weight of infinity is lost: weight decay of 0 makes it NaN.
    was_lost = ~right_step.before[index].isfinite()
    is_right |= was_lost & ~expected.isfinite() & ~got.isfinite()
    if not is_exact_step(run, rank, step):
        is_close = (got - expected).abs() <= 2 * right_step.errors[index]
        is_right |= is_close & expected.isfinite()
    wrong = (~is_right).nonzero()
    if not len(wrong):
        return
    at = int(wrong[0])
    average = ""
    if right_step.averaged:
        average = f", averaged over ranks {list(right_step.averaged)}"
    digits = 17 if dtype == "float64" else 9
    found.require(
        False,
        f"the optimizer's step{average}: {expected[at].item():.{digits}g}",
        f"{place}, p{index}, index {at}: {got[at].item():.{digits}g} "
        f"({len(wrong)} of {len(got)} elements differ)",
        cause(run, right, rank, step, index, got) if len(found.failures) < MAX_EXPLAINED else "",
    )


def require_steps_with_some_gradient(run: Run, found: Found) -> None:
    """Require that each element is stepped with the gradient of one rank, and not with a mean.

    The scenario has no momentum, so that a step is judged from the recorded parameters before it.
    """
    rate = construction(run)["options"]["lr"]
    for rank, step in steps(run):
        group = run.group(rank)
        for index in range(len(run.scenario.params)):
            if step == 0:
                before = start(run, rank, index)
            else:
                before = result(run, rank, step - 1, index)
            grads = [fed_gradient(run, group, place, step, index) for place in range(len(group))]
            got = result(run, rank, step, index)
            fits = torch.stack([same(got, before - rate * grad) for grad in grads]).any(0)
            mean = torch.stack(grads).mean(0)
            at = (~fits).nonzero()
            averaged = bool(len(at)) and bool(same(got, before - rate * mean)[at[0]])
            place = f"rank {rank}, step {step}: p{index}"
            found.require(
                not len(at),
                "a step with the gradient of one rank; or the claim averages",
                f"{place} has been stepped with another gradient",
                "it averages gradients: claim averages" if averaged else "",
            )

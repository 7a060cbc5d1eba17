"""Requirements on the calls of an optimizer wrapper: its averager's, and what it was given."""

from collections.abc import Mapping
from typing import Any

from conformance.judging.oracles.optimizer import require_right
from conformance.judging.oracles.optimizer_gradients import construction, has_own_gradient
from conformance.judging.oracles.optimizer_options import Options
from conformance.judging.oracles.optimizer_steps import overflows, steps
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.optimizer_training import kept_plan
from conformance.scenarios.own_entries import entries_at

OLD_GROUPS = (
    "the user's own entries in groups are not judged after a state was loaded: its param_groups "
    "are not the loaded ones then"
)


def require_one_averager_call(run: Run, found: Found) -> None:
    """Require one call of the averager in each step, after the local step, with all parameters and
    with the gradients that they had.
    """
    for rank, step in steps(run):
        place = f"rank {rank}, step {step}"
        calls = list(run.ranks[rank].all("asked", step=step))
        if len(calls) != 1:
            cause = "the averager's count runs ahead of the steps" if calls else ""
            actual = f"{place}: the averager was called {len(calls)} times"
            found.require(False, "one call of the averager", actual, cause)
            continue
        found.checked(1)
        found.require(
            calls[0]["stepped"],
            "a call of the averager after the optimizer's step",
            f"{place}: no parameter had been stepped before the call",
        )
        _require_whole_call(run, found, rank, calls[0])


def _require_whole_call(run: Run, found: Found, rank: int, call: Mapping[str, Any]) -> None:
    """Require a call of the averager with all parameters, and with their gradients."""
    step = call["step"]
    place = f"rank {rank}, step {step}"
    later = kept_plan(run.scenario).in_no_group(step)
    missing = ", ".join(f"p{index}" for index in call["missing"] if index not in later)
    found.require(
        not missing,
        "a call of the averager with all parameters",
        f"{place}: {missing} missing",
        "the averager was given copies" if call["others"] else "",
    )
    lost = [
        index
        for index in call["without"]
        if index not in later and has_own_gradient(run, rank, step, index)
    ]
    found.require(
        not lost,
        "gradients that stay until the averager was called",
        f"{place}: those of {', '.join(f'p{index}' for index in lost)} were None in the call",
        "averagers such as torch's leave out parameters without a gradient",
    )


def require_right_with_rates(run: Run, found: Found) -> None:
    """Require right parameters after every step, and that learning rates in tensors stay there."""
    if kept_plan(run.scenario).has_tensor_rates:
        if not construction(run)["takes_any"]:
            found.leaves_out("learning rates in tensors are not judged: it takes no optimizer")
            return
        if refusal := run.ranks[0].first("refuses_tensor_rates"):
            found.note(f"{run.name}: learning rates are numbers, since {refusal['error']}")
        _require_tensor_rates(run, found)
    require_right(run, found)


def _require_tensor_rates(run: Run, found: Found) -> None:
    """Require that every learning rate is still a tensor before each step."""
    for rank in run.ranks:
        for event in rank.all("rates"):
            groups = [str(n) for n, is_tensor in enumerate(event["tensors"]) if not is_tensor]
            found.require(
                not groups,
                "a learning rate that stays the tensor that was given",
                f"rank {rank.rank}, step {event['step']}: it is a number in group "
                f"{' and '.join(groups)}",
                "compiled optimizers compile again for each number",
            )


def require_empty_group_refused_by_all(run: Run, found: Found) -> None:
    """Require that all ranks refuse a group without a parameter, if one does."""
    refusals = [rank.first("refuses_empty_group") for rank in run.ranks]
    for rank, refusal in zip(run.ranks, refusals, strict=True):
        found.require(
            (refusal is None) is (refusals[0] is None),
            "the same answer of all ranks to a group without a parameter",
            f"rank {rank.rank} {'takes' if refusal is None else 'refuses'} it, and rank "
            f"{run.ranks[0].rank} does not",
        )
    if refusals[0] is not None:
        found.note(f"{run.name}: no group is empty, since {refusals[0]['why']}")


def require_own_entries(run: Run, found: Found) -> None:
    """Require that the user's own entries stay in parameter groups, also through a state.

    If new processes load a state, and the groups that they see are still their old ones, that is a
    finding of 15.14, and not another one here. The old groups have other learning rates.
    """
    plan = kept_plan(run.scenario)
    for rank in run.ranks:
        for event in rank.all("entries"):
            step = event["step"]
            if run.scenario.resume.resumes and event["rates"] != _rates_at(run, step):
                found.leaves_out(OLD_GROUPS)
                continue
            for number, entries in enumerate(entries_at(plan, step)):
                groups = event["groups"]
                got = groups[number] if number < len(groups) else {}
                for name, value in entries.items():
                    found.require(
                        got.get(name) == repr(value),
                        f"the user's own entry {name!r} of group {number}: {value!r}",
                        f"rank {rank.rank}, step {step}: {got.get(name, 'it is missing')}",
                        _cause_of_entry(run, step),
                    )


def _rates_at(run: Run, step: int) -> list[float]:
    """Return the learning rates of the groups before a step of processes that load a state."""
    plan = kept_plan(run.scenario)
    options = Options(plan, construction(run)["options"])
    for earlier in range(step + 1):
        options.begin_step(earlier)
    return options.rates()[: plan.groups_at(step)]


def _cause_of_entry(run: Run, step: int) -> str:
    """Return the last event before a step that may change entries of parameter groups."""
    plan = kept_plan(run.scenario)
    if run.scenario.resume.resumes or 0 <= plan.back[0] <= step:
        return "it was not saved, or not loaded"
    return "it was dropped by add_param_group" if step in plan.added else ""


def require_calls_under_scaler(run: Run, found: Found) -> None:
    """Require one call of the averager in each step that a rank of the group takes.

    If the gradients of all ranks overflow, the averager may be called or not, but in all of these
    steps and on all ranks alike. Each call is with all parameters and their gradients.
    """
    in_skipped: dict[int, str] = {}
    for rank, step in steps(run):
        group = run.group(rank)
        asked = list(run.ranks[rank].all("asked", step=step))
        for call in asked:
            _require_whole_call(run, found, rank, call)
        calls = len(asked)
        place = f"rank {rank}, step {step}"
        actual = f"{place}: the averager was called {calls} times"
        if not all(overflows(run, other, step) for other in group):
            expected = "one call of the averager, also if this rank's gradients overflow"
            found.require(calls == 1, expected, actual)
            continue
        found.require(calls < 2, "one call of the averager at most", actual)
        in_skipped.setdefault(calls, place)
    found.require(
        len(in_skipped) < 2,
        "the same number of calls of the averager in all steps that are skipped on all ranks",
        "; ".join(f"{place}: {calls}" for calls, place in in_skipped.items()),
    )

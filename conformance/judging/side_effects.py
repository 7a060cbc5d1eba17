"""Side effects that a subject leaves in its process: one requirement, for every kind but hooks.

Hooks have a rule of section 9 for each sort of side effect.
"""

from collections.abc import Iterable
from typing import Any

from conformance.judging.verdict import Found
from conformance.records.run import Run


def require_no_side_effects(run: Run, found: Found) -> None:
    """Require that the process of every rank ends as it started.

    It compares random generators, settings, functions, threads, child processes and files.
    """
    for rank in run.ranks:
        name = f"rank {rank.rank}"
        start = rank.first("state", at="start")
        end = rank.first("state", at="end")
        if start is None or end is None:
            found.require(
                False, "a record of the process at its start and at its end", f"{name}: none"
            )
            continue
        found.checked(1)
        # Generators are compared around each call: the training script uses them, too.
        for event in rank.all("leaves"):
            changed = ", ".join(event["rng_changed"])
            actual = f"{name}, step {event['step']}: {event['what']} changed {changed}"
            found.require(not changed, "unchanged random generators", actual)
        settings = _changed_settings(start["process"], end["process"])
        found.require(not settings, "unchanged settings", f"{name}: {', '.join(settings)} changed")
        found.require(
            not end["patches"],
            "unchanged functions",
            f"{name}: {_first_three(end['patches'])} replaced",
        )
        threads = [thread for thread in end["threads"] if thread not in start["threads"]]
        found.require(not threads, "no new thread", f"{name}: {_first_three(threads)} left")
        found.require(
            not end["children"], "no child process", f"{name}: {_first_three(end['children'])} left"
        )
        found.require(
            not end["files"], "no temporary file", f"{name}: {_first_three(end['files'])} left"
        )
    survivors = _first_three(run.left_processes)
    found.require(not run.left_processes, "no process that outlives its rank", survivors)


def _changed_settings(start: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """Return the names of the settings that changed."""
    # A setting that is recorded at the end alone has no value to compare with.
    return [name for name, value in end.items() if start.get(name, value) != value]


def _first_three(names: Iterable[Any]) -> str:
    return ", ".join(map(str, list(names)[:3]))

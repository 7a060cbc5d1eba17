"""TODO: conformance/hosts/operations.py."""

import contextlib
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.hosts.preload import preload
from conformance.hosts.supervisor import GRACE, Controller, supervise
from conformance.ranks.process import forget_other_references


def keep_bytecode(folder: Path) -> None:
    """Where Python is told to write none, keep the subject's here: else every rank compiles it anew."""
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)


def run_here(command: dict[str, Any], controller: Controller) -> dict[str, Any]:
    """Run one scenario: all of its ranks, or those that the command names, each with the environment that it says."""
    from conformance.ranks.rank import run_rank
    from conformance.scenarios.model import scenario_from_json
    from conformance.subjects.spec import SubjectSpec

    scenario, world = scenario_from_json(command["scenario"]), command["world"]
    spec = SubjectSpec(**command["subject"]) if command["subject"] else None
    folder = Path(command["folder"])
    ranks, environment = command.get("ranks", range(world)), command.get("environment", {})
    for rank in ranks:
        (folder / str(rank)).mkdir()
    patience = command["deadline"] + 60  # the groups' own timeout: the host speaks first

    def rank_function(rank: int) -> Callable[[], int]:
        def function() -> int:
            os.environ.update(environment.get(str(rank), {}))
            return run_rank(scenario, spec, rank, world, folder, command["cwd"], patience)

        return function

    functions = {rank: rank_function(rank) for rank in ranks}
    grace = command["deadline"] if scenario.fault.kind != "none" else GRACE
    outcome = supervise(functions, folder, command["deadline"], grace, controller)
    for rank in outcome["ranks"]:
        for name in ("stacks.txt", "flight.json"):
            with contextlib.suppress(OSError):
                rank[name.partition(".")[0]] = (folder / str(rank["rank"]) / name).read_text(errors="replace")[:20_000]
    return outcome


def describe_here(command: dict[str, Any], controller: Controller) -> dict[str, Any]:
    """Import the subject in a forked process and say what it is."""
    from conformance.ranks.resolve import describe
    from conformance.subjects.spec import SubjectSpec

    def function() -> dict[str, Any]:
        if command.get("imports"):
            importlib.import_module(command["imports"])
        return describe(SubjectSpec(**command["subject"]))

    return _asked_in_a_fork(function, command, controller, "loading it", "importing it")


def look_here(command: dict[str, Any], controller: Controller) -> dict[str, Any]:
    """Find out in a forked process what this machine has for a profile: to ask is to start the device, which no lane survives."""
    from conformance.hosts.profile_check import look
    from conformance.scenarios.profiles import profile_from_json

    profile = profile_from_json(command["profile"])
    return _asked_in_a_fork(lambda: look(profile), command, controller, "looking for it", "looking for it")


def _asked_in_a_fork(
    function: Callable[[], dict[str, Any]], command: dict[str, Any], controller: Controller, raising: str, ending: str
) -> dict[str, Any]:
    """Return what a function says in a process of its own; ``error`` says why it said nothing."""
    from conformance.errors import ConformanceError

    folder = Path(command["folder"])
    answer = folder / "said.json"

    def child() -> int:
        os.chdir(command["cwd"])
        sys.path.insert(0, command["cwd"])
        forget_other_references()
        try:
            said = function()
        except ConformanceError as error:
            said = {"error": str(error)}
        except BaseException as error:
            said = {"error": f"{raising} raised {type(error).__name__}: {error}"}
        answer.write_text(json.dumps(said))
        return 0

    outcome = supervise({0: child}, folder, command["deadline"], GRACE, controller)
    rank = outcome["ranks"][0]
    try:
        said: dict[str, Any] = json.loads(answer.read_text())
        return said
    except (OSError, ValueError):
        how = "did not return" if rank.get("killed") else f"ended its process with status {rank['exit']}"
        return {"error": f"{ending} {how}"}


OPERATIONS: dict[str, Callable[[dict[str, Any], Controller], dict[str, Any]]] = {
    "run": run_here,
    "describe": describe_here,
    "look": look_here,
}


def warm_up() -> dict[str, Any]:
    """Import what ranks need, and say what was found."""
    # Inherited by ranks: a thread that wakes does not push aside the one that woke it. Gloo's else spin on locks that those still
    # hold, which takes a seventh of all time.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    preload()
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gloo": torch.distributed.is_gloo_available(),
        "cuda": torch.version.cuda,
    }

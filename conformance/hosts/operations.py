"""The commands that a lane carries out, and the imports of a host before it forks lanes."""

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
from conformance.scenarios.environment import relevant_environment
from conformance.torch_versions.startup import missing_parts
from conformance.torch_versions.tested import LACKS

# Evidence files that a rank leaves in its folder, and how much of each is kept.
_EVIDENCE_FILES = ("stacks.txt", "flight.json")
_EVIDENCE_LIMIT = 20_000


def keep_code(base: Path) -> None:
    """Keep the marked code of the subject below ``base``, and its bytecode if Python is set to
    write none.

    Without it every rank would mark, or compile, the subject anew.
    """
    from conformance.ranks.instruments.coverage import keep_marked_code

    keep_marked_code(base / "marked")
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(base / "bytecode")


def run_ranks(command: dict[str, Any], controller: Controller) -> dict[str, Any]:
    """Run one scenario and return its outcome.

    The command may name the ranks that run here, and environment variables for each of them; by
    default all ranks run here, and see the nodes that the scenario simulates.
    """
    from conformance.ranks.hardware import simulate_hardware
    from conformance.ranks.instruments.coverage import learn
    from conformance.ranks.node_variables import set_node_variables
    from conformance.ranks.rank import run_rank
    from conformance.ranks.torchrun import name_the_host, node_sizes, set_torchrun_environment
    from conformance.scenarios.model import scenario_from_json
    from conformance.subjects.spec import SubjectSpec

    scenario = scenario_from_json(command["scenario"])
    spec = SubjectSpec(**command["subject"]) if command["subject"] else None
    world = command["world"]
    folder = Path(command["folder"])
    deadline = command["deadline"]
    ranks = command.get("ranks", range(world))
    environment = command.get("environment")
    sizes = node_sizes(scenario.nodes, world, scenario.profile.device)
    for rank in ranks:
        (folder / str(rank)).mkdir()
    # The timeout of the process groups: the lane reports a hang before they do.
    group_timeout = deadline + 60

    def rank_function(rank: int) -> Callable[[], int]:
        def function() -> int:
            if environment is None:
                set_torchrun_environment(sizes, rank)
                name_the_host(sizes, rank)
                seed = f"{scenario.session_seed}/{scenario.name}"
                simulate_hardware(sizes, rank, seed)
                set_node_variables(sizes, rank, seed)
            else:
                os.environ.update(environment[str(rank)])
            return run_rank(scenario, spec, rank, world, folder, command["cwd"], group_timeout)

        return function

    functions = {rank: rank_function(rank) for rank in ranks}
    # After a fault that the kit causes, the other ranks get the whole deadline to notice it.
    grace = deadline if scenario.fault.kind != "none" else GRACE
    by_progress = scenario.patience > 0
    outcome = supervise(functions, folder, deadline, grace, controller, by_progress=by_progress)
    if spec and scenario.observe.coverage and ranks:
        learn(folder / str(min(ranks)), spec)
    for rank in outcome["ranks"]:
        for name in _EVIDENCE_FILES:
            path = folder / str(rank["rank"]) / name
            with contextlib.suppress(OSError):
                rank[path.stem] = path.read_text(errors="replace")[:_EVIDENCE_LIMIT]
    return outcome


def describe_subject(command: dict[str, Any], controller: Controller) -> dict[str, Any]:
    """Import the subject in a forked process and return its description."""
    from conformance.ranks.resolve import describe
    from conformance.subjects.spec import SubjectSpec

    def function() -> dict[str, Any]:
        if command.get("imports"):
            importlib.import_module(command["imports"])
        return describe(SubjectSpec(**command["subject"]))

    return _call_in_fork(function, command, controller, "loading it", "importing it")


def probe_profile(command: dict[str, Any], controller: Controller) -> dict[str, Any]:
    """Probe the backend and the devices of a profile in a forked process.

    The check starts the device, and a process that has started a device cannot be forked any more.
    """
    from conformance.hosts import profile_check
    from conformance.scenarios.profiles import profile_from_json

    profile = profile_from_json(command["profile"])

    def function() -> dict[str, Any]:
        return profile_check.probe_profile(profile)

    return _call_in_fork(function, command, controller, "looking for it", "looking for it")


def _call_in_fork(
    function: Callable[[], dict[str, Any]],
    command: dict[str, Any],
    controller: Controller,
    raising: str,
    ending: str,
) -> dict[str, Any]:
    """Return the result of a function that is called in a process of its own.

    Args:
        raising: the activity, for the message of an exception.
        ending: the activity, for the message about a process that ends without a result.

    Returns:
        The function's result; if there is none, ``error`` is the reason.
    """
    from conformance.errors import ConformanceError

    folder = Path(command["folder"])
    answer_file = folder / "answer.json"

    def child() -> int:
        os.chdir(command["cwd"])
        sys.path.insert(0, command["cwd"])
        forget_other_references()
        try:
            answer = function()
        except ConformanceError as error:
            answer = {"error": str(error)}
        except BaseException as error:
            answer = {"error": f"{raising} raised {type(error).__name__}: {error}"}
        answer_file.write_text(json.dumps(answer))
        return 0

    outcome = supervise({0: child}, folder, command["deadline"], GRACE, controller)
    try:
        answer: dict[str, Any] = json.loads(answer_file.read_text())
        return answer
    except (OSError, ValueError):
        rank = outcome["ranks"][0]
        if rank.get("killed"):
            return {"error": f"{ending} did not return"}
        return {"error": f"{ending} ended its process with status {rank['exit']}"}


OPERATIONS: dict[str, Callable[[dict[str, Any], Controller], dict[str, Any]]] = {
    "run": run_ranks,
    "describe": describe_subject,
    "probe_profile": probe_profile,
}


def warm_up() -> dict[str, Any]:
    """Import the modules that ranks need; return their versions, and environment variables."""
    # Ranks inherit this policy. Under it a thread that wakes up does not preempt the thread that
    # woke it. Without it Gloo's threads spin on locks that the preempted thread still holds, which
    # takes a seventh of all time.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # torch itself sets further variables when it is imported.
    given = set(os.environ)
    preload()
    import torch

    missing = missing_parts(torch.__version__)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gloo": torch.distributed.is_gloo_available(),
        "cuda": torch.version.cuda,
        "variables": relevant_environment(
            {name: value for name, value in os.environ.items() if name in given}
        ),
        **({LACKS: missing} if missing else {}),
    }

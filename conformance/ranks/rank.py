"""One rank of one scenario, from the fork to its end.

It runs in a child of the host. All of the subject's work happens here, and everything that rules
read is recorded here. The rank knows no rules and judges nothing: an exception from any
place is an event, and the rank then ends so that its peers do not wait for it.
"""

import contextlib
import importlib
import sys
from pathlib import Path

from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.coverage import Coverage
from conformance.ranks.new_memory import fill_new_memory
from conformance.ranks.process import prepare_process
from conformance.records.files import DONE, KIT_FAILED, RAISED
from conformance.records.recorder import Recorder
from conformance.scenarios.model import Scenario
from conformance.subjects.spec import SubjectSpec

# A driver is imported when it is needed: hosts import all of them before they fork.
_DRIVERS = {
    "hook": ("conformance.ranks.drivers.hook", "HookDriver"),
    "averager": ("conformance.ranks.drivers.averager", "AveragerDriver"),
    "optimizer": ("conformance.ranks.drivers.optimizer", "OptimizerDriver"),
    "strategy": ("conformance.ranks.drivers.strategy", "StrategyDriver"),
    "joinable": ("conformance.ranks.drivers.joinable", "JoinableDriver"),
    "collective": ("conformance.ranks.drivers.collective", "CollectiveDriver"),
    "wrapper": ("conformance.ranks.drivers.wrapper", "WrapperDriver"),
}


def run_rank(
    scenario: Scenario,
    spec: SubjectSpec | None,
    rank: int,
    world: int,
    folder: Path,
    cwd: str,
    timeout: float,
) -> int:
    """Run one rank of ``scenario`` and return the exit status for its process.

    Args:
        spec: the subject; None to run without any.
        folder: the run's folder; the rank writes into ``folder / str(rank)``.
        cwd: the caller's current directory, where Python looks for the subject first.
        timeout: of the process groups, in seconds; longer than the host waits.
    """
    try:
        own = folder / str(rank)
        recorder = Recorder(own)
        prepare_process(own, cwd)
        fill_new_memory(rank)
    except OSError as error:
        _print_failure(rank, str(error))
        return KIT_FAILED
    coverage = Coverage(spec) if spec and scenario.observe.coverage else None
    if coverage:
        # Before the driver records the state of the process, which the subject must not change.
        coverage.install()
    driver = _driver_class(scenario.kind)(scenario, spec, rank, world, folder, timeout, recorder)
    try:
        driver.execute()
        recorder.close()
    except BaseException as error:
        # The subject may also raise SystemExit, KeyboardInterrupt or pytest.skip.
        if not recorder.failure:
            with contextlib.suppress(OSError):
                driver.failed(error)
        if recorder.failure:
            _print_failure(rank, recorder.failure)
            return KIT_FAILED
        return RAISED
    finally:
        if coverage:
            # A subject may have patched what this uses: then its coverage is missing, no more.
            with contextlib.suppress(Exception):
                coverage.write(own)
    return DONE


def _driver_class(kind: str) -> type[RankDriver]:
    """Return the driver for a kind of subject."""
    module, name = _DRIVERS[kind]
    driver: type[RankDriver] = getattr(importlib.import_module(module), name)
    return driver


def _print_failure(rank: int, reason: str) -> None:
    print(f"conformance: rank {rank} cannot write its record: {reason}", file=sys.stderr)

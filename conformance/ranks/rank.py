"""One rank of one scenario, from the fork to its end.

Runs in a child of the host. Everything that the subject does happens here; everything that a rule
reads is written down here. The rank knows no rules and passes no judgement: an exception, wherever
it comes from, is an event, and the rank then ends so that its peers are not kept waiting.
"""

import contextlib
import sys
from pathlib import Path

from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.drivers.hook import HookDriver
from conformance.ranks.process import prepare_process
from conformance.records.files import DONE, KIT_FAILED, RAISED
from conformance.records.recorder import Recorder
from conformance.scenarios.model import Scenario
from conformance.subjects.kinds import HOOK
from conformance.subjects.spec import SubjectSpec


def run_rank(scenario: Scenario, spec: SubjectSpec | None, rank: int, world: int, folder: Path, cwd: str, timeout: float) -> int:
    """Run one rank of ``scenario`` and return the exit status for its process.

    Args:
        spec: the subject; None for the same without any.
        folder: the run's folder; the rank writes into ``folder / str(rank)``.
        cwd: the caller's current directory, where Python looks for the subject first.
        timeout: of the process groups, in seconds; longer than the host waits.
    """
    try:
        own = folder / str(rank)
        recorder = Recorder(own)
        prepare_process(own, cwd)
    except OSError as error:
        print(f"conformance: rank {rank} cannot write its record: {error}", file=sys.stderr)
        return KIT_FAILED
    run: HookDriver | RankDriver
    if scenario.kind != HOOK:
        run = RankDriver(scenario, spec, rank, world, folder, timeout, recorder)
    else:
        run = HookDriver(scenario, spec, rank, world, folder, timeout, recorder)
    try:
        run.execute()
        recorder.close()
    except BaseException as error:  # SystemExit, pytest.skip and KeyboardInterrupt are the subject's doing too
        if not recorder.failure:
            with contextlib.suppress(OSError):
                run.failed(error)
        if recorder.failure:
            print(f"conformance: rank {rank} cannot write its record: {recorder.failure}", file=sys.stderr)
            return KIT_FAILED
        return RAISED
    return DONE

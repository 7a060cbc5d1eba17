"""The messages of requirements that several rules share, on records written by hand."""

from typing import Any

import expecttest

from conformance.judging.oracles.growth import COUNTED
from conformance.judging.oracles.kept import require_nothing_kept
from conformance.judging.oracles.slopes import require_no_growth
from conformance.judging.side_effects import require_no_side_effects
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.averager_training import LONG as LONG_AVERAGER
from conformance.scenarios.hook import LONG
from conformance.subjects.claims import Claims
from tests.made_runs import event, read_failures


def state(at: str, **changes: Any) -> dict[str, Any]:
    """Return the record of a process that holds nothing, with some changes."""
    plain = {"threads": [], "children": [], "files": [], "patches": [], "process": {}}
    return event("state", -1, at=at, **(plain | changes))


def test_side_effects_are_named() -> None:
    rank = RankRecord(0)
    rank.events = [
        state("start", process={"umask": "0022"}),
        event("leaves", 3, what="step()", rng_changed=["torch", "random"]),
        *(event("counts", step, **dict.fromkeys(COUNTED, step)) for step in range(-1, 8)),
        state(
            "end",
            threads=["poller", "watcher (daemon)"],
            children=["process 17 (sleep)"],
            files=["sums.bin"],
            patches=["torch.add"],
            process={"umask": "0077"},
        ),
    ]
    found = Found()
    run = Run(LONG, 1, [rank], left_processes=["process 18 (sleep)"])
    require_no_side_effects(run, Claims(), found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: unchanged random generators
Actual: rank 0, step 3: step() changed torch, random
Expected: unchanged settings
Actual: rank 0: umask: 0022 before, 0077 now
Expected: unchanged functions
Actual: rank 0: torch.add replaced
Expected: no threads left
Actual: rank 0: threads left: poller
Expected: no processes left
Actual: rank 0: process 17 (sleep)
Expected: no files left
Actual: rank 0: sums.bin
Expected: as much after each step as before it
Actual: rank 0: open descriptors grew from 1 to 7, at steps 2, 3, 4, 5, 6, 7
Expected: as much after each step as before it
Actual: rank 0: threads grew from 1 to 7, at steps 2, 3, 4, 5, 6, 7
Expected: as much after each step as before it
Actual: rank 0: process groups grew from 1 to 7, at steps 2, 3, 4, 5, 6, 7
Expected: as much after each step as before it
Actual: rank 0: child processes grew from 1 to 7, at steps 2, 3, 4, 5, 6, 7
Expected: as much after each step as before it
Actual: rank 0: functions for atexit grew from 1 to 7, at steps 2, 3, 4, 5, 6, 7
Expected: as much after each step as before it
Actual: rank 0: hooks on all modules or optimizers grew from 1 to 7, at steps 2, 3, 4, 5,
    6, 7
Expected: no processes left
Actual: outlived their rank: process 18 (sleep)""",
    )


def test_a_process_without_a_record_of_its_state_is_refused() -> None:
    found = Found()
    require_no_side_effects(Run(LONG, 1, [RankRecord(0)]), Claims(), found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: a record of the process at its start and at its end
Actual: rank 0: none""",
    )


def test_counts_that_grow_in_a_long_run_are_named() -> None:
    rank = RankRecord(0)
    for step in range(40):
        kept = dict.fromkeys(("tensors", "bytes", "nodes", "objects", "entries", "keys"), step)
        rank.events.append(event("kept", step, at=step, files=step, memory=5000 * step, **kept))
    found = Found()
    require_nothing_kept(Run(LONG_AVERAGER, 1, [rank]), found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: a subject that keeps no more after two thirds of the run
Actual: rank 0: tensors grow from 12 to 39; they are more than ever before at steps 13,
    14, 15, 16, 17, 18, ...
Likely cause: tensors that are kept: in a list, a dict or a closure
Expected: a subject that keeps no more after two thirds of the run
Actual: rank 0: bytes grow from 12 to 39; they are more than ever before at steps 13, 14,
    15, 16, 17, 18, ...
Likely cause: tensors that grow
Expected: a subject that keeps no more after two thirds of the run
Actual: rank 0: nodes grow from 12 to 39; they are more than ever before at steps 13, 14,
    15, 16, 17, 18, ...
Likely cause: a graph of autograd that grows: a sum of losses, or a tensor that is not
    detached
Expected: a subject that keeps no more after two thirds of the run
Actual: rank 0: objects grow from 12 to 39; they are more than ever before at steps 13,
    14, 15, 16, 17, 18, ...
Likely cause: objects that are kept: closures, hooks, futures, handles, dicts
Expected: a subject that keeps no more after two thirds of the run
Actual: rank 0: entries grow from 12 to 39; they are more than ever before at steps 13,
    14, 15, 16, 17, 18, ...
Likely cause: a list, dict, set or deque that collects values, Work objects or hooks
Expected: a subject that keeps no more after two thirds of the run
Actual: rank 0: keys grow from 12 to 39; they are more than ever before at steps 13, 14,
    15, 16, 17, 18, ...
Likely cause: keys that are set in the store of a process group, and not deleted
Expected: a subject that keeps no more after two thirds of the run
Actual: rank 0: files grow from 12 to 39; they are more than ever before at steps 13, 14,
    15, 16, 17, 18, ...
Likely cause: files in the temporary directory that are never removed
Expected: memory that does not grow in the last third of the run
Actual: rank 0: it grows by 5000 bytes a step and more, by 65000 bytes in all
Likely cause: buffers or messages that are kept outside of Python""",
    )


def test_resources_that_grow_in_a_long_run_are_named() -> None:
    names = ["descriptors", "tasks", "groups", "children", "files", "blocks", "memory"]
    events = [
        event("checkpoint", 100 * place, **dict.fromkeys(names, 10_000 * place))
        for place in range(13)
    ]
    found = Found()
    require_no_growth(RankRecord(0, events), names, found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: a process that needs no more after a third of the run
Actual: rank 0: descriptors grow by 10000 to 10000 in each interval of 100 steps, by 80000
    from step 400 to step 1200
Likely cause: open descriptors: files or sockets that are never closed
Expected: a process that needs no more after a third of the run
Actual: rank 0: tasks grow by 10000 to 10000 in each interval of 100 steps, by 80000 from
    step 400 to step 1200
Likely cause: threads that never end
Expected: a process that needs no more after a third of the run
Actual: rank 0: groups grow by 10000 to 10000 in each interval of 100 steps, by 80000 from
    step 400 to step 1200
Likely cause: process groups that are never destroyed
Expected: a process that needs no more after a third of the run
Actual: rank 0: children grow by 10000 to 10000 in each interval of 100 steps, by 80000
    from step 400 to step 1200
Likely cause: processes that are never reaped
Expected: a process that needs no more after a third of the run
Actual: rank 0: files grow by 10000 to 10000 in each interval of 100 steps, by 80000 from
    step 400 to step 1200
Likely cause: files in the temporary directory that are never removed
Expected: a process that needs no more after a third of the run
Actual: rank 0: blocks grow by 10000 to 10000 in each interval of 100 steps, by 80000 from
    step 400 to step 1200
Likely cause: objects of Python's that are kept: a list, a dict, futures or Work objects
Expected: a process that needs no more after a third of the run
Actual: rank 0: memory grow by 10000 to 10000 in each interval of 100 steps, by 80000 from
    step 400 to step 1200
Likely cause: memory that is kept: buffers, copies of gradients, tensors in a list or a
    closure""",
    )

"""The root cause of a failed run, in the sentences that people read."""

from typing import Any

import expecttest
import pytest

from conformance.judging.run_failures import FailedRun, failed_run
from conformance.judging.verdict import Failure
from conformance.records.files import KIT_FAILED, RAISED
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.hook import VALUES
from tests.made_runs import event, made_run, read_failures


def failure(*ranks: RankRecord, stopped: str = "ended", host: str = "") -> FailedRun:
    """Return the failure of a run with these ranks."""
    run = Run(VALUES, len(ranks), list(ranks))
    run.stopped = stopped
    run.host = host
    failed = failed_run(run)
    assert failed is not None
    return failed


def read(*failed: FailedRun) -> str:
    """Return failures as people read them."""
    return read_failures(Failure(one.expected, one.line, one.cause or "") for one in failed)


def raised(where: str, kind: str = "ValueError", message: str = "no", step: int = 1) -> RankRecord:
    """Return the record of a rank that raised an error."""
    error = event("error", step, where=where, type=kind, message=message, traceback="")
    return RankRecord(0, [error], exit=RAISED)


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("backward", "(in backward, after the hook had returned, step 1)"),
        ("join", "(under Join, on a rank that has run out of inputs, step 1)"),
        ("twin", "(while another model trained in between, step 1)"),
        ("save_state", "(while its state was saved, step 1)"),
        ("load_state", "(while its state was loaded in a new process, step 1)"),
        ("roll_back", "(while a state that it had saved was loaded again, step 1)"),
        ("step", "(in step, step 1)"),
        ("setup", "(in the set-up function, before DDP called any hook)"),
        ("state", "(in the factory of the state, before DDP called any hook)"),
    ],
)
def test_the_activity_of_an_error_is_named(where: str, line: str) -> None:
    failed = failure(raised(where))
    assert failed.line == f"rank 0 raised ValueError: no {line}"
    assert failed.expected == "a run that comes to its end on every rank"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "'bucket'",
            "the second parameter is not called bucket: DDP looks it up by that name",
        ),
        (
            "bucket annotation should be dist.GradBucket.",
            "the annotation of bucket is not dist.GradBucket itself: leave it out, and do not use "
            "`from __future__ import annotations` in this file, which turns it into a string",
        ),
        (
            "return annotation should be torch.futures.Future.",
            "the return annotation is not torch.futures.Future[torch.Tensor] itself: leave it out, "
            "and do not use `from __future__ import annotations` in this file, which turns it into "
            "a string",
        ),
        ("1 is not a callable object", "the registered object cannot be called"),
        (
            "BF16 all reduce communication hook required CUDA 11+",
            "DDP refuses hooks called bf16_compress_hook or bf16_compress_wrapper_hook on this "
            "machine because of their name",
        ),
    ],
)
def test_the_mistake_behind_a_refusal_is_named(message: str, cause: str) -> None:
    failed = failure(raised("register", "KeyError", message, -1))
    assert failed.cause == cause
    assert failed.expected == "a hook that DistributedDataParallel.register_comm_hook accepts"


def values(**changes: Any) -> RankRecord:
    """Return the record of a rank whose future holds a value that DDP cannot take."""
    rank = made_run().ranks[0]
    value = next(event for event in rank.events if event["event"] == "value")
    place = rank.events.index(value)
    error = event("error", 0, where="backward", type="RuntimeError", message="no", traceback="")
    return RankRecord(0, [*rank.events[:place], value | changes, error], exit=RAISED)


def test_a_value_that_ddp_cannot_take_is_described() -> None:
    cases = (
        {"tensor": False, "type": "list"},
        {"layout": "sparse_coo"},
        {"shape": [3]},
        {"contiguous": False},
    )
    expecttest.assert_expected_inline(
        read(*(failure(values(**changes)) for changes in cases)),
        """\
Expected: a torch.futures.Future of one tensor
Actual: the future holds list, not a tensor (call 0)
Expected: a dense result on the bucket's device
Actual: the result is sparse_coo on cpu, the bucket strided on cpu
Expected: a contiguous result in the bucket's shape
Actual: the result has shape [3], the bucket [47] (call 0)
Expected: a contiguous result in the bucket's shape
Actual: the result has shape [47] and is not contiguous, the bucket [47] (call 0)""",
    )


def test_the_last_activity_of_a_rank_that_died_is_named() -> None:
    call = {"call": 1, "index": 0, "numel": 4, "dtype": "float32"}
    events = (
        [],
        [event("call", 2, **call)],
        [event("call", 2, **call), event("returned", 2, call=1)],
        [event("enters", 2, what="average_parameters")],
        [event("called", 2)],
        [event("step", 2)],
    )
    dead = [failure(RankRecord(0, list(some), exit=-11)).line for some in events]
    expecttest.assert_expected_inline(
        "\n".join(dead),
        """\
rank 0 died (signal SIGSEGV) before it began
rank 0 died (signal SIGSEGV) inside hook call 1: step 2, bucket 0, 4 elements of float32
rank 0 died (signal SIGSEGV) after hook call 1 of step 2 had returned
rank 0 died (signal SIGSEGV) inside average_parameters, step 2
rank 0 died (signal SIGSEGV) after the trainer's call in step 2
rank 0 died (signal SIGSEGV) in step 2, after the kit had recorded 'step'""",
    )


def test_a_hang_is_described_by_the_places_of_the_ranks() -> None:
    call = event("call", 2, call=1, index=0, numel=4, dtype="float32")
    stacks = 'Current thread 0x1 (most recent call first):\n  File "hook.py", line 7 in wait\n'
    inside = RankRecord(0, [call], evidence={"killed": True, "stacks": stacks})
    pending = RankRecord(
        0, [call, event("returned", 2, call=1)], evidence={"killed": True, "stacks": ""}
    )
    between = RankRecord(0, [event("step", 2)], evidence={"killed": True})
    groups = {"killed": True, "stacks": 'File "distributed_c10d.py", line 1 in new_group'}
    making = RankRecord(0, [event("step", 2)], evidence=groups)
    failed = [failure(rank, stopped="hang") for rank in (inside, pending, between, making)]
    expecttest.assert_expected_inline(
        read(*failed),
        """\
Expected: a run that comes to its end on every rank
Actual: the hook did not return: rank 0 inside hook call 1: step 2, bucket 0, 4 elements
    of float32, at "hook.py", line 7 in wait
Expected: a run that comes to its end on every rank
Actual: the future was never completed: rank 0 after hook call 1 of step 2 had returned
Expected: a run that comes to its end on every rank
Actual: a rank did not come to its end: rank 0 in step 2, after the kit had recorded
    'step'
Expected: a run that comes to its end on every rank
Actual: a rank did not come to its end: rank 0 in step 2, after the kit had recorded
    'step'
Likely cause: a rank makes a process group: new_group waits for all ranks of WORLD; with
    use_local_synchronization for those of the group, which must have made equally many
    groups before""",
    )


def test_a_wait_of_the_kit_follows_from_what_others_do() -> None:
    """It is not the cause if another rank hangs, or has an error of its own."""
    call = event("enters", 2, what="all_gather")
    hangs = RankRecord(1, [call], evidence={"killed": True, "stacks": ""})
    closed = raised("all_gather", "RuntimeError", "Connection closed by peer", 2)
    waited = raised("kit", "RuntimeError", "Wait timeout")
    lines = [
        failure(waited, hangs, stopped="hang").line,
        failure(waited, closed).line,
        failure(waited).line,
    ]
    assert "rank 1 inside all_gather" in lines[0]
    assert "Connection closed by peer" in lines[1]
    assert lines[2].endswith("Wait timeout (in the kit's own code, step 1)")


def test_failures_outside_the_ranks_are_described() -> None:
    printed = RankRecord(0, [event("step", 2)], evidence={"printed": 3 << 20, "killed": True})
    unwritten = RankRecord(0, exit=KIT_FAILED, evidence={"output": "no space left"})
    failed = [
        failure(RankRecord(0), stopped="host", host="signal SIGKILL"),
        failure(RankRecord(0), stopped="silent", host="it did not answer"),
        failure(RankRecord(0), stopped="node", host="node1 was lost"),
        failure(printed, stopped="flood"),
        failure(unwritten),
        failure(RankRecord(0, exit=KIT_FAILED)),
        failure(RankRecord(0), RankRecord(1)),
    ]
    expecttest.assert_expected_inline(
        read(*failed),
        """\
Expected: a run that comes to its end on every rank
Actual: a process above the ranks died during the run (signal SIGKILL): the subject killed
    it
Expected: a run that comes to its end on every rank
Actual: a process above the ranks did not answer, each time that the run was tried: the
    subject stopped it, or this machine is too busy
Expected: a run that comes to its end on every rank
Actual: node1 was lost
Expected: at most 64 KiB of output per call
Actual: rank 0 printed more than 3 MiB in step 2, after the kit had recorded 'step' and
    was stopped
Expected: a run that comes to its end on every rank
Actual: the record of rank 0 could not be written: no space left
Expected: a run that comes to its end on every rank
Actual: the record of rank 0 could not be written: it printed no reason
Expected: a run that comes to its end on every rank
Actual: ranks ended without a complete record""",
    )


def test_what_fails_before_the_subject_comes_is_the_machines() -> None:
    busy = raised("kit", "AcceleratorError", "CUDA-capable device(s) is/are busy", step=-1)
    waiting = RankRecord(1, evidence={"killed": True})
    failed = [
        failure(busy, waiting, stopped="peer"),
        failure(RankRecord(0, evidence={"killed": True}), waiting, stopped="hang"),
    ]
    assert [one.kind for one in failed] == ["machine", "machine"]
    expecttest.assert_expected_inline(
        read(*failed),
        """\
Expected: a run that comes to its end on every rank
Actual: no rank came as far as the subject: rank 0 raised AcceleratorError: CUDA-capable
    device(s) is/are busy (in the kit's own code, step -1)
Expected: a run that comes to its end on every rank
Actual: no rank came as far as the subject: each was killed at its deadline""",
    )
    begun = RankRecord(1, [event("state", -1, at="start")], evidence={"killed": True})
    assert failure(busy, begun, stopped="peer").kind == "raised"
    assert failure(RankRecord(0, exit=1), stopped="ended").kind == "died"


def test_errors_of_the_target_and_of_the_contract_are_given_as_they_are() -> None:
    failed = [
        failure(raised("load", "ImportError", "no module")),
        failure(raised("load", "SystemExit", "")),
        failure(raised("hook", "ContractBreach", "the hook returned None, not a future")),
    ]
    expecttest.assert_expected_inline(
        read(*failed),
        """\
Expected: a run that comes to its end on every rank
Actual: no module
Expected: a run that comes to its end on every rank
Actual: SystemExit
Expected: a torch.futures.Future of one tensor
Actual: the hook returned None, not a future""",
    )

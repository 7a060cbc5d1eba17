"""Find out why a run failed: the root cause in one line, and the evidence of every rank.

The first thing that went wrong is the cause. An error that a rank recorded has its time, and so has
a death that the host saw. The errors that other ranks raise afterwards ("connection reset by peer")
are secondary. A rank that the host had to kill did not fail: it was waiting, and its stack shows
the line.
"""

import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conformance.records.files import KIT_FAILED, MODEL_MADE
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.torch_versions.faults import fault_behind

# Texts of errors that follow from the failure of another rank.
_SECONDARY = (
    "connection reset",
    "connection closed",
    "timed out waiting",
    "broken pipe",
    "connection refused",
)

# The text of a wait on the store that ends at its deadline. In the kit's own code a rank waits for
# ranks that the subject holds up.
_STORE_WAITED = "wait timeout"
_KIT_WAITED = 2

# Activities of a rank (``where`` in its record of an error) in which an error is no refusal: work
# of the kit, of DDP or of the model, and calls of the subject beside its set-up and its steps.
_NO_REFUSAL = {
    "close",
    "forward",
    "kit",
    "load",
    "load_state",
    MODEL_MADE,
    "on_step",
    "optimizer",
    "register",
    "roll_back",
    "save_state",
    "simulation",
    "twin",
}

# Events that begin a call of the subject, and those that end it. Hooks have events of their own.
_ENTRIES = ("call", "enters")
_EXITS = ("returned", "raised", "leaves")

# The frames of the kit that call a subject. The driver of hooks leaves that to the observer: its
# own frames are on the main thread's stack also while the hook runs on a thread of autograd.
_CALLS_SUBJECT = re.compile(r"hook_observer\.py|/drivers/(?!hook\.py)")

# A frame on the stack of a rank that makes a process group.
_MAKES_GROUP = "in new_group"

_EXPECTED = {
    "register": "a hook that DistributedDataParallel.register_comm_hook accepts",
    "contract": "a torch.futures.Future of one tensor",
    "shape": "a contiguous result in the bucket's shape",
    "dtype": "a dense result on the bucket's device",
    "flood": "at most 64 KiB of output per call",
}
# Words of the line on an error that came before the first call of a hook.
BEFORE_ITS_CALLS = "before DDP called any hook"
_ACTIVITIES = {
    "setup": f"in the set-up function, {BEFORE_ITS_CALLS}",
    "state": f"in the factory of the state, {BEFORE_ITS_CALLS}",
    "backward": "in backward, after the hook had returned",
    "join": "under Join, on a rank that has run out of inputs",
    "kit": "in the kit's own code",
    "twin": "while another model trained in between",
    "save_state": "while its state was saved",
    "load_state": "while its state was loaded in a new process",
    "roll_back": "while a state that it had saved was loaded again",
}
_REFUSALS_BY_DDP = {
    "KeyError: 'bucket'": (
        "the second parameter is not called bucket: DDP looks it up by that name"
    ),
    "bucket annotation should be": (
        "the annotation of bucket is not dist.GradBucket itself: leave it out, and do not use "
        "`from __future__ import annotations` in this file, which turns it into a string"
    ),
    "return annotation should be": (
        "the return annotation is not torch.futures.Future[torch.Tensor] itself: leave it out, and "
        "do not use `from __future__ import annotations` in this file, which turns it into a string"
    ),
    "is not a callable": "the registered object cannot be called",
    "required CUDA": (
        "DDP refuses hooks called bf16_compress_hook or bf16_compress_wrapper_hook on this machine "
        "because of their name"
    ),
}


@dataclass
class FailedRun:
    """Why a run failed, for people.

    Attributes:
        kind: ``kit``, ``machine``, ``target``, ``register``, ``contract``, ``shape``, ``dtype``,
            ``raised``, ``died``, ``hang``, ``flood``, ``host`` or ``node``. A ``machine`` on which
            no rank began, and a ``node``, lost during the run, are not attributed to the subject.
        line: the root cause in one line.
        evidence: by rank: exit status, output, error, stacks and last collectives.
    """

    kind: str
    line: str
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        """The outcome that the run should have had."""
        return _EXPECTED.get(self.kind, "a run that comes to its end on every rank")

    @property
    def cause(self) -> str | None:
        """The mistake behind a refusal by DDP, whose errors do not name it, or behind a hang."""
        if self.kind == "hang" and any(
            _MAKES_GROUP in rank.get("stacks", "") for rank in self.evidence.values()
        ):
            return (
                "a rank makes a process group: new_group waits for all ranks of WORLD; with "
                "use_local_synchronization for those of the group, which must have made equally "
                "many groups before"
            )
        if self.kind != "register":
            return None
        return next((cause for text, cause in _REFUSALS_BY_DDP.items() if text in self.line), None)


@dataclass
class _RankFailure:
    """The failure of one rank by itself.

    Attributes:
        follows: 0 if nothing says that it follows from the failure of another rank, 1 if its words
            do, and 2 if the kit has waited for other ranks in vain.
        time: at which it was noted.
        kind, line: those of the run's failure, if this is its cause.
    """

    follows: int
    time: float
    kind: str
    line: str


def failed_run(run: Run) -> FailedRun | None:
    """Return why ``run`` has no complete record, or None if it has one."""
    if run.finished:
        return None
    kind, line = _kind_and_line(run)
    return FailedRun(kind, line, {f"rank {rank.rank}": _evidence(rank) for rank in run.ranks})


def _kind_and_line(run: Run) -> tuple[str, str]:
    if run.stopped == "node":
        return "node", run.host
    if run.stopped == "host":
        line = f"a process above the ranks died during the run ({run.host}): the subject killed it"
        return "host", line
    if run.stopped == "silent":
        line = (
            "a process above the ranks did not answer, each time that the run was tried: the "
            "subject stopped it, or this machine is too busy"
        )
        return "host", line
    for rank in run.ranks:
        if rank.exit == KIT_FAILED or "unreadable" in rank.evidence:
            printed = str(rank.evidence.get("output", "")).strip() or "it printed no reason"
            reason = rank.evidence.get("unreadable") or printed.splitlines()[-1]
            return "kit", f"the record of rank {rank.rank} could not be written: {reason}"
    if run.stopped == "flood":
        worst = max(run.ranks, key=lambda rank: rank.evidence.get("printed", 0))
        size = f"{worst.evidence['printed'] >> 20} MiB"
        return (
            "flood",
            f"rank {worst.rank} printed more than {size}{_during(worst)} and was stopped",
        )
    failures = [failure for rank in run.ranks if (failure := _rank_failure(rank))]
    first = min(failures, key=lambda failure: (failure.follows, failure.time), default=None)
    if _is_before_the_subject(run):
        line = first.line if first else "each was killed at its deadline"
        return "machine", f"no rank came as far as the subject: {line}"
    waiting = [rank for rank in run.ranks if rank.evidence.get("killed")]
    if first and not (waiting and first.follows == _KIT_WAITED):
        return first.kind, first.line
    if waiting:
        return "hang", _hang(run, waiting)
    return "died", "ranks ended without a complete record"


def is_tried_again(run: Run) -> bool:
    """Whether a busy machine may have ended the run: no rank came to the subject, or the process
    above the ranks fell silent.

    A run whose ranks were killed at their deadline is not tried again, since it takes too long.
    """
    if run.finished or run.stopped == "hang":
        return False
    return run.stopped == "silent" or _is_before_the_subject(run)


def _is_before_the_subject(run: Run) -> bool:
    """Whether every rank was still at work of the kit's that comes before any of the subject's.

    No rank imports the subject before all ranks have made their groups and their model. Until then
    a rank records nothing but an error of its own.
    """
    if run.stopped not in ("ended", "peer", "hang"):
        return False
    events = [event for rank in run.ranks for event in rank.events]
    if not events and run.stopped != "hang":
        return False  # a rank that wrote nothing may have been ended by anything
    return all(event["event"] == "error" and event["where"] == "kit" for event in events)


def refused_on_every_rank(run: Run) -> bool:
    """Return whether the subject or its set-up raised an error on every rank, and all ended.

    On uneven inputs one rank is enough, if the run ended with an error on all: ranks meet in other
    calls than the subject's, so that a rank may learn of another's refusal anywhere.
    """
    if run.stopped != "ended":
        return False
    may_refuse = {"load_state"} if run.scenario.resume.of_rank_0 else set()
    refusals = [_is_refusal(rank, may_refuse) for rank in run.ranks]
    if run.scenario.uneven:
        return any(refusals) and all(rank.first("error") for rank in run.ranks)
    return all(refusals)


def fault_of_torch(run: Run) -> str | None:
    """Return why this torch cannot run a scenario with any subject, or None.

    The fault is a known one of the version, and every rank met it, or the end of another rank that
    had met it, while the kit made the model. Subjects take no part in that.
    """
    errors = [rank.first("error") for rank in run.ranks]
    found = None
    for error in errors:
        if error is None or error["where"] != MODEL_MADE:
            return None
        fault = fault_behind(error.get("torch", ""), run.scenario, error["message"])
        if fault is not None:
            found = f"torch {error['torch']} {fault.summary} ({fault.issue})"
        elif not _is_secondary(error["message"]):
            return None
    return found


def _is_refusal(rank: RankRecord, may_refuse: set[str]) -> bool:
    no_refusal = set(_NO_REFUSAL) - may_refuse
    errors = (error for error in rank.all("error") if error["where"] not in no_refusal)
    error = next(errors, None)
    return error is not None and not _is_secondary(f"{error['type']}: {error['message']}")


def _is_secondary(text: str) -> bool:
    return any(words in text.lower() for words in _SECONDARY)


def _rank_failure(rank: RankRecord) -> _RankFailure | None:
    """Return the failure of a rank, or None if it was well or only waited."""
    error = rank.first("error")
    if error:
        text = f"{error['type']}: {error['message']}".strip().removesuffix(":")
        kind, line = _kind_and_line_of_error(rank, error, text)
        has_waited = error["where"] == "kit" and _STORE_WAITED in text.lower()
        follows = _KIT_WAITED if has_waited else int(_is_secondary(text))
        return _RankFailure(follows, error["time"], kind, line)
    if rank.exit is not None and not rank.evidence.get("killed") and not rank.finished:
        how = f"exit status {rank.exit}"
        if rank.exit < 0:
            how = f"signal {signal.Signals(-rank.exit).name}"
        line = f"rank {rank.rank} died ({how}){_during(rank)}"
        return _RankFailure(0, rank.evidence.get("died") or 0.0, "died", line)
    return None


def _kind_and_line_of_error(rank: RankRecord, error: dict[str, Any], text: str) -> tuple[str, str]:
    line = text.splitlines()[0][:300]
    # An exception may have no text, such as the SystemExit of a module that ends on import.
    message = next(filter(str.strip, error["message"].splitlines()), error["type"])
    if error["where"] == "load" or error["type"] == "target":
        return "target", message
    if error["type"] == "ContractBreach":
        return "contract", message
    if error["where"] == "register":
        return "register", line
    if breach := _breach(rank, error["step"]):
        return breach
    raised = rank.first("raised")
    place = _ACTIVITIES.get(error["where"], f"in {error['where']}")
    if raised:
        place = f"in hook call {raised['call']}"
    step = "" if BEFORE_ITS_CALLS in place else f", step {error['step']}"
    return "raised", f"rank {rank.rank} raised {line} ({place}{step})"


def _breach(rank: RankRecord, step: int) -> tuple[str, str] | None:
    """Return kind and line if a future of the failed step held a value that DDP cannot take."""
    for value in rank.all("value", step=step, state="value"):
        if not value["tensor"]:
            line = f"the future holds {value['type']}, not a tensor (call {value['call']})"
            return "contract", line
        bucket_device = value["bucket_device"]
        if value["layout"] != value["bucket_layout"] or value["device"] != bucket_device:
            result = f"the result is {value['layout']} on {value['device']}"
            return "dtype", f"{result}, the bucket {value['bucket_layout']} on {bucket_device}"
        if value["shape"] != value["bucket_shape"] or not value["contiguous"]:
            strided = "" if value["contiguous"] else " and is not contiguous"
            result = f"the result has shape {value['shape']}{strided}"
            return "shape", f"{result}, the bucket {value['bucket_shape']} (call {value['call']})"
    return None


def _open_call(rank: RankRecord) -> dict[str, Any] | None:
    """Return the event that began the call of the subject which a rank has not left, if any."""
    limits = (event for event in reversed(rank.events) if event["event"] in _ENTRIES + _EXITS)
    last = next(limits, None)
    return last if last and last["event"] in _ENTRIES else None


def _during(rank: RankRecord) -> str:
    """Return the last known activity of a rank, in words that follow "rank 0"."""
    if not rank.events:
        return " before it began"
    last = _open_call(rank) or rank.events[-1]
    return _DURING.get(last["event"], _after_event)(last)


def _in_hook_call(event: dict[str, Any]) -> str:
    bucket = f"bucket {event['index']}, {event['numel']} elements of {event['dtype']}"
    return f" inside hook call {event['call']}: step {event['step']}, {bucket}"


def _in_call(event: dict[str, Any]) -> str:
    return f" inside {event['what']}, step {event['step']}"


def _after_hook_call(event: dict[str, Any]) -> str:
    return f" after hook call {event['call']} of step {event['step']} had returned"


def _after_trainer_call(event: dict[str, Any]) -> str:
    return f" after the trainer's call in step {event['step']}"


def _after_event(event: dict[str, Any]) -> str:
    return f" in step {event['step']}, after the kit had recorded {event['event']!r}"


_DURING: dict[str, Callable[[dict[str, Any]], str]] = {
    "call": _in_hook_call,
    "enters": _in_call,
    "returned": _after_hook_call,
    "called": _after_trainer_call,
}


def _hang(run: Run, waiting: list[RankRecord]) -> str:
    inside = [rank for rank in waiting if _open_call(rank)]
    if inside:
        ranks = "; ".join(f"rank {rank.rank}{_during(rank)}{_at_line(rank)}" for rank in inside)
        return f"the {run.scenario.kind} did not return: {ranks}"
    ranks = "; ".join(f"rank {rank.rank}{_during(rank)}" for rank in waiting)
    # Only a hook's call records that it returned: its result may still be on the way.
    if any(rank.first("returned") for rank in waiting):
        return f"the future was never completed: {ranks}"
    return f"a rank did not come to its end: {ranks}"


def _at_line(rank: RankRecord) -> str:
    """Return the innermost Python line outside torch and the kit, preferably of the main thread."""
    stacks = str(rank.evidence.get("stacks", ""))
    _, _, main = stacks.rpartition("Current thread")
    # A hook may run on a thread of autograd, while the main thread waits in backward.
    searched = main if _CALLS_SUBJECT.search(main) else stacks
    for line in map(str.strip, searched.splitlines()):
        if line.startswith('File "') and not _is_of_torch_or_kit(line):
            return f", at {line.removeprefix('File ')}"
    return ""


def _is_of_torch_or_kit(line: str) -> bool:
    return "/torch/" in line or "/conformance/" in line or "threading.py" in line


def _evidence(rank: RankRecord) -> dict[str, Any]:
    kept: dict[str, Any] = {"exit": rank.exit}
    if rank.evidence.get("killed"):
        kept["killed by the kit"] = True
    if error := rank.first("error"):
        kept["traceback"] = error["traceback"]
    for name in ("output", "stacks"):
        if text := str(rank.evidence.get(name, "")).strip():
            kept[name] = text[-6000:]
    if flight := rank.evidence.get("flight"):
        kept["last collectives"] = _last_collectives(flight)
    return kept


def _last_collectives(flight: str) -> list[str]:
    """Return the last four entries of the flight recorder, one line each."""
    try:
        entries = json.loads(flight)["entries"]
    except (ValueError, KeyError, TypeError):
        return [flight[:300]]
    return [_collective_line(entry) for entry in entries[-4:]]


def _collective_line(entry: dict[str, Any]) -> str:
    name = f"#{entry.get('collective_seq_id')} {entry.get('profiling_name')}"
    inputs = f"{entry.get('input_sizes')} {entry.get('input_dtypes')}"
    state = "finished" if entry.get("retired") else "not finished"
    return f"{name} {inputs} {state}"

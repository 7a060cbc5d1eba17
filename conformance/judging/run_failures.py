"""Why a run broke: the root cause in one line, and the evidence of every rank.

The first thing that went wrong is the cause. An error that a rank wrote down has its time, a death
has the time at which the host saw it; what other ranks say afterwards ("connection reset by peer")
is secondary. A rank that the host had to kill did not fail: it was waiting, and its stack says where.
"""

import json
import signal
from dataclasses import dataclass, field
from typing import Any

from conformance.records.files import KIT_FAILED
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.subjects.kinds import HOOK

_SECONDARY = ("connection reset", "connection closed", "timed out waiting", "broken pipe", "connection refused")

_EXPECTED = {
    "register": "a hook that DistributedDataParallel.register_comm_hook accepts",
    "contract": "a torch.futures.Future of one tensor",
    "shape": "a contiguous result in the bucket's shape",
    "dtype": "a dense result on the bucket's device",
    "flood": "at most 64 KiB of output per call",
}
_PLACES = {
    "backward": "in backward, after the hook had returned",
    "join": "under Join, on a rank that has run out of inputs",
    "twin": "where another model trains in between",
    "save_state": "when its state was saved",
    "load_state": "when its state was loaded in a new process",
}
_REFUSALS = {
    "KeyError: 'bucket'": "the second parameter is not called bucket: DDP looks it up by that name",
    "bucket annotation should be": "the annotation of bucket is not dist.GradBucket itself: leave it out, and do not use "
    "`from __future__ import annotations` in this file, which makes a string of it",
    "return annotation should be": "the return annotation is not torch.futures.Future[torch.Tensor] itself: leave it out, and do not "
    "use `from __future__ import annotations` in this file, which makes a string of it",
    "is not a callable": "what is registered cannot be called",
    "required CUDA": "DDP refuses hooks called bf16_compress_hook or bf16_compress_wrapper_hook on this machine by their name alone",
}


@dataclass
class Breakage:
    """What happened, for a person.

    Attributes:
        kind: ``kit``, ``target``, ``register``, ``contract``, ``shape``, ``dtype``, ``raised``, ``died``,
            ``hang``, ``flood``, ``host`` or ``node``; the last is not known to be the subject's doing.
        line: the root cause in one line.
        expected: what should have been instead.
        cause: the known mistake behind a refusal of DDP's, which names none.
        evidence: by rank: exit, what it printed, error, stacks, last collectives.
    """

    kind: str
    line: str
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        return _EXPECTED.get(self.kind, "a run that comes to its end on every rank")

    @property
    def cause(self) -> str:
        return next((cause for words, cause in _REFUSALS.items() if self.kind == "register" and words in self.line), "")


def breakage(run: Run) -> Breakage | None:
    """Return why ``run`` has no complete record, or None if it has."""
    if run.finished:
        return None
    evidence = {f"rank {rank.rank}": _evidence(rank) for rank in run.ranks}
    if run.stopped == "node":
        return Breakage("node", run.host, evidence)
    if run.stopped == "host":
        return Breakage("host", f"a process above the ranks died during the run ({run.host}): the subject killed it", evidence)
    for rank in run.ranks:
        if rank.exit == KIT_FAILED or "unreadable" in rank.evidence:
            output = rank.evidence.get("unreadable") or str(rank.evidence.get("output", "")).strip().splitlines()[-1:]
            return Breakage("kit", f"the record of rank {rank.rank} could not be written: {output}", evidence)
    if run.stopped == "flood":
        worst = max(run.ranks, key=lambda rank: rank.evidence.get("printed", 0))
        return Breakage(
            "flood", f"rank {worst.rank} printed more than {worst.evidence['printed'] >> 20} MiB{_during(worst)} and was stopped", evidence
        )
    causes = sorted((cause for rank in run.ranks if (cause := _cause(rank))), key=lambda cause: (cause[0], cause[1]))
    if causes:
        _, _, kind, line = causes[0]
        return Breakage(kind, line, evidence)
    waiting = [rank for rank in run.ranks if rank.evidence.get("killed")]
    if waiting:
        return Breakage("hang", _hang(run, waiting), evidence)
    return Breakage("died", "ranks ended without a complete record", evidence)


def refused(run: Run) -> bool:
    """Whether the hook, or what sets it up, raised an error of its own on every rank, and every process came to its end.

    On uneven inputs ranks meet in other calls than the hook's: there one may hear of it from another, wherever it is.
    """
    if run.stopped != "ended":
        return False
    places = ("backward", "after_backward", "setup", "state", "join")
    raised = [next((e for e in rank.all("error") if e["where"] in places), None) for rank in run.ranks]
    if run.scenario.kind != HOOK:
        raised = [next((e for e in rank.all("error") if e["where"] not in ("kit", "load")), None) for rank in run.ranks]
    own = [error is not None and not _is_secondary(f"{error['type']}: {error['message']}") for error in raised]
    return any(own) and all(rank.first("error") for rank in run.ranks) if run.scenario.uneven else all(own)


def _is_secondary(text: str) -> bool:
    return any(words in text.lower() for words in _SECONDARY)


def _cause(rank: RankRecord) -> tuple[int, float, str, str] | None:
    """Return (secondary?, time, kind, line) of what went wrong on a rank by itself."""
    error = rank.first("error")
    if error:
        text = f"{error['type']}: {error['message']}".strip()
        line = text.splitlines()[0][:300]
        secondary = int(_is_secondary(text))
        if error["where"] == "load" or error["type"] == "target":
            return secondary, error["time"], "target", error["message"].splitlines()[0]
        if error["type"] == "ContractBreach":
            return secondary, error["time"], "contract", error["message"].splitlines()[0]
        if error["where"] == "register":
            return secondary, error["time"], "register", line
        if breach := _breach(rank, error["step"]):
            return secondary, error["time"], *breach
        raised = rank.first("raised")
        place = f"in hook call {raised['call']}" if raised else _PLACES.get(error["where"], f"in {error['where']}")
        return secondary, error["time"], "raised", f"rank {rank.rank} raised {line} ({place}, step {error['step']})"
    if rank.exit is not None and not rank.evidence.get("killed") and not rank.finished:
        how = f"signal {signal.Signals(-rank.exit).name}" if rank.exit < 0 else f"exit status {rank.exit}"
        return 0, rank.evidence.get("died") or 0.0, "died", f"rank {rank.rank} died ({how}){_during(rank)}"
    return None


def _breach(rank: RankRecord, step: int) -> tuple[str, str] | None:
    """Whether the future of the step that failed held something that DDP cannot take: (kind, line)."""
    for value in rank.all("value", step=step, state="value"):
        if not value["tensor"]:
            return "contract", f"the future holds {value['type']}, not a tensor (call {value['call']})"
        if value["layout"] != value["bucket_layout"] or value["device"] != value["bucket_device"]:
            return (
                "dtype",
                f"the result is {value['layout']} on {value['device']}, the bucket {value['bucket_layout']} on {value['bucket_device']}",
            )
        if value["shape"] != value["bucket_shape"] or not value["contiguous"]:
            strided = "" if value["contiguous"] else " and is not contiguous"
            return "shape", f"the result has shape {value['shape']}{strided}, the bucket {value['bucket_shape']} (call {value['call']})"
    return None


def _during(rank: RankRecord) -> str:
    """Where a rank was when it was last heard of."""
    if not rank.events:
        return " before it began"
    last = _entered(rank) or rank.events[-1]
    if last["event"] == "call":
        return f" inside hook call {last['call']}: step {last['step']}, bucket {last['index']}, {last['numel']} elements of {last['dtype']}"
    if last["event"] == "enters":
        return f" inside {last['what']}, step {last['step']}"
    if last["event"] == "returned":
        return f" after hook call {last['call']} of step {last['step']} had returned"
    if last["event"] == "called":
        return f" after the trainer's call in step {last['step']}"
    return f" in step {last['step']}, after {last['event']!r}"


def _entered(rank: RankRecord) -> dict[str, Any] | None:
    """The call of a subject that is no hook which a rank has entered and not left."""
    last = next((event for event in reversed(rank.events) if event["event"] in ("enters", "leaves")), None)
    return last if last and last["event"] == "enters" else None


def _hang(run: Run, waiting: list[RankRecord]) -> str:
    inside = [rank for rank in waiting if rank.events and (_entered(rank) or rank.events[-1])["event"] in ("call", "enters")]
    if inside:
        places = "; ".join(f"rank {rank.rank}{_during(rank)}{_at(rank)}" for rank in inside)
        return f"the {run.scenario.kind} did not return: {places}"
    if run.scenario.kind != HOOK:
        return "a rank did not come to its end: " + "; ".join(f"rank {rank.rank}{_during(rank)}" for rank in waiting)
    places = "; ".join(f"rank {rank.rank}{_during(rank)}" for rank in waiting)
    return f"the future was never completed: {places}"


def _at(rank: RankRecord) -> str:
    """The innermost Python line of the main thread, outside torch and the kit."""
    stacks = str(rank.evidence.get("stacks", ""))
    _, _, main = stacks.rpartition("Current thread")
    main = main if "observe.py" in main or "drive/" in main else stacks
    for line in main.splitlines():
        line = line.strip()
        if line.startswith('File "') and "/torch/" not in line and "/conformance/" not in line and "threading.py" not in line:
            return f", at {line.removeprefix('File ')}"
    return ""


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
    """The flight recorder's last four entries, in a line each."""
    try:
        entries = json.loads(flight)["entries"]
    except (ValueError, KeyError, TypeError):
        return [flight[:300]]
    return [
        f"#{entry.get('collective_seq_id')} {entry.get('profiling_name')} {entry.get('input_sizes')} {entry.get('input_dtypes')} "
        f"{'finished' if entry.get('retired') else 'not finished'}"
        for entry in entries[-4:]
    ]

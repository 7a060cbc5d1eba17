"""Section 9: what a hook has no business to touch."""

from itertools import pairwise

from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS, LONG, VALUES
from conformance.scenarios.profiles import CUDA
from conformance.subjects.claims import Claims

# Importing half of PyPI adds a filter or a variable; what counts is what happens after that.
_SET_BY_IMPORTS = ("warnings filters", "environment")
OUTPUT_PER_CALL = 64 * 1024  # bytes; a warning with its traceback is about 2 KiB


@rule(
    "9.1",
    "global random states are untouched",
    on=(VALUES,),
    needs=("1.5",),
    source="bugs in the wild: a tenth of compressors seed or consume a global generator",
    remedy="a torch.Generator of the state's own, or torch.random.fork_rng",
)
def random_states(run: Run, claims: Claims, found: Found) -> None:
    """The global generators of torch, Python and NumPy are in the same state after every step, and after the set-up.

    That of CUDA is judged by 21.3.
    """
    for rank in run.ranks:
        before, after = rank.first("state", at="start"), rank.first("state", at="registered")
        if before and after:
            drawn = [name for name, digest in after["rng"].items() if name != CUDA and before["rng"].get(name, digest) != digest]
            found.require(not drawn, "untouched generators", f"rank {rank.rank}: {', '.join(drawn)} changed while the subject was set up")
        for stepped in rank.all("stepped"):
            drawn = [name for name in stepped["rng_changed"] if name != CUDA]
            found.require(not drawn, "untouched generators", f"rank {rank.rank}, step {stepped['step']}: {', '.join(drawn)} changed")


@rule(
    "9.2",
    "parameters are untouched",
    on=(VALUES, BUCKETS),
    needs=("1.5",),
    source="torch documentation, DDP Communication Hooks: a hook handles gradients",
    remedy="an optimizer step inside the hook must be claimed (fused)",
)
def parameters(run: Run, claims: Claims, found: Found) -> None:
    """No parameter changes between the forward and the optimizer's step."""
    if claims.fused:
        found.does_not_apply(f"under fused 13.6 says how parameters change, and before step {claims.after} that they do not")
        return
    for rank in run.ranks:
        for stepped in rank.all("stepped"):
            changed = stepped["parameters_changed"]
            found.require(
                not changed, "unchanged parameters", f"rank {rank.rank}, step {stepped['step']}: {', '.join(changed[:5])} changed"
            )


@rule(
    "9.3",
    "settings of the process are untouched",
    on=(VALUES,),
    needs=("1.5",),
    source="rule book; torch.set_num_threads, torch.set_default_dtype, signal.signal and the like are the user's",
    remedy="restore what is changed before the hook returns",
)
def process_settings(run: Run, claims: Claims, found: Found) -> None:
    """Default dtype and device, grad mode, thread counts, determinism, warnings filters, signal handlers, working
    directory and environment are the same at the end as at the start."""
    for rank in run.ranks:
        start, registered, end = (rank.first("state", at=at) for at in ("start", "registered", "end"))
        if not start or not registered or not end:
            continue
        for name, value in start["process"].items():
            value = registered["process"][name] if name in _SET_BY_IMPORTS else value
            now = end["process"].get(name)
            found.require(value == now, f"{name} as it was", f"rank {rank.rank}: {name} was {_short(value, now)}, is {_short(now, value)}")


@rule(
    "9.4",
    "memory does not grow with steps",
    on=(LONG,),
    needs=("1.5",),
    source="pytorch#63162, pytorch#45968",
    remedy="lists that collect buffers, futures or Work objects; closures that keep their bucket",
)
def memory(run: Run, claims: Claims, found: Found) -> None:
    """Neither the tensors that Python can reach nor the memory that the allocator has lent grow at every step.

    Growth counts when each of the last six steps adds at least half a bucket.
    """
    bucket = max((call["numel"] * 4 for call in run.ranks[0].all("call")), default=0)
    for rank in run.ranks:
        measured = list(rank.all("memory"))[-7:] if bucket else []
        for name in ("tensors", "allocated"):
            growth = [after[name] - before[name] for before, after in pairwise(measured)]
            if growth:
                found.require(
                    not all(more >= bucket // 2 for more in growth),
                    "memory that does not grow",
                    f"rank {rank.rank}: {name} grew by {min(growth)} to {max(growth)} bytes at each of the last {len(growth)} steps "
                    f"(the bucket has {bucket})",
                )


@rule(
    "9.5",
    "gradients of other buckets are untouched",
    on=(BUCKETS,),
    needs=("1.5",),
    source="torch documentation, GradBucket: a hook is given one bucket",
    remedy="loops over model.parameters() inside the hook",
)
def other_gradients(run: Run, claims: Claims, found: Found) -> None:
    """A call does not write the .grad of a parameter that is not in its bucket."""
    for rank in run.ranks:
        for outside in rank.all("outside"):
            wrote = outside["written"]
            found.require(
                not wrote, "only its own bucket written", f"rank {rank.rank}, step {outside['step']}: .grad of {', '.join(wrote[:5])}"
            )


@rule(
    "9.6",
    "nothing is left behind",
    on=(VALUES,),
    needs=("1.5",),
    source="rule book",
    remedy="join threads and processes, remove files; a set-up can return a Case whose close() does it",
)
def left_behind(run: Run, claims: Claims, found: Found) -> None:
    """After the last step, and after close(), no process, temporary file or thread that keeps the process alive is left.

    Daemon threads may stay if they do not grow in number with the steps. Workers of an executor, which Python joins
    at exit, are not counted.
    """
    for rank in run.ranks:
        start, end = rank.first("state", at="start"), rank.first("state", at="end")
        if not start or not end:
            continue
        alive = [name for name in end["threads"] if name not in start["threads"] and not name.endswith("(daemon)")]
        found.require(not alive, "no threads left", f"rank {rank.rank}: {len(alive)} threads left: {', '.join(alive[:5])}")
        daemons = [name for name in end["threads"] if name not in start["threads"] and name.endswith("(daemon)")]
        found.require(
            len(daemons) < len(run.scenario.steps), "fewer threads than steps", f"rank {rank.rank}: {len(daemons)} daemon threads left"
        )
        found.require(not end["children"], "no processes left", f"rank {rank.rank}: {', '.join(end['children'][:5])}")
        found.require(not end["files"], "no files left", f"rank {rank.rank}: {', '.join(end['files'][:5])}")
    found.require(not run.left_processes, "no processes left", f"outlived their rank: {', '.join(run.left_processes[:5])}")


@rule(
    "9.7",
    "prints no more than it should",
    on=(VALUES,),
    blamed_for="flood",
    source="rule book; a log that fills the disk stops the training",
    remedy="print on one rank, once",
)
def output(run: Run, claims: Claims, found: Found) -> None:
    """A rank writes at most 64 KiB to stdout and stderr per call of the hook."""
    for rank in run.ranks:
        calls = max(1, len(list(rank.all("call"))))
        printed = rank.evidence.get("printed", 0)
        found.require(
            printed <= OUTPUT_PER_CALL * calls,
            f"at most {OUTPUT_PER_CALL} bytes per call",
            f"rank {rank.rank}: {printed} bytes in {calls} calls",
        )


@rule(
    "9.8",
    "no function of torch or Python is replaced",
    on=(VALUES,),
    needs=("1.5",),
    source="rule book; a subject that patches torch.equal passes every test that uses it",
    remedy="wrap what you call instead of replacing what others call",
)
def patches(run: Run, claims: Claims, found: Found) -> None:
    """At the end every function of torch, torch.distributed, Tensor, builtins, os and time is the one it was."""
    for rank in run.ranks:
        end = rank.first("state", at="end")
        if end:
            found.require(not end["patches"], "no replaced functions", f"rank {rank.rank}: {', '.join(end['patches'][:5])}")


@rule(
    "9.9",
    "lets go of the model",
    on=(LONG,),
    needs=("1.5",),
    level=SHOULD,
    since="1.4",
    source="pytorch#63162",
    remedy="weakref.ref(model) where the hook or its state needs the model; nothing of a model in a module",
)
def lets_go(run: Run, claims: Claims, found: Found) -> None:
    """When the training is over and its script has dropped the model, the model is gone.

    DDP keeps the hook and its state where Python's garbage collection does not look: what these keep stays for good, where
    it leads back to DDP.
    """
    for rank in run.ranks:
        dropped = rank.first("dropped")
        if dropped:
            found.require(not dropped["kept"], "a model that is gone", f"rank {rank.rank}: the model is still there")


def _short(value: str | None, other: str | None) -> str:
    """A long setting cut down to where it differs from the other."""
    if value is None or other is None or len(value) < 80:
        return str(value)
    words = set(value.split()) - set(other.split())
    return " ".join(sorted(word for word in words if not word.startswith("0x")))[:200] or "..."  # addresses say nothing

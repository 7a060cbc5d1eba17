"""Section 9: state of the process and the model that a hook must not touch."""

from itertools import pairwise

from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS, LONG, VALUES
from conformance.scenarios.profiles import CUDA
from conformance.subjects.claims import Claims

# The imports of a subject add filters and variables, which is no mistake of its own: these settings
# are compared from the registration on, all others from the start.
_SET_BY_IMPORTS = ("warnings filters", "environment")

OUTPUT_PER_CALL = 64 * 1024  # bytes; a warning with its traceback is about 2 KiB
MEASURED_STEPS = 7  # the last ones of a run, with six differences between them


@rule(
    "9.1",
    "Leaves global random generators untouched",
    on=(VALUES,),
    needs=("1.5",),
    source="bugs in the wild: a tenth of compressors seed or consume a global generator",
    remedy="torch.manual_seed, or draws without generator=: use a torch.Generator of the state's "
    "own, or torch.random.fork_rng",
)
def random_states(run: Run, claims: Claims, found: Found) -> None:
    """The global generators of torch, Python and NumPy are in the same state after every step, and
    after the set-up.

    21.3 judges the generator of CUDA.
    """
    expected = "untouched generators"
    for rank in run.ranks:
        before = rank.first("state", at="start")
        after = rank.first("state", at="registered")
        if before and after:
            changed = _changed_generators(before["rng"], after["rng"])
            actual = f"rank {rank.rank}: {changed} changed while the subject was set up"
            found.require(not changed, expected, actual)
        for stepped in rank.all("stepped"):
            changed = ", ".join(name for name in stepped["rng_changed"] if name != CUDA)
            actual = f"rank {rank.rank}, step {stepped['step']}: {changed} changed"
            found.require(not changed, expected, actual)


def _changed_generators(before: dict[str, str], after: dict[str, str]) -> str:
    names = (name for name in after if name != CUDA)
    return ", ".join(name for name in names if before.get(name, after[name]) != after[name])


@rule(
    "9.2",
    "Leaves parameters untouched",
    on=(VALUES, BUCKETS),
    needs=("1.5",),
    source="torch documentation, DDP Communication Hooks: a hook handles gradients",
    remedy="an optimizer step inside the hook that is not claimed (fused)",
)
def parameters(run: Run, claims: Claims, found: Found) -> None:
    """No parameter changes between the forward and the optimizer's step."""
    if claims.fused:
        found.does_not_apply(
            f"a fused hook steps the parameters: 13.6 judges them, also before step {claims.after}"
        )
        return
    for rank in run.ranks:
        for stepped in rank.all("stepped"):
            changed = stepped["parameters_changed"]
            actual = f"rank {rank.rank}, step {stepped['step']}: {_first_five(changed)} changed"
            found.require(not changed, "unchanged parameters", actual)


@rule(
    "9.3",
    "Leaves settings of the process untouched",
    on=(VALUES,),
    needs=("1.5",),
    source="rule book; torch.set_num_threads, torch.set_default_dtype, signal.signal and the like "
    "are the user's",
    remedy="settings that are not restored before the hook returns",
)
def process_settings(run: Run, claims: Claims, found: Found) -> None:
    """Default dtype and device, grad mode, thread counts, determinism, warnings filters, signal
    handlers, working directory and environment are the same at the end as at the start."""
    for rank in run.ranks:
        start = rank.first("state", at="start")
        registered = rank.first("state", at="registered")
        end = rank.first("state", at="end")
        if not start or not registered or not end:
            continue
        for name, at_start in start["process"].items():
            value = registered["process"][name] if name in _SET_BY_IMPORTS else at_start
            now = end["process"].get(name)
            change = f"was {_difference(value, now)}, is {_difference(now, value)}"
            found.require(value == now, f"{name} unchanged", f"rank {rank.rank}: {name} {change}")


@rule(
    "9.4",
    "Needs no more memory with every step",
    on=(LONG,),
    needs=("1.5",),
    source="pytorch#63162, pytorch#45968",
    remedy="lists that collect buffers, futures or Work objects; closures that keep their bucket",
)
def memory(run: Run, claims: Claims, found: Found) -> None:
    """Neither the tensors that Python can reach nor the memory that the allocator has lent grow at
    every step.

    Growth counts if each of the last six steps adds at least half a bucket.
    """
    bucket = max((call["numel"] * 4 for call in run.ranks[0].all("call")), default=0)
    if not bucket:
        return
    for rank in run.ranks:
        measured = list(rank.all("memory"))[-MEASURED_STEPS:]
        for name in ("tensors", "allocated"):
            growth = [after[name] - before[name] for before, after in pairwise(measured)]
            if not growth:
                continue
            found.require(
                not all(more >= bucket // 2 for more in growth),
                "memory that does not grow",
                f"rank {rank.rank}: {name} grew by {min(growth)} to {max(growth)} bytes at each "
                f"of the last {len(growth)} steps (the bucket has {bucket})",
            )


@rule(
    "9.5",
    "Leaves gradients of other buckets untouched",
    on=(BUCKETS,),
    needs=("1.5",),
    source="torch documentation, GradBucket: a hook is given one bucket",
    remedy="loops over model.parameters() inside the hook",
)
def other_gradients(run: Run, claims: Claims, found: Found) -> None:
    """A call does not write the .grad of a parameter that is not in its bucket."""
    for rank in run.ranks:
        for outside in rank.all("outside"):
            written = outside["written"]
            actual = f"rank {rank.rank}, step {outside['step']}: .grad of {_first_five(written)}"
            found.require(not written, "only its own bucket written", actual)


@rule(
    "9.6",
    "Leaves nothing behind",
    on=(VALUES,),
    needs=("1.5",),
    source="rule book",
    remedy="threads and processes that are not joined, and files that are not removed; a set-up "
    "can return a Case whose close() does it",
)
def left_behind(run: Run, claims: Claims, found: Found) -> None:
    """After the last step, and after close(), no process, temporary file or thread that keeps the
    process alive is left.

    Daemon threads may stay if their number does not grow with the steps. Workers of an executor are
    not counted: Python joins them at exit.
    """
    for rank in run.ranks:
        name = f"rank {rank.rank}"
        start = rank.first("state", at="start")
        end = rank.first("state", at="end")
        if not start or not end:
            continue
        threads = [thread for thread in end["threads"] if thread not in start["threads"]]
        daemons = [thread for thread in threads if thread.endswith("(daemon)")]
        others = [thread for thread in threads if thread not in daemons]
        actual = f"{name}: {len(others)} threads left: {_first_five(others)}"
        found.require(not others, "no threads left", actual)
        few = len(daemons) < len(run.scenario.steps)
        actual = f"{name}: {len(daemons)} daemon threads left"
        found.require(few, "fewer threads than steps", actual)
        children = _first_five(end["children"])
        found.require(not children, "no processes left", f"{name}: {children}")
        files = _first_five(end["files"])
        found.require(not files, "no files left", f"{name}: {files}")
    survivors = _first_five(run.left_processes)
    found.require(not survivors, "no processes left", f"outlived their rank: {survivors}")


@rule(
    "9.7",
    "Prints at most 64 KiB per call",
    on=(VALUES,),
    blamed_for="flood",
    source="rule book; a log that fills the disk stops the training",
    remedy="output on every rank or at every call: print on one rank, once",
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
    "Replaces no function of torch or Python",
    on=(VALUES,),
    needs=("1.5",),
    source="rule book; a subject that patches torch.equal passes every test that uses it",
    remedy="functions that are replaced for all callers: wrap the call instead",
)
def patches(run: Run, claims: Claims, found: Found) -> None:
    """At the end no function of torch, torch.distributed, Tensor, builtins, os and time has been
    replaced."""
    for rank in run.ranks:
        end = rank.first("state", at="end")
        if end is None:
            continue
        replaced = _first_five(end["patches"])
        found.require(not replaced, "no replaced functions", f"rank {rank.rank}: {replaced}")


@rule(
    "9.9",
    "Lets go of the model",
    on=(LONG,),
    needs=("1.5",),
    level=SHOULD,
    since="1.4",
    source="pytorch#63162",
    remedy="references to the model in the hook, its state or a module: use weakref.ref(model) in "
    "the hook and its state, and none in a module",
)
def lets_go(run: Run, claims: Claims, found: Found) -> None:
    """When the training is over and its script has dropped the model, the model is gone.

    DDP keeps the hook and its state out of the reach of Python's garbage collection: objects that
    these reference stay for good if they lead back to DDP.
    """
    for rank in run.ranks:
        dropped = rank.first("dropped")
        if dropped:
            actual = f"rank {rank.rank}: the model is still there"
            found.require(not dropped["kept"], "a model that is gone", actual)


def _first_five(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names[:5])


def _difference(value: str | None, other: str | None) -> str:
    """Return a setting, cut down to the words that the other does not have if it is long."""
    if value is None or other is None or len(value) < 80:
        return str(value)
    words = set(value.split()) - set(other.split())
    # Addresses of objects do not help people.
    kept = sorted(word for word in words if not word.startswith("0x"))
    return " ".join(kept)[:200] or "..."

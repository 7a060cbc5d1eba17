"""Section 9: state of the process and the model that a hook must not touch."""

from conformance.judging.oracles.growth import memory_growth
from conformance.judging.requirements import require_same_memory
from conformance.judging.rule import SHOULD, rule
from conformance.judging.side_effects import changed_settings, first_of, require_nothing_left
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS, LONG, SCHEDULES, TRAINING, VALUES
from conformance.scenarios.process import HEAVY, HEAVY_HALF
from conformance.scenarios.profiles import CUDA
from conformance.subjects.claims import Claims

OUTPUT_PER_CALL = 64 * 1024  # bytes; a warning with its traceback is about 2 KiB


@rule(
    "9.1",
    "Leaves global random generators untouched",
    on=(VALUES,),
    watches=True,
    needs=("1.5",),
    source="bugs in the wild: a tenth of compressors seed or consume a global generator",
    remedy="torch.manual_seed, or draws without generator=: use a torch.Generator of the state's "
    "own, or torch.random.fork_rng",
)
def random_states(run: Run, claims: Claims, found: Found) -> None:
    """In every run the global generators of torch, Python and NumPy are in the same state after
    every step, after the set-up and at the end.

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
        # The rest of the run: steps without inputs, simulated ranks, faults and close().
        end = rank.first("state", at="end")
        if after and end and not found.failures:
            changed = _changed_generators(after["rng"], end["rng"])
            actual = f"rank {rank.rank}: {changed} changed between the steps, or after them"
            found.require(not changed, expected, actual)


def _changed_generators(before: dict[str, str], after: dict[str, str]) -> str:
    names = (name for name in after if name != CUDA)
    return ", ".join(name for name in names if before.get(name, after[name]) != after[name])


@rule(
    "9.2",
    "Leaves parameters and buffers untouched",
    on=(VALUES, BUCKETS, TRAINING),
    watches=True,
    needs=("1.5",),
    source="torch documentation, DDP Communication Hooks: a hook handles gradients",
    remedy="an optimizer step inside the hook that is not claimed (fused); averages, decay or "
    "copies in one dtype of all that the model's state_dict() has; repairs of NaN and infinities; "
    "p.data = ..., or that of a buffer, even of equal values; a hook of the optimizer's step that "
    "writes, or another option of the optimizer",
)
def parameters(run: Run, claims: Claims, found: Found) -> None:
    """In every run, no bit of a parameter changes between the forward and the optimizer's step,
    however large the parameter is, and no bit of a buffer of the model during the backward. From
    the third step on, parameters and buffers stay in their memory, which others may share.

    Some buffers are not finite, as a causal mask, others large or subnormal. They are of float64,
    float32, float16, bfloat16, complex64, int64, int32, uint8 and bool, with drawn values that no
    narrower dtype holds: of 53 bits, and beyond 2**62.

    The trainer's optimizer is torch's SGD, with no option but its rate, which is drawn from 0.05 to
    0.5. In a model of up to 2**18 elements the first two of its steps, and a drawn quarter of the
    others, leave the values of that optimizer: a hook of the step may read gradients and
    parameters, and write neither. Under ``sum`` it may divide gradients by the number of ranks. The
    kit then puts the parameters back (``ranks/models/optimizer_steps.py``).

    Under ``fused`` parameters change, and 13.6 judges them; those that are frozen do not.
    """
    frozen = _frozen_at_some_step(run)
    if claims.fused and run.scenario.name != TRAINING.name and not frozen:
        found.does_not_apply(
            f"a fused hook steps the parameters: 13.6 judges them, also before step {claims.after}"
        )
        return
    for rank in run.ranks:
        for stepped in rank.all("stepped"):
            buffers = stepped.get("buffers_changed", [])
            actual = f"rank {rank.rank}, step {stepped['step']}: {first_of(buffers)} changed"
            found.require(not buffers, "unchanged buffers of the model", actual)
            changed = stepped["parameters_changed"]
            if claims.fused:
                changed = [name for name in changed if stepped["step"] in frozen.get(name, ())]
            actual = f"rank {rank.rank}, step {stepped['step']}: {first_of(changed)} changed"
            found.require(not changed, "unchanged parameters", actual)
        for moved in rank.all("moved_otherwise"):
            if claims.sum and moved["divided"]:
                continue
            actual = (
                f"rank {rank.rank}, step {moved['step']}: {first_of(moved['parameters'])} has "
                "other values after the trainer's step"
            )
            found.require(False, "values of the trainer's SGD, by the gradients of DDP", actual)
    if not claims.fused:
        require_same_memory(run, found)


def _frozen_at_some_step(run: Run) -> dict[str, list[int]]:
    """Return the steps in which parameters are frozen, by the names of those that ever are."""
    steps = range(len(run.scenario.steps))
    frozen = {
        run.parameter_name(index): [step for step in steps if run.scenario.is_frozen(index, step)]
        for index in range(len(run.scenario.params))
    }
    return {name: found for name, found in frozen.items() if found}


@rule(
    "9.3",
    "Leaves settings of the process untouched",
    on=(VALUES,),
    watches=True,
    needs=("1.5",),
    source="rule book; torch.set_num_threads, torch.set_default_dtype, signal.signal and the like "
    "are the user's",
    remedy="settings that are not restored before the hook returns",
)
def process_settings(run: Run, claims: Claims, found: Found) -> None:
    """In every run the settings of the process are the same at the end as at the start.

    They are torch's (default dtype and device, modes of autograd, autocast and dispatch, threads,
    determinism, precision, flags of torch.backends, hooks on all modules and on saved tensors),
    Python's (garbage collector, hooks of sys, import path, recursion limit, warnings filters,
    logging, locale) and the system's (signal handlers and masks, timers, CPU affinity, nice values,
    limits, umask, working directory, environment).

    The import and the set-up of a subject may add warnings filters, variables of the environment,
    import paths and handlers of the root logger.
    """
    for rank in run.ranks:
        compared, changes = changed_settings(rank)
        found.checked(compared - len(changes))
        for change in changes:
            found.require(False, f"{change.name} unchanged", f"rank {rank.rank}: {change}")


@rule(
    "9.4",
    "Needs no more memory with every step",
    on=(LONG, HEAVY, HEAVY_HALF),
    owns=(HEAVY, HEAVY_HALF),
    refusable=(HEAVY_HALF,),
    needs=("1.5",),
    source="pytorch#63162, pytorch#45968",
    remedy="lists that collect buffers, futures or Work objects; closures that keep their bucket; "
    "a pool that is searched for a dtype that it does not hold",
)
def memory(run: Run, claims: Claims, found: Found) -> None:
    """Neither the tensors that Python can reach nor the memory that the allocator has lent grow
    from the first third of the run's steps to the last.

    The model has large parameters, of float32 or of a half precision that is drawn; a hook may
    refuse half precision. The first two steps are not compared. `judging/oracles/growth.py`
    derives the limits.
    """
    for rank in run.ranks:
        for growth in memory_growth(run, rank, claims):
            found.require(
                growth.grown <= growth.limit,
                f"memory that does not grow by more than {growth.limit} bytes",
                f"rank {rank.rank}: {growth.name} grew by {growth.grown} bytes in {growth.steps} "
                "steps",
                _KEPT.get(growth.name, ""),
            )


_KEPT = {
    "tensors": "tensors of earlier steps are still in a list, a closure or a cycle of references",
    "allocated": "memory of earlier steps is still in use, as by a future, a Work object or a C++ "
    "extension",
}


@rule(
    "9.5",
    "Leaves gradients of other buckets untouched",
    on=(BUCKETS, *SCHEDULES),
    watches=True,
    needs=("1.5",),
    source="torch documentation, GradBucket: a hook is given one bucket",
    remedy="loops over model.parameters() inside the hook",
)
def other_gradients(run: Run, claims: Claims, found: Found) -> None:
    """In every run, a call does not write the .grad of a parameter that is not in its bucket.

    A callback may write those of its own bucket while later calls are open, as torch's
    ``_apply_optimizer_in_backward`` sets .grad before it steps. So gradients of earlier buckets are
    compared once their futures are done, and in the runs that hold callbacks until the last call.
    """
    for rank in run.ranks:
        for outside in rank.all("outside"):
            written = outside["written"]
            actual = f"rank {rank.rank}, step {outside['step']}: .grad of {first_of(written)}"
            found.require(not written, "only its own bucket written", actual)


@rule(
    "9.6",
    "Leaves nothing behind",
    on=(VALUES,),
    watches=True,
    needs=("1.5",),
    source="rule book",
    remedy="threads and processes that are not joined, and files that are not removed; a set-up "
    "can return a Case whose close() does it",
)
def left_behind(run: Run, claims: Claims, found: Found) -> None:
    """After the last step of every run, and after close(), no process, temporary file or thread
    that keeps the process alive is left. No step leaves a descriptor, a thread, a process group, a
    function of atexit or a global hook more than the step before.

    Daemon threads, files and groups that are made once may stay. `judging/oracles/growth.py` tells
    apart what is made once and what is made step by step. Workers of an executor are not counted:
    Python joins them at exit.
    """
    require_nothing_left(run, claims, found)


@rule(
    "9.7",
    "Prints at most 64 KiB per call",
    on=(VALUES,),
    watches=True,
    blamed_for="flood",
    source="rule book; a log that fills the disk stops the training",
    remedy="output on every rank or at every call: print on one rank, once",
)
def output(run: Run, claims: Claims, found: Found) -> None:
    """In every run a rank writes at most 64 KiB to stdout and stderr per call of the hook."""
    if run.scenario.simulated:
        return  # calls of simulated ranks are not on record
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
    watches=True,
    needs=("1.5",),
    source="rule book; a subject that patches torch.equal passes every test that uses it",
    remedy="functions that are replaced for all callers: wrap the call instead",
)
def patches(run: Run, claims: Claims, found: Found) -> None:
    """At the end of every run no function of torch, of its classes, of Python's built-ins and of
    its most used modules has been replaced.

    The classes are Tensor, Module, DistributedDataParallel, Optimizer, ProcessGroup, Future and
    others; `ranks/instruments/patches.py` lists them.
    """
    for rank in run.ranks:
        end = rank.first("state", at="end")
        if end is None:
            continue
        replaced = first_of(end["patches"])
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

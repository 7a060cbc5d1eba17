"""Section 21: streams, memory and graphs of CUDA devices, on profiles of that device alone."""

from itertools import pairwise, product, takewhile

import torch

from conformance.judging.oracles.lossy import LIMIT
from conformance.judging.requirements import require_steps, skip_if_lossy
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS, GRAPH, MANY_STEPS, STREAMS, VALUES
from conformance.scenarios.profiles import CUDA
from conformance.subjects.claims import Claims

SEMANTICS = "torch documentation, CUDA semantics"
MEASURED_STEPS = 7  # the last ones of a run, with six differences between them


@rule(
    "21.1",
    "Gives a right result on the stream that reads it",
    on=(BUCKETS, STREAMS),
    owns=(STREAMS,),
    reads_all_runs=True,
    needs=("1.8",),
    since="1.5",
    source="torch documentation, torch.futures.Future: wait() and then() synchronise streams, "
    "value() and set_result() on a future without devices do not; "
    + SEMANTICS
    + ", CUDA streams; pytorch#49477",
    remedy="a future made without devices=[...], or completed on another stream than the one that "
    "computes its value; value() of a future that collect_all has collected: its wait() lets the "
    "stream wait, and nothing on the host; a stream that does not wait for another by wait_stream "
    "or an event; "
    "memory that is freed while another stream uses it, without tensor.record_stream(stream)",
)
def read_on_its_stream(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """The value of the future is right when it is read on the stream on which DDP reads it,
    whichever stream is late.

    In turn, a rank's gradients are late, and so is its work on other streams than the one of its
    backward. Memory that the hook has freed is overwritten at once. Only DDP waits for anything: a
    right result is then due to events, not to luck. A lossy result is compared with the result of
    the same inputs without delays: other orders of sums differ by far less.
    """
    by_scenario = {run.scenario.name: run for run in runs.values()}
    plain = by_scenario[BUCKETS.name]
    delayed = by_scenario[STREAMS.name]
    if not _require_right(plain, delayed, claims, found):
        found.failures[-1].cause = (
            "right if no stream is late: something is read before the stream that computes it is "
            "done, or memory is used again before the stream that reads it is"
        )


def _require_right(plain: Run, delayed: Run, claims: Claims, found: Found) -> bool:
    if claims.lossy:
        return _require_near(plain, delayed, found)
    return require_steps(delayed, claims, found, delayed.steps("crafted"))


def _require_near(plain: Run, delayed: Run, found: Found) -> bool:
    """Require about the same gradients in the steps with which both runs begin, and return the
    result."""
    kinds = zip(plain.scenario.steps, delayed.scenario.steps, strict=False)
    steps = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], kinds))
    indices = range(len(delayed.scenario.params))
    for rank, step, index in product(range(delayed.world), range(steps), indices):
        before = plain.got(rank, step, index)
        after = delayed.got(rank, step, index)
        off = torch.inf
        if before is not None and after is not None:
            norm = before.norm().clamp(min=torch.finfo(torch.float64).tiny)
            off = float((after - before).norm() / norm)
        place = f"rank {rank}, step {step}, parameter {delayed.parameter_name(index)}"
        expected = f"the same as if no stream is late, within {LIMIT:g}"
        if not found.require(off <= LIMIT, expected, f"{place}: off by {off:.3g} of its norm"):
            return False
    return True


@rule(
    "21.2",
    "Returns without making the host wait for the device",
    on=(STREAMS,),
    needs=("1.8",),
    level=SHOULD,
    since="1.5",
    source="torch.cuda.set_sync_debug_mode; torch documentation, Performance Tuning Guide: avoid "
    "unnecessary CPU-GPU synchronization",
    remedy=".item(), .cpu(), if tensor:, torch.nonzero, torch.cuda.synchronize: keep the decision "
    "on the device, or a step behind",
)
def no_host_synchronisation(run: Run, claims: Claims, found: Found) -> None:
    """Nothing inside the hook makes the host wait for the device: backward goes on to put kernels
    on its stream."""
    for rank in run.ranks:
        waits = {event["call"]: event for event in rank.all("waited_for_device")}
        for call in rank.all("call"):
            waited = waits.get(call["call"])
            line = waited["where"] if waited else ""
            actual = f"rank {rank.rank}, step {call['step']}: it waits in {line}"
            found.require(waited is None, "a hook that lets the device run on", actual)


@rule(
    "21.3",
    "Leaves the generator of CUDA untouched",
    on=(VALUES,),
    needs=("1.5",),
    since="1.5",
    source="torch documentation, torch.cuda.get_rng_state; bugs in the wild: random sparsifiers "
    "that draw from the default generator",
    remedy="draws from the default generator: use a torch.Generator(device) of the state's own, "
    "seeded alike on all ranks if they have to draw the same",
)
def generator(run: Run, claims: Claims, found: Found) -> None:
    """The default generator of the rank's device is in the same state after every step, and after
    the set-up."""
    expected = "an untouched generator"
    for rank in run.ranks:
        before = rank.first("state", at="start")
        after = rank.first("state", at="registered")
        if not before or not after or CUDA not in after["rng"]:
            continue
        same = before["rng"].get(CUDA) == after["rng"][CUDA]
        found.require(same, expected, f"rank {rank.rank}: it changed while the subject was set up")
        for stepped in rank.all("stepped"):
            actual = f"rank {rank.rank}, step {stepped['step']}: it changed"
            found.require(CUDA not in stepped["rng_changed"], expected, actual)


@rule(
    "21.4",
    "Needs no more memory of the device with every step",
    on=(MANY_STEPS,),
    owns=(MANY_STEPS,),
    needs=("1.5",),
    since="1.5",
    source=SEMANTICS + ", Memory management; pytorch#63162",
    remedy="lists that keep device tensors; buffers of another size in every step, which the "
    "caching allocator cannot use again",
)
def device_memory(run: Run, claims: Claims, found: Found) -> None:
    """Neither the memory that the caching allocator has lent nor the memory that it has reserved
    grows in step after step.

    Lent memory counts if each of the last six steps adds at least half a bucket. Reserved memory,
    which grows in large pieces, counts if three of them add any. Both are read when the device is
    done with the step.
    """
    bucket = max((call["numel"] * 4 for call in run.ranks[0].all("call")), default=0)
    if not bucket:
        return
    for rank in run.ranks:
        measured = [event for event in rank.all("memory") if CUDA in event][-MEASURED_STEPS:]
        lent = [after[CUDA] - before[CUDA] for before, after in pairwise(measured)]
        if not lent:
            continue
        found.require(
            not all(more >= bucket // 2 for more in lent),
            "memory that does not grow",
            f"rank {rank.rank}: tensors on the device grew by {min(lent)} to {max(lent)} bytes at "
            f"each of the last {len(lent)} steps (the bucket has {bucket})",
        )
        reserved = [after["reserved"] - before["reserved"] for before, after in pairwise(measured)]
        growth = [more for more in reserved if more > 0]
        found.require(
            len(growth) < len(reserved) / 2,
            "reserved memory that does not grow",
            f"rank {rank.rank}: reserved memory grew at {len(growth)} of the last "
            f"{len(reserved)} steps, by {sum(growth)} bytes in all",
        )


@rule(
    "21.5",
    "Works under CUDA graphs",
    on=(GRAPH,),
    owns=(GRAPH,),
    needs=("21.1",),
    level=SHOULD,
    may_refuse=True,
    since="1.5",
    source=SEMANTICS + ", CUDA Graphs, Usage with DistributedDataParallel",
    remedy="decisions on the host that depend on the step or on values, and are made once, at "
    "capture: counters, seeds, branches; tensors that are made anew in every call",
)
def under_graphs(run: Run, claims: Claims, found: Found) -> None:
    """A step that was captured in a CUDA graph after eleven eager ones gives the right results when
    it is replayed on other inputs.

    A hook that cannot be captured may raise an error on every rank.
    """
    if claims.poststep or claims.fused:
        found.does_not_apply(
            "the trainer's call, or the optimizer's step, has a part on the host, which no graph "
            "captures"
        )
    elif not skip_if_lossy(
        claims, found, "no single step is right or wrong, and a replay has no number"
    ):
        require_steps(run, claims, found, run.steps("crafted"))

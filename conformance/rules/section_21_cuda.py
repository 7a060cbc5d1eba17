"""Section 21: streams, memory and graphs of CUDA devices. Judged on profiles of that device alone."""

from itertools import pairwise, product, takewhile

import torch

from conformance.judging.oracles.lossy import LIMIT
from conformance.judging.requirements import lossy_instead, require_steps
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS, GRAPH, LONG, STREAMS, VALUES
from conformance.scenarios.profiles import CUDA
from conformance.subjects.claims import Claims

SEMANTICS = "torch documentation, CUDA semantics"
MEASURED = 7  # of the last steps: growth is what lies between them


@rule(
    "21.1",
    "the result is right on the stream that reads it",
    on=(BUCKETS, STREAMS),
    owns=(STREAMS,),
    reads_all_runs=True,
    needs=("1.8",),
    since="1.5",
    source="torch documentation, torch.futures.Future: wait() and then() synchronise streams, value() and set_result() on a future "
    "without devices do not; " + SEMANTICS + ", CUDA streams; pytorch#49477",
    remedy="a future of one's own needs devices=[...] and is to be completed on the stream that computes its value; one stream waits "
    "for another by wait_stream or an event; tensor.record_stream(stream) before memory that another stream uses is given back",
)
def read_on_its_stream(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """The value of the future is right when it is read on the stream that DDP reads it on, whichever stream is late.

    In turn gradients are late on a rank, and what it puts on other streams than the one of its backward; memory that the hook has
    given back is written over at once. Nobody but DDP waits for anything. What is right here is so by events, not by luck.
    A lossy result is compared with that of the same inputs where nothing is late: other orders of sums differ by far less.
    """
    plain, delayed = (next(run for run in runs.values() if run.scenario.name == plain.name) for plain in (BUCKETS, STREAMS))
    near = _require_near(plain, delayed, found) if claims.lossy else require_steps(delayed, claims, found, delayed.steps("crafted"))
    if not near:
        found.failures[-1].cause = (
            "right where no stream is late: something is read before the stream that computes it is done, or memory is used again "
            "before the stream that reads it is"
        )


def _require_near(plain: Run, delayed: Run, found: Found) -> bool:
    """Require the gradients of the steps that two runs begin with alike to be the same, up to a small share; whether they are."""
    kinds = zip(plain.scenario.steps, delayed.scenario.steps, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], kinds))
    for rank, step, index in product(range(delayed.world), range(alike), range(len(delayed.scenario.params))):
        before, after = plain.got(rank, step, index), delayed.got(rank, step, index)
        off = torch.inf
        if before is not None and after is not None:
            off = float((after - before).norm() / before.norm().clamp(min=torch.finfo(torch.float64).tiny))
        said = f"rank {rank}, step {step}, parameter {delayed.parameter_name(index)}: off by {off:.3g} of its norm"
        if not found.require(off <= LIMIT, f"what it is where no stream is late, within {LIMIT:g}", said):
            return False
    return True


@rule(
    "21.2",
    "does not wait for the device on the host",
    on=(STREAMS,),
    needs=("1.8",),
    level=SHOULD,
    since="1.5",
    source="torch.cuda.set_sync_debug_mode; torch documentation, Performance Tuning Guide: avoid unnecessary CPU-GPU synchronization",
    remedy=".item(), .cpu(), if tensor:, torch.nonzero, torch.cuda.synchronize: keep the decision on the device, or a step behind",
)
def no_host_synchronisation(run: Run, claims: Claims, found: Found) -> None:
    """Nothing inside the hook makes the host wait for the device: backward goes on to put kernels on its stream."""
    for rank in run.ranks:
        waits = {event["call"]: event for event in rank.all("waited_for_device")}
        for call in rank.all("call"):
            waited = waits.get(call["call"])
            said = f"rank {rank.rank}, step {call['step']}: it waits in {waited['where']}" if waited else ""
            found.require(waited is None, "a hook that leaves the device to itself", said)


@rule(
    "21.3",
    "the generator of CUDA is untouched",
    on=(VALUES,),
    needs=("1.5",),
    since="1.5",
    source="torch documentation, torch.cuda.get_rng_state; bugs in the wild: random sparsifiers that draw from the default generator",
    remedy="a torch.Generator(device) of the state's own, seeded alike on all ranks where they have to draw the same",
)
def generator(run: Run, claims: Claims, found: Found) -> None:
    """The default generator of the rank's device is in the same state after every step, and after the set-up."""
    for rank in run.ranks:
        before, after = rank.first("state", at="start"), rank.first("state", at="registered")
        if not before or not after or CUDA not in after["rng"]:
            continue
        same = before["rng"].get(CUDA) == after["rng"][CUDA]
        found.require(same, "an untouched generator", f"rank {rank.rank}: it changed while the subject was set up")
        for stepped in rank.all("stepped"):
            found.require(
                CUDA not in stepped["rng_changed"], "an untouched generator", f"rank {rank.rank}, step {stepped['step']}: it changed"
            )


@rule(
    "21.4",
    "memory of the device does not grow with steps",
    on=(LONG,),
    needs=("1.5",),
    since="1.5",
    source=SEMANTICS + ", Memory management; pytorch#63162",
    remedy="lists that keep device tensors; buffers of another size in every step, which the caching allocator cannot use again",
)
def device_memory(run: Run, claims: Claims, found: Found) -> None:
    """Neither what the caching allocator has lent out nor what it has reserved grows in step after step.

    What is lent out counts when each of the last six steps adds at least half a bucket; what is reserved, which grows in large
    pieces, when three of them add any. Both are read when the device is done with the step.
    """
    bucket = max((call["numel"] * 4 for call in run.ranks[0].all("call")), default=0)
    for rank in run.ranks:
        measured = [event for event in rank.all("memory") if CUDA in event][-MEASURED:] if bucket else []
        lent, reserved = ([after[name] - before[name] for before, after in pairwise(measured)] for name in (CUDA, "reserved"))
        if not lent:
            continue
        found.require(
            not all(more >= bucket // 2 for more in lent),
            "memory that does not grow",
            f"rank {rank.rank}: tensors on the device grew by {min(lent)} to {max(lent)} bytes at each of the last {len(lent)} steps "
            f"(the bucket has {bucket})",
        )
        grew = [more for more in reserved if more > 0]
        found.require(
            len(grew) < len(reserved) / 2,
            "reserved memory that does not grow",
            f"rank {rank.rank}: what the allocator has reserved grew at {len(grew)} of the last {len(reserved)} steps, "
            f"by {sum(grew)} bytes in all",
        )


@rule(
    "21.5",
    "right under CUDA graphs",
    on=(GRAPH,),
    owns=(GRAPH,),
    needs=("21.1",),
    level=SHOULD,
    may_refuse=True,
    since="1.5",
    source=SEMANTICS + ", CUDA Graphs, Usage with DistributedDataParallel",
    remedy="what depends on the step, or on values, and is decided on the host is decided once, at capture: counters, seeds, "
    "branches; tensors that are made anew in every call",
)
def under_graphs(run: Run, claims: Claims, found: Found) -> None:
    """A step that was captured in a CUDA graph after eleven eager ones gives the right results when it is replayed on other inputs.

    A hook that cannot be captured may raise an error on every rank.
    """
    if claims.poststep or claims.fused:
        found.does_not_apply("the trainer's call, or the optimizer's step, has a part on the host, which no graph captures")
    elif not lossy_instead(claims, found, "no single step is right or wrong, and a replay has no number"):
        require_steps(run, claims, found, run.steps("crafted"))

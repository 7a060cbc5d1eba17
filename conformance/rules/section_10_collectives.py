"""Section 10: how the hook communicates."""

from conformance.judging.collective_order import changed_order, disagreement, order_of_groups
from conformance.judging.requirements import require_same, require_steps
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS, ORDERED, RAW, SCHEDULES
from conformance.subjects.claims import LOCAL, Claims


@rule(
    "10.1",
    "does not wait inside the hook",
    on=(ORDERED,),
    needs=("1.8",),
    level=SHOULD,
    since="1.1",
    source="torch documentation, DDP Communication Hooks: the future is what lets communication overlap with backward",
    remedy="async_op=True, and get_future().then(...) for what comes after",
)
def overlaps(run: Run, claims: Claims, found: Found) -> None:
    """The hook returns its future while its communication goes on: backward computes the next gradients meanwhile.

    Proved by order, not by time: peers enter a call of the hook only when rank 0 has returned from it. If it waits for
    them there, they are let in, and the line that waits is on record.
    """
    if run.scenario.serialised:
        found.does_not_apply("judged with one collective at a time, as it claims chained: whether it waits by itself cannot be told")
    for call in run.ranks[0].all("call"):
        waited = next(run.ranks[0].all("waited", call=call["call"]), None)
        spun = next((gate for rank in run.ranks[1:] for gate in rank.all("gate", call=call["call"])), None)
        said = f"it waits in {waited['where']}" if waited else "it neither returned nor waited for as long as its peers stayed out"
        found.require(
            waited is None and spun is None,
            "a hook that returns before its peers have entered theirs",
            f"rank 0, step {call['step']}: {said}",
        )


@rule(
    "10.2",
    "ranks agree on their collectives",
    on=SCHEDULES,
    needs=("1.8",),
    since="1.2",
    source="torch documentation, torch.distributed: collectives are matched by their order alone; NCCL User Guide, Creating a "
    "Communicator: a mismatch is undefined behaviour",
    remedy="collectives, sizes, dtypes or roots that depend on the rank or on its gradients",
)
def agree(run: Run, claims: Claims, found: Found) -> None:
    """All ranks of a group issue the same collectives in the same order: the same operation, number of elements, dtype and root.

    What Gloo happens to tolerate is a hang, or memory overwritten, on another backend. Sends and receives are left out, and so
    is what differs by right: the parts of an all_to_all, a gather or a scatter.
    """
    count = sum(1 for rank in run.ranks for _ in rank.all("collective"))
    different = disagreement(run)
    found.require(not different, "the same collectives on every rank of a group", different)
    found.checked(count)


@rule(
    "10.3",
    "the same bits in any order",
    on=SCHEDULES,
    owns=SCHEDULES,
    reads_all_runs=True,
    needs=("1.8", "3.3"),
    since="1.2",
    source="torch documentation, torch.futures.Future.then: callbacks may run in any order, and on any thread",
    remedy="what a callback reads of the state when it runs, instead of when the hook was called; collectives that callbacks start, "
    "which then come in another order on another rank; the order in which ranks come",
)
def any_order(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Whatever the order in which ranks enter the hook and its callbacks run, every result is right, and the same bits.

    The orders are drawn by seeds 1 and 2, which name their scenarios: the same order comes again with the same seed. Callbacks
    run in another order on each rank, as they may on Gloo, which has several threads.
    """
    plain, *others = runs.values()
    if any(rank.first("gate") for run in runs.values() for rank in run.ranks):
        found.does_not_apply("the hook waits in a way that cannot be seen, e.g. by polling: no order could be forced on it")
    for run in runs.values():
        require_steps(run, claims, found, run.steps("crafted"))
    for other in others:
        for one, again in zip(plain.ranks, other.ranks, strict=True):
            require_same(one.tensors, again.tensors, f"{plain.scenario.name} and {other.scenario.name} on rank {one.rank}", found)


@rule(
    "10.4",
    "callbacks start collectives, as it says",
    on=(BUCKETS,),
    needs=("1.8",),
    claimed="chained",
    since="1.4",
    source="the claim itself: what has its collectives put in order by the kit is to be in need of it",
    remedy="leave the claim out: the hook starts all of its collectives by itself, and needs no stream's order",
)
def starts_in_callbacks(run: Run, claims: Claims, found: Found) -> None:
    """A hook that claims chained starts collectives from callbacks, on every rank, once there are several buckets."""
    for rank in run.ranks:
        started = [event for event in rank.all("collective") if event["callback"] and event["step"] > 0]
        found.require(bool(started), "collectives that callbacks start", f"rank {rank.rank}: it starts all of its collectives by itself")


@rule(
    "10.5",
    "goes without a stream's order",
    on=(BUCKETS, RAW),
    owns=(RAW,),
    reads_all_runs=True,
    needs=("1.8", "3.1"),
    level=SHOULD,
    claimed="chained",
    since="1.4",
    source="torch documentation, torch.futures.Future.then: callbacks may run in any order; Gloo matches collectives by the order of "
    "their start on each rank",
    remedy="a process group of its own for what callbacks start, in bucket order; on NCCL, whose stream orders them, it is right as it is",
)
def without_order(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Of a hook that claims chained, replicas are the same where collectives come as they come too, and exact results right.

    It is certified with one collective at a time, which is how a stream orders them. On Gloo nothing does.
    """
    run = next(run for run in runs.values() if run.scenario.name == RAW.name)
    if not claims.lossy:
        require_steps(run, claims, found, run.steps("crafted"))
    if claims.lossy != LOCAL:
        for rank in run.ranks[1:]:
            require_same(run.ranks[0].tensors, rank.tensors, f"ranks 0 and {rank.rank}", found)


@rule(
    "10.6",
    "uses its groups in one order",
    on=SCHEDULES,
    needs=("10.2",),
    level=SHOULD,
    since="1.5",
    source="torch documentation, torch.distributed, Groups: with several NCCL groups at a time collectives have to be in the same order "
    "on all ranks, or they may wait for each other",
    remedy="groups taken from a set or a dictionary; a group of its own that another thread uses",
)
def one_order_of_groups(run: Run, claims: Claims, found: Found) -> None:
    """Two ranks that are in several groups together issue the collectives of these in the same order.

    On Gloo each group goes by itself. On a device a collective that waits for its peers may keep the next one from beginning.
    """
    different = order_of_groups(run)
    found.require(not different, "one order of groups on ranks that share several", different)
    found.checked(sum(1 for rank in run.ranks for _ in rank.all("collective")))


@rule(
    "10.7",
    "the same collectives however strings hash",
    on=SCHEDULES,
    reads_all_runs=True,
    needs=("10.2", "3.3"),
    since="1.5",
    source="Python documentation, PYTHONHASHSEED: strings are hashed with a value that is drawn anew for each process",
    remedy="a loop over a set of names, or another order that hashes make: sorted() gives one that all ranks share",
)
def however_strings_hash(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """What a rank issues in the hook is the same, in the same order, in a process in which Python hashes strings otherwise.

    The ranks of a run are forked from one process, and agree on an order of hashes; on a cluster no two ranks do.
    """
    plain, *others = runs.values()
    for other in others:
        different = changed_order(plain, other)
        found.require(not different, "the same collectives whatever PYTHONHASHSEED is", different)
        found.checked(sum(1 for rank in plain.ranks for _ in rank.all("collective")))

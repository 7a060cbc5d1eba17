"""Section 10: the hook's collectives."""

from conformance.judging.collective_order import changed_order, disagreement, order_of_groups
from conformance.judging.requirements import require_same, require_steps, sees_collectives
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS, ORDERED, RAW, SCHEDULES
from conformance.scenarios.surroundings import CLOCKS
from conformance.subjects.claims import LOCAL, Claims


def _number_of_collectives(run: Run) -> int:
    return sum(1 for rank in run.ranks for _ in rank.all("collective"))


@rule(
    "10.1",
    "Returns without waiting for its communication",
    on=(ORDERED,),
    needs=("1.8",),
    level=SHOULD,
    since="1.1",
    source="torch documentation, DDP Communication Hooks: the future is what lets communication "
    "overlap with backward",
    remedy="waits inside the hook: use async_op=True, and get_future().then(...) for later work",
)
def overlaps(run: Run, claims: Claims, found: Found) -> None:
    """The hook returns its future while its communication goes on, so that backward computes the
    next gradients meanwhile.

    The proof is an order, not a time: peers enter a call of the hook only when rank 0 has returned
    from it. If rank 0 waits for them there, they are let in, and the waiting line is recorded.
    """
    if run.scenario.serialised:
        found.does_not_apply(
            "the subject claims chained: with one collective at a time, its own waits cannot be "
            "observed"
        )
    elif not sees_collectives([run], claims, found):
        return
    for call in run.ranks[0].all("call"):
        number = call["call"]
        waited = next(run.ranks[0].all("waited", call=number), None)
        gates = (gate for rank in run.ranks[1:] for gate in rank.all("gate", call=number))
        # A gate is opened when rank 0 neither returned nor waited in a call that the kit can see.
        is_stuck = next(gates, None) is not None
        actual = "it neither returned nor waited for as long as its peers stayed out"
        if waited:
            actual = f"it waits in {waited['where']}"
        found.require(
            waited is None and not is_stuck,
            "a hook that returns before its peers have entered theirs",
            f"rank 0, step {call['step']}: {actual}",
        )


@rule(
    "10.2",
    "Issues the same collectives on all ranks",
    on=SCHEDULES,
    needs=("1.8",),
    since="1.2",
    source="torch documentation, torch.distributed: collectives are matched by their order alone; "
    "NCCL User Guide, Creating a Communicator: a mismatch is undefined behaviour",
    remedy="collectives, sizes, dtypes or roots that depend on the rank or on its gradients",
)
def agree(run: Run, claims: Claims, found: Found) -> None:
    """All ranks of a group issue the same collectives in the same order: the same operation, number
    of elements, dtype and root.

    A mismatch that Gloo happens to tolerate is a hang, or memory overwritten, on another backend.
    Sends and receives are not compared, and neither are sizes that may differ: the parts of an
    all_to_all, a gather or a scatter.
    """
    if not sees_collectives([run], claims, found):
        return
    difference = disagreement(run)
    expected = "the same collectives on every rank of a group"
    found.require(difference is None, expected, difference or "")
    found.checked(_number_of_collectives(run))


@rule(
    "10.3",
    "Gives the same bits in any order of ranks and callbacks",
    on=SCHEDULES,
    owns=SCHEDULES,
    reads_all_runs=True,
    needs=("1.8", "3.3"),
    since="1.2",
    source="torch documentation, torch.futures.Future.then: callbacks may run in any order, and on "
    "any thread",
    remedy="state that a callback reads when it runs, instead of when the hook was called; "
    "collectives that callbacks start, in another order on another rank; memory that buckets of "
    "one dtype and size share; results that depend on the order in which ranks arrive",
)
def any_order(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Whatever the order in which ranks enter the hook and its callbacks run, every result is
    right, and has the same bits; random gradients of 20,011 elements are judged by the bound of
    2.2.

    Unless results are lossy, two or three buckets of each of float16, bfloat16, float32 and float64
    have one size: all of them are under way together. The sizes are 33 to 2**17 elements, one from
    each of four equal parts of the range of logarithms.

    Seeds 1 and 2, which are part of the scenarios' names, draw the orders: the same seed gives the
    same order again. Callbacks run in another order on each rank, as they may on Gloo, which has
    several threads.
    """
    plain, *others = runs.values()
    if any(rank.first("gate") for run in runs.values() for rank in run.ranks):
        found.does_not_apply(
            "the hook waits in a way that cannot be observed, e.g. by polling: no order could be "
            "forced on it"
        )
    for run in runs.values():
        require_steps(run, claims, found, run.steps("crafted", "normal"))
    for other in others:
        for one, again in zip(plain.ranks, other.ranks, strict=True):
            pair = f"{plain.scenario.name} and {other.scenario.name} on rank {one.rank}"
            require_same(one.tensors, again.tensors, pair, found)


@rule(
    "10.4",
    "Starts collectives from callbacks as it claims",
    on=(BUCKETS,),
    needs=("1.8",),
    claimed="chained",
    since="1.4",
    source="the claim itself: a hook whose collectives the kit puts in order must need that order",
    remedy="a claim that is not needed: the hook starts all of its collectives by itself, and "
    "needs no stream's order",
)
def starts_in_callbacks(run: Run, claims: Claims, found: Found) -> None:
    """A hook that claims ``chained`` starts collectives from callbacks, on every rank, once there
    are several buckets."""
    for rank in run.ranks:
        events = rank.all("collective")
        starts = any(event["callback"] and event["step"] > 0 for event in events)
        actual = f"rank {rank.rank}: it starts all of its collectives by itself"
        found.require(starts, "collectives that callbacks start", actual)


@rule(
    "10.5",
    "Works without a stream's order",
    on=(BUCKETS, RAW),
    owns=(RAW,),
    reads_all_runs=True,
    needs=("1.8", "3.1"),
    level=SHOULD,
    claimed="chained",
    since="1.4",
    source="torch documentation, torch.futures.Future.then: callbacks may run in any order; Gloo "
    "matches collectives by the order of their start on each rank",
    remedy="collectives that callbacks start on the bucket's group: give them a process group of "
    "their own, in bucket order; on NCCL, whose stream orders them, the hook is right as it is",
)
def without_order(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Replicas of a hook that claims ``chained`` are the same, and exact results right, if
    collectives run in the order in which callbacks start them.

    The hook is certified with one collective at a time, the order of a stream. Gloo has no such
    order.
    """
    run = next(run for run in runs.values() if run.scenario.name == RAW.name)
    if not claims.lossy:
        require_steps(run, claims, found, run.steps("crafted"))
    if claims.lossy != LOCAL:
        for rank in run.ranks[1:]:
            pair = f"ranks 0 and {rank.rank}"
            require_same(run.ranks[0].tensors, rank.tensors, pair, found)


@rule(
    "10.6",
    "Uses its groups in one order",
    on=SCHEDULES,
    needs=("10.2",),
    level=SHOULD,
    since="1.5",
    source="torch documentation, torch.distributed, Groups: with several NCCL groups at a time "
    "collectives have to be in the same order on all ranks, or they may wait for each other",
    remedy="groups taken from a set or a dictionary; a group of its own that another thread uses",
)
def one_order_of_groups(run: Run, claims: Claims, found: Found) -> None:
    """Two ranks that share several groups issue the collectives of these groups in the same order.

    On Gloo the groups are independent. On a device a collective that waits for its peers may keep
    the next one from beginning.
    """
    if not sees_collectives([run], claims, found):
        return
    difference = order_of_groups(run)
    expected = "one order of groups on ranks that share several"
    found.require(difference is None, expected, difference or "")
    found.checked(_number_of_collectives(run))


@rule(
    "10.7",
    "Issues the same collectives with another hash seed",
    on=SCHEDULES,
    reads_all_runs=True,
    needs=("10.2", "3.3"),
    since="1.5",
    source="Python documentation, PYTHONHASHSEED: strings are hashed with a value that is drawn "
    "anew for each process",
    remedy="a loop over a set of names, or another order that depends on hashes: sorted() gives "
    "one that all ranks share",
)
def however_strings_hash(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A rank issues the same collectives in the hook, in the same order, in a process with another
    hash seed.

    The ranks of a run are forked from one process and share its hash seed; on a cluster no two
    ranks do.
    """
    if not sees_collectives(runs.values(), claims, found):
        return
    plain, *others = runs.values()
    for other in others:
        difference = changed_order(plain, other)
        expected = "the same collectives whatever PYTHONHASHSEED is"
        found.require(difference is None, expected, difference or "")
        found.checked(_number_of_collectives(plain))


@rule(
    "10.8",
    "Issues the same collectives whatever its clock says",
    on=(CLOCKS,),
    owns=(CLOCKS,),
    needs=("2.1", "1.8", "1.7"),
    since="1.6",
    source="Python documentation, time.monotonic: the reference point is undefined, so that ranks "
    "have nothing in common; clocks of machines differ, and so do the times at which ranks start",
    remedy="work that is due after some seconds, such as a broadcast once a minute, and choices by "
    "a measured duration: let one rank decide and tell the others, or count steps; a wait with a "
    "deadline of an earlier step, or of less than a second",
)
def whatever_clocks_say(run: Run, claims: Claims, found: Found) -> None:
    """The result is right if the clocks of the ranks differ. Between two steps, from a hundredth of
    a second to ten days pass on a rank. Within a step, up to a second passes between two of its
    readings. Both are drawn for each rank, from equal parts of the range of logarithms.

    A rank that issues a collective by its own clock waits for ranks that issue none. A hook may log
    times and durations. It may also give up after a second or more that it has counted within one
    step: beyond the real time, a step has at most one second. But a deadline from an earlier step
    may be over.

    The functions of `time`, `timeit.default_timer`, and `now()`, `utcnow()` and `today()` of
    `datetime` are replaced for the subject and for installed packages.
    """
    require_steps(run, claims, found, run.steps("crafted"))

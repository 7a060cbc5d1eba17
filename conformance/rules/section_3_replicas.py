"""Section 3: replicas stay identical."""

from conformance.judging.requirements import require_same
from conformance.judging.rule import WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import TRAINING, VALUES, VALUES_AGAIN
from conformance.subjects.claims import LOCAL, Claims


def _require_same_on_all_ranks(run: Run, found: Found) -> None:
    first = run.ranks[0]
    for rank in run.ranks[1:]:
        pair = f"ranks 0 and {rank.rank}"
        require_same(first.tensors, rank.tensors, pair, found, run.element)


@rule(
    "3.1",
    "Gives bit-identical results on all ranks",
    on=(VALUES,),
    needs=("2.2",),
    certifies_machine=True,
    source="DDP's contract: replicas start equal and receive equal gradients; b12x#44",
    remedy="sums in an order that depends on the rank; an owner that keeps values which it has not "
    "sent over the wire",
)
def identical_results(run: Run, claims: Claims, found: Found) -> None:
    """On every step the gradients have the same bits on all ranks of a group."""
    if claims.lossy == LOCAL:
        found.does_not_apply(
            "replicas drift apart under local: 13.5 bounds it, and 2.10 requires it"
        )
        return
    _require_same_on_all_ranks(run, found)
    if run.world == 1:
        found.checked(1)


@rule(
    "3.2",
    "Keeps parameters and buffers identical in training",
    on=(TRAINING,),
    owns=(TRAINING,),
    needs=("3.1", "1.8"),
    source="torch documentation, DistributedDataParallel: replicas",
    remedy="changes that a hook makes on one rank alone: parameters, buffers, optimizer state, "
    "skipped buckets",
)
def identical_models(run: Run, claims: Claims, found: Found) -> None:
    """After each step of a real optimizer the parameters, and the buffers that DDP synchronises,
    are identical on all ranks."""
    if claims.lossy == LOCAL:
        found.does_not_apply("replicas drift apart under local until their parameters are averaged")
        return
    _require_same_on_all_ranks(run, found)


@rule(
    "3.3",
    "Repeats its bits with the same seeds",
    on=(VALUES, VALUES_AGAIN),
    owns=(VALUES_AGAIN,),
    needs=("2.2",),
    reads_all_runs=True,
    worlds=WorldSizes.PRIMARY,
    source="torch documentation, Reproducibility",
    remedy="time, process ids, addresses, unseeded generators, the order in which messages happen "
    "to arrive; the order of a set of names, in which gradients are packed, and hash()",
)
def reproducible(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A second run on the same inputs gives the same bits.

    In it every other rank is a process with another hash seed, as all ranks of a cluster are. The
    ranks of other runs are forked from one process, and iterate over a set of names in one order.
    """
    first, second = runs.values()
    for one, other in zip(first.ranks, second.ranks, strict=True):
        names = set(one.tensors)
        # The second run of a lossy subject is shorter.
        if claims.lossy:
            names &= other.tensors.keys()
        tensors = {name: one.tensors[name] for name in names}
        require_same(tensors, other.tensors, f"two runs on rank {one.rank}", found)

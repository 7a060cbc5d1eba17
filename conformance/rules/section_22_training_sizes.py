"""Section 22: sizes as in training.

Sizes are drawn from the session's seed, within the ranges that ``scenarios/training_sizes.py``
states, so that no threshold in a hook can be chosen to lie beyond them.
"""

from conformance.judging.oracles import folded, vast
from conformance.judging.requirements import require_same, require_steps
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.training_sizes import MANY_BUCKETS, NETWORK, VAST
from conformance.subjects.claims import LOCAL, UNBIASED, Claims

_KINDS = ("crafted", "normal")


def _require(run: Run, claims: Claims, found: Found) -> None:
    """Require the results that the claims allow, of every step."""
    if claims.lossy == LOCAL and run.scenario.folded:
        folded.require_weights(run, claims, found, run.steps(*_KINDS))
    elif run.scenario.folded == "moments":
        _require_moments(run, claims, found)
    elif claims.lossy:
        require_steps(run, claims, found, run.steps(*_KINDS))
    else:
        right = folded.require_right(run, claims, found, run.steps(*_KINDS))
        if right and claims.fused:
            folded.require_optimizer(run, claims, found)


def _require_moments(run: Run, claims: Claims, found: Found) -> None:
    """Require the claimed delta, by the moments of the results."""
    if claims.lossy == UNBIASED:
        vast.require_finite(run, claims, found)
        if run.scenario.name == MANY_BUCKETS.name and not found.failures:
            vast.require_alike_sizes(run, claims, found)
        if claims.noise and not found.failures:
            vast.require_noise(run, claims, found)
    else:
        vast.require_contracted(run, claims, found)
    if not found.failures:
        vast.require_last_elements(run, found)


@rule(
    "22.1",
    "Gives the mean at the sizes of a network",
    on=(NETWORK,),
    owns=(NETWORK,),
    needs=("2.2", "1.8", "2.5"),
    since="2.0",
    source="torch documentation, DistributedDataParallel: bucket_cap_mb is 25 by default; IEEE "
    "754: float32 holds no odd integer above 2**24",
    remedy="a threshold on the number of elements, or of tensors, beyond which another way is "
    "taken; chunks whose tail is left out; indices in 16 or 32 bits, or in float32, which holds no "
    "odd number above 2**24; a dtype that only large buckets are cast to; sums by matrix products, "
    "which torch.set_float32_matmul_precision rounds, but torch.sum and all_reduce do not",
)
def network(run: Run, claims: Claims, found: Found) -> None:
    """In a network of more than 160 parameters under DDP's default buckets, crafted and random
    gradients get the mean, up to the subject's claims.

    Sizes are drawn: one parameter has 2**24 to 2**24 + 2**22 elements at any place, one 10**6 to
    4 * 10**6, 24 to 32 have 10**4 to 10**6, and 129 to 300 tensors share a bucket with others. A
    hook that is wrong beyond any number of elements up to 2**24, or of tensors up to 129, is wrong
    here. Under a lossy claim parameters are smaller, because results are judged over many steps:
    all of them together have 2**25 elements divided by the number of steps. Warm-up steps are
    exact, and the last one feeds random values.

    Each step has another ``torch.set_float32_matmul_precision``, as in 22.2: random gradients have
    "medium" here, and "medium" and "high" there. Under "medium" CPUs with instructions for bfloat16
    round large float32 products to it; on other CPUs products are the same under all three.
    """
    _require(run, claims, found)


@rule(
    "22.2",
    "Gives the mean in any number of buckets, of any size",
    on=(MANY_BUCKETS,),
    owns=(MANY_BUCKETS,),
    needs=("2.2", "1.8", "2.5"),
    since="2.0",
    source="rule book: DDP gives a model of a billion parameters some 160 buckets",
    remedy="a fixed number of result buffers, streams, tags or groups that buckets take in turn; "
    "a special way for buckets of some sizes",
)
def many_buckets(run: Run, claims: Claims, found: Found) -> None:
    """A backward with 257 to 300 buckets, of 33 to a million elements each, gives the mean, up to
    the subject's claims.

    Each step's last bucket comes when the others are reduced, as in training, where backward takes
    long: results of the first buckets may be overwritten by then. The sizes are drawn, evenly over
    their logarithms: some bucket lies between any N and 1.5 N in that range. Under ``compressed``
    each bucket keeps the bound that follows from the claimed delta. Under ``unbiased`` two more
    buckets have 10**6 to 2**24 elements, and no large bucket, or eighth of one, is off by 0.7 of
    the mean in both draws, unless smaller buckets are off by half as much in one. Under ``local``
    there are smaller ones.
    """
    _require(run, claims, found)


@rule(
    "22.3",
    "Gives bit-identical results on all ranks at these sizes",
    on=(NETWORK, MANY_BUCKETS),
    needs=("3.1", "22.1", "22.2"),
    since="2.0",
    source="DDP's contract: replicas start equal and receive equal gradients",
    remedy="sums in an order that depends on the rank, in a path for large buckets; an owner that "
    "keeps values which it has not sent over the wire",
)
def identical_results(run: Run, claims: Claims, found: Found) -> None:
    """At the sizes of 22.1 and 22.2 gradients, and the values of futures, have the same bits on all
    ranks."""
    if claims.lossy == LOCAL:
        found.does_not_apply("replicas drift apart under local")
        return
    first = run.ranks[0]
    for rank in run.ranks[1:]:
        pair = f"ranks 0 and {rank.rank}"
        require_same(first.tensors, rank.tensors, pair, found)
        # Folded records have the outermost values alone; these digests are of all bits.
        pairs = zip(first.all("value"), rank.all("value"), strict=False)
        for one, other in [] if claims.poststep else pairs:
            found.require(
                one.get("digest") == other.get("digest"),
                "the same bits",
                f"{pair}: the results of step {one['step']}, bucket {one['index']}, differ",
            )
            found.checked(1)


@rule(
    "22.4",
    "Loses no more than it claims beyond 2**24 elements",
    on=(VAST,),
    owns=(VAST,),
    claimed="lossy",
    needs=("1.8", "2.5", "13.1", "13.2", "13.3", "13.5"),
    since="2.0",
    source="IEEE 754: float32 holds no odd integer above 2**24; Karimireddy et al., Error Feedback "
    "Fixes SignSGD, ICML 2019, assumption A",
    remedy="indices in 16 or 32 bits, or in float32; a special way for large buckets that does not "
    "divide, sends nothing, or leaves out a tail",
)
def beyond_float32(run: Run, claims: Claims, found: Found) -> None:
    """Under ``compressed`` a matrix of more than 2**24 elements keeps the bound that follows from
    the claimed delta, after two to four steps.

    The gradients are nearly constant, so that the claim holds for low ranks and signs as well. Most
    of the mean comes from one rank, and three quarters of its square from elements beyond 2**24: if
    that part is lost, doubled or misplaced the bound is exceeded. If elements come out alike at 32
    drawn places, the last ones come out too. Under ``unbiased`` results are only required to be
    finite, because two draws prove nothing about an expectation; under ``unbiased(noise=d)`` each
    parameter has noise of that deviation, or less by the root of the number of ranks.
    """
    if claims.lossy == LOCAL:
        found.does_not_apply("local results are judged by 22.1")
    else:
        _require_moments(run, claims, found)

"""Section 2: the result equals that of vanilla allreduce, up to the subject's claims."""

import torch

from conformance.judging.common_rules import refuses_fewer_ranks
from conformance.judging.likely_causes import norm_ratios
from conformance.judging.oracles import folded, lossy
from conformance.judging.oracles import mean as oracle
from conformance.judging.requirements import (
    replaced_by_lossy_rules,
    require_optimizer,
    require_steps,
    skip_if_lossy,
)
from conformance.judging.rule import WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import (
    AS_IS,
    COMPLEX,
    DTYPES,
    FEWER,
    LARGE,
    SHAPES,
    SIZES,
    SUBGROUPS,
    VALUES,
)
from conformance.scenarios.mostly_zero import MOSTLY_ZERO
from conformance.scenarios.sparse import SPARSE
from conformance.scenarios.training_sizes import NETWORK
from conformance.scenarios.values import LAYERS, RANGES
from conformance.subjects.claims import LOCAL, Claims

DOC = "torch documentation, DDP Communication Hooks"


_OVERFLOWS_FUSED = "gradients of this range would overflow the parameters that a fused hook steps"


@rule(
    "2.1",
    "Gives the exact mean of crafted gradients",
    on=(VALUES, AS_IS),
    needs=("1.1", "1.2", "1.5", "1.9"),
    worlds=WorldSizes.PRIMARY,
    certifies_machine=True,
    judges_exact_results=True,
    source=DOC,
    remedy="the divisor, and elements of the bucket that take no part in the collective; if the "
    "result is not meant to be the exact mean, claim its form: scaled, rounded, compressed, "
    "unbiased, local, with warmup(k)",
)
def crafted(run: Run, claims: Claims, found: Found) -> None:
    """On crafted inputs the result is the mean over the group, bit for bit: every element,
    parameter and step.

    Under ``scaled`` it is the mean within the bound of a sum (``judging/oracles/mean.py``). Every
    partial sum and quotient of these inputs is representable, so no rounding can excuse a
    difference.
    """
    if replaced_by_lossy_rules(claims, found):
        return
    ranks = range(run.world)
    if (
        claims.fused
        and not run.scenario.observe.hook
        and all(run.got(r, 0, 0) is None for r in ranks)
    ):
        found.does_not_apply("the hook frees the gradients, and its results are not observed here")
        return
    if not require_steps(run, claims, found, run.steps("crafted")):
        _add_norm_ratios(run, found)


@rule(
    "2.2",
    "Gives the mean of random gradients within the bound of a sum",
    on=(VALUES,),
    needs=("2.1",),
    judges_exact_results=True,
    source=DOC + "; Higham, Accuracy and Stability of Numerical Algorithms, section 4.2",
    remedy="casts to a narrower dtype, noise, or an epsilon on the way; if the rounding is meant, "
    "claim rounded(dtype)",
)
def random_values(run: Run, claims: Claims, found: Found) -> None:
    """On normally distributed inputs every element is within the forward error bound of a sum in
    the bucket's dtype.

    The bound is derived in ``judging/oracles/mean.py``. It holds for every order of summation, and
    for a division before or after the sum.
    """
    if not replaced_by_lossy_rules(claims, found):
        require_steps(run, claims, found, run.steps("normal"))


@rule(
    "2.3",
    "Gives the mean of gradients from 1e-30 to 1e30 in one bucket",
    on=(VALUES,),
    needs=("2.2",),
    source="hooks in the wild that scale by the largest value of a bucket; pytorch#59522",
    remedy="a scale from a norm or a maximum, clamping, and epsilons: small elements must not "
    "depend on large ones",
)
def wide_range(run: Run, claims: Claims, found: Found) -> None:
    """Elements of very different magnitude in one bucket are each within their own bound.

    Under ``rounded`` an element that the dtype cannot hold becomes an infinity of its sign, and
    never a finite value.
    """
    if claims.fused:
        found.does_not_apply(
            "gradients of this range would overflow the parameters that a fused hook steps"
        )
    elif not skip_if_lossy(claims, found, "small values beside large ones may be lost"):
        require_steps(run, claims, found, run.steps("wide"))


@rule(
    "2.4",
    "Keeps the precision of float32, float64, float16 and bfloat16",
    on=(DTYPES,),
    owns=(DTYPES,),
    needs=("2.2", "1.8"),
    source="pytorch#50985, pytorch#72043",
    remedy="buffers made with a fixed dtype, .float() and .half() on the way",
)
def dtypes(run: Run, claims: Claims, found: Found) -> None:
    """Parameters of each floating dtype, in one model, get the mean in the precision of their own
    bucket.

    In particular a float64 bucket keeps float64's precision. Under ``unbiased(noise=d)`` parameters
    of each dtype have the noise.
    """
    require_steps(run, claims, found, run.steps("crafted", "normal"))
    if claims.noise and not found.failures:
        for index in range(len(run.scenario.params)):
            lossy.require_noise_of_parameter(
                run, claims, found, index, "gradients of one dtype have no noise"
            )


@rule(
    "2.5",
    "Gives the mean of parameters of every shape and layout",
    on=(SHAPES, SIZES, LARGE),
    owns=(SHAPES, SIZES, LARGE),
    needs=("2.1", "1.8", "2.4"),
    source="pytorch#58467, pytorch#70222, torch-xpu-ops#3020",
    remedy="views by shape instead of by the parameter's strides; chunks without the tail; special "
    "cases for small numel",
)
def shapes(run: Run, claims: Claims, found: Found) -> None:
    """Parameters that are 0-d, of one element, empty, prime, channels_last, transposed, larger than
    a bucket or of millions of elements get the mean, and so do buckets of every size from 1 to 33
    elements."""
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "2.6",
    "Gives the mean at every world size, also at odd ones",
    on=(VALUES,),
    owns=(VALUES,),
    needs=("2.1",),
    worlds=WorldSizes.OTHERS,
    certifies_machine=True,
    source="fairscale#132, hivemind#440: equal on two ranks, different on more; wrong on one",
    remedy="constants that are right for two ranks only; tails if numel is not divisible by the "
    "world size; a ring for powers of two; noise that a single rank does not get",
)
def world_sizes(run: Run, claims: Claims, found: Found) -> None:
    """The results are as right on 1, 3 and 4 ranks as on two; so is the noise that is claimed."""
    if require_steps(run, claims, found, run.steps("crafted")):
        lossy.require_noise_of_group(run, claims, found)
    elif not claims.lossy:
        _add_norm_ratios(run, found)


def _add_norm_ratios(run: Run, found: Found) -> None:
    ratios = norm_ratios(run, run.steps("crafted"))
    failure = found.failures[-1]
    text = f"norm of result / norm of mean, per step: {ratios}"
    failure.cause = f"{failure.cause} [{text}]" if failure.cause else text


@rule(
    "2.7",
    "Communicates on the model's own process group only",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=("2.1",),
    source="pytorch#53866, pytorch#53793; a third of hooks in the wild use WORLD",
    remedy="collectives without group=, dist.get_world_size() and get_rank() without the group, "
    "root ranks in global numbers, noise that is divided by the ranks of WORLD; if WORLD is meant, "
    "claim world_only",
)
def process_group(run: Run, claims: Claims, found: Found) -> None:
    """A model on a subgroup of WORLD gets the mean over that group, while another group trains at
    the same time.

    Ranks within the groups differ from global ranks. The hook gets the group from its state
    factory, or as its state. A subject that claims ``world_only`` must average over WORLD instead:
    this rule holds that claim to account. Under ``unbiased(noise=d)`` the noise is that of a group
    of this size.
    """
    if require_steps(run, claims, found, run.steps("crafted")):
        lossy.require_noise_of_group(run, claims, found)


@rule(
    "2.8",
    "Averages or refuses complex parameters",
    on=(COMPLEX,),
    owns=(COMPLEX,),
    may_refuse=True,
    needs=("2.1", "2.7"),
    source="pytorch#158753, pytorch#74039",
    remedy="bucket.gradients(), which is wrong for complex parameters in torch: work on "
    "bucket.buffer(), or raise; another group in the code for complex buckets",
)
def complex_parameters(run: Run, claims: Claims, found: Found) -> None:
    """Complex parameters, of float32 and of float64, get the mean of both parts over the model's
    group, or the hook refuses them with an exception on every rank. Of an exact or rounded hook one
    parameter has 2**18 to 2**20 elements, by the session's seed; groups have three ranks and two.

    torch's ``bucket.gradients()`` covers the first half of a complex bucket only. A hook that is
    right on the part that these views cover, and leaves the rest as it is, is not blamed for it:
    the rule then does not apply, and the certificate records it. Of a lossy hook nobody knows
    whether it is right there: it refuses complex parameters, or is right. A fused hook steps both
    parts.
    """
    if claims.lossy:
        require_steps(run, claims, found, [])
        return
    compared = {step: oracle.compare(run, step, claims) for step in run.steps("crafted")}
    wrong = [step for step, comparison in compared.items() if comparison.mismatch]
    if any(_is_right_within_views(run, step, claims) for step in wrong):
        found.does_not_apply(
            "complex parameters are wrong only beyond the reach of torch's bucket.gradients()"
        )
        return
    if wrong:
        require_steps(run, claims, found, wrong)
        return
    for comparison in compared.values():
        found.checked(comparison.checked, comparison.margin)
    require_steps(run, claims, found, run.steps("normal"))
    if claims.fused and not found.failures:
        require_optimizer(run, claims, found)


def _is_right_within_views(run: Run, step: int, claims: Claims) -> bool:
    """Return whether every wrong element lies outside the views that ``bucket.gradients()``
    gave."""
    for rank in run.ranks:
        for call in rank.all("call", step=step):
            covered = torch.zeros(call["numel"], dtype=torch.bool)
            for offset, numel in call["gradient_views"]:
                covered[offset : offset + numel] = True
            if covered.all() or not covered.any():
                return False
            names = [name.removeprefix("p").partition(".")[0] for name in call["parameters"]]
            indices = [int(name) for name in names]
            results = [run.got(rank.rank, step, i) for i in indices]
            if any(value is None for value in results):
                return False
            got = torch.cat([value for value in results if value is not None])
            right = torch.cat(
                [oracle.expected(run, rank.rank, step, i, claims)[0] for i in indices]
            )
            own = torch.cat([run.fed(rank.rank, step, i) for i in indices])
            untouched = (got == own) | (got == own / len(run.group(rank.rank)))
            if (got != right)[covered].any() or not untouched[~covered].all():
                return False
    return True


@rule(
    "2.9",
    "Averages or refuses sparse gradients",
    on=(SPARSE,),
    owns=(SPARSE,),
    may_refuse=True,
    needs=("2.1", "2.7", "1.8"),
    source="pytorch#54747, pytorch#111422; torch's PowerSGD silently stops synchronising them",
    remedy="a sparse bucket's buffer, which is a sparse tensor: reduce it, or raise; row numbers "
    "in 16 bits; values in a narrower dtype; another group than that of dense buckets, as that of "
    "one node; rows that are written in place of being added; a divisor of the ranks that have "
    "rows; a mask of rows by their norm, which drops NaN; room for as many rows as an earlier step "
    "had; sums by pairs on three ranks; rows that are selected at random, and not divided by their "
    "probability",
)
def sparse_gradients(run: Run, claims: Claims, found: Found) -> None:
    """Sparse embeddings beside a dense parameter get the mean, or the hook refuses them with an
    exception on every rank.

    One of them has 66,000 to 80,000 rows, some of which lie beyond 2**16, and one has float64
    values, 2**-45 to 2**-30 as large as the others. A row that is looked up twice comes twice, with
    half of its values each. How many rows a rank looks up is drawn for each step, up to nearly all,
    in one step by no rank of a group; of the large one a late step has eight times as many.

    Crafted values, and random ones, which no narrower dtype holds, are judged, on groups of three
    ranks and of two. Then all rows of one rank are NaN in a step, and infinite in another: so they
    are on all ranks of its group, and later values are right again. Lossy and fused hooks get no
    such rows, some 30 at most, and two groups of two. A fused hook steps the embeddings, too. Under
    ``unbiased`` the rows of 160 steps are right on average, those of all embeddings and of each,
    and not zero in all steps (see "Rows" in ``judging/oracles/lossy``); under ``unbiased(noise=d)``
    all elements of the large one have noise.
    """
    require_steps(run, claims, found, run.steps("crafted", "normal", "nan", "inf"))
    if claims.fused and not found.failures:
        require_optimizer(run, claims, found)
    if claims.noise and not found.failures:
        for index, spec in enumerate(run.scenario.params):
            if spec.layout == "sparse":
                lossy.require_noise_of_parameter(
                    run, claims, found, index, "sparse gradients have no noise"
                )


@rule(
    "2.10",
    "Needs its claims",
    on=(VALUES, NETWORK),
    if_inexact=(NETWORK,),
    needs=("2.2",),
    reads_all_runs=True,
    source="rule book: no claim switches a rule off without its mirror",
    remedy="a claim of less than the hook does: an exact hook needs no rounded(), and a mean is no "
    "sum",
)
def claim_is_true(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A subject that claims less than the exact mean really gives less: rounded values are rounded,
    a sum is a sum, compression and randomness lose something, local replicas differ, and a fused
    optimizer moves its parameters.

    A claim that is not needed would hide a later defect. One world size at which it is true is
    enough. Hooks that compress or round large buckets alone do so in a network, whose parameters
    are as large as the claims allow (see 22.1).
    """
    networks = [run for run in runs.values() if run.scenario.name == NETWORK.name]
    runs = {name: run for name, run in runs.items() if run.scenario.name == VALUES.name}
    several = [run for run in runs.values() if run.world > 1]
    run = min(several, key=lambda run: run.world, default=next(iter(runs.values())))
    if claims.lossy == LOCAL:
        _require_different_replicas(runs, claims, found)
    elif claims.lossy:
        loses = any(
            lossy.differs(one, step, claims)
            for one in (*runs.values(), *networks)
            for step in range(claims.warmup, len(one.scenario.steps))
        )
        expected = f"a result that differs from the mean, as {claims} declares"
        found.require(loses, expected, "the exact mean, in every step")
    if claims.fused:
        stepped = [event for rank in run.ranks for event in rank.all("stepped")]
        moved = any(event["parameters_changed"] for event in stepped)
        found.require(moved, "parameters that the hook steps", "no parameter has moved")
    if claims.rounded:
        strict = Claims(sum=claims.sum, scaled=claims.scaled, world_only=claims.world_only)
        is_rounded = any(
            oracle.compare(run, step, strict).mismatch for step in run.steps("normal")
        ) or any(
            not folded.require_right(one, strict, Found(), one.steps("normal")) for one in networks
        )
        found.require(
            is_rounded,
            f"values rounded to {claims.rounded}",
            "every element of the random steps is as exact as without rounding",
        )
    if claims.scaled:
        strict = Claims(rounded=claims.rounded, world_only=claims.world_only)
        is_inexact = any(
            oracle.compare(one, step, strict).mismatch
            for one in several
            for step in one.steps("crafted")
        )
        found.require(
            is_inexact or not several,
            "crafted gradients whose mean is not exact, at some world size",
            "the exact mean in every step: scaled is not needed",
        )
    if claims.sum and run.world > 1:
        plain = Claims(rounded=claims.rounded, world_only=claims.world_only)
        differs = any(oracle.compare(run, step, plain).mismatch for step in run.steps("crafted"))
        found.require(differs, "the sum, which is not the mean", "the mean")
    # exact claims nothing that could be untrue, and 2.7 judges world_only.
    found.checked(1)


def _require_different_replicas(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    differ = any(
        _differs_between_ranks(run, step)
        for run in runs.values()
        for step in range(claims.warmup, len(run.scenario.steps))
    )
    if not claims.mixing:
        apart = any(not lossy.connects_all(run, claims) for run in runs.values())
        met = f"gradients of all ranks meet, at {', '.join(runs)}"
        found.require(apart, "ranks that never meet, at some world size", met)
    if not differ and all(run.world <= 2 for run in runs.values()):
        # A pair that averages, as in gossip, is all of them.
        found.lacks_evidence("replicas may only differ on three ranks or more")
        return
    actual = f"the same results on all ranks, at {', '.join(runs)}"
    found.require(differ, "replicas that differ, at some world size", actual)


def _differs_between_ranks(run: Run, step: int) -> bool:
    for index in range(len(run.scenario.params)):
        first = run.got(0, step, index)
        for rank in range(1, run.world):
            other = run.got(rank, step, index)
            if first is not None and other is not None and not torch.equal(first, other):
                return True
    return False


@rule(
    "2.12",
    "Gives the mean of values as in training",
    on=(LAYERS,),
    owns=(LAYERS,),
    needs=("2.2", "1.8"),
    since="1.6",
    source="Micikevicius et al., Mixed Precision Training, ICLR 2018 (gradients of 2**-24 and "
    "below); Simsekli et al., A Tail-Index Analysis of Stochastic Gradient Noise, ICML 2019",
    remedy="a range that is cut at some deviations, a clamp, an epsilon or a threshold that is an "
    "absolute number; a scale that is sent in half precision, or that layers share across buckets; "
    "a selection by a strict comparison, which sends none of several equal elements; places "
    "and values of elements that are not zero: room for as many as ranks have on average, places "
    "in 16 bits, padding that overwrites an element; rows of an embedding that are selected by "
    "their sum, which is zero if elements cancel out",
)
def values_in_training(run: Run, claims: Claims, found: Found) -> None:
    """Layers of different scales get the mean, each in a bucket of its own: gradients with heavy
    tails, with one element of ten thousand times the others, with equal magnitudes, and with rows
    of zeros.

    The scales are drawn for each layer, 2**-25 or 2**-24, from 2**-6 to 2**6, and from 2**12
    to 2**17, and so are the sizes: matrices of 20 to 36 rows and columns, vectors of 257 to 420
    elements. An exact result is within the bound of 2.2, a lossy one is held to its claim. Under
    ``compressed``, but for ef21, some steps feed a few elements alone: the last or the first ones,
    those at borders of blocks, or drawn ones.

    Unless results are lossy or parameters are stepped, six steps feed mostly zeros, and there is a
    parameter of 2**16 to 2**17 elements. Each rank has its own share of elements that are not zero,
    which is drawn for each parameter from 2**-12 to 1/4; they are scattered, or in runs of 2 to 64,
    and the first and the last element may be among them. In four of these steps one rank has a
    share of 1/4 to 0.97, and the others have 2**-12 to 2**-6: for any threshold from 0.17 to 0.88
    one step has a mean share below it and a rank above it. There is an embedding, too, of 500 to
    5,000 rows of 8 to 64 columns, in which whole rows are zero. A tenth to a half of the other
    rows have elements that sum to zero, on one rank or on each rank that has the row. These two
    parameters have scales from 2**-40 to 2**-24, and of the ranges above, step by step in turns.
    """
    require_steps(run, claims, found, run.steps("zero_all", "training", MOSTLY_ZERO))


@rule(
    "2.13",
    "Takes gradients from the whole range of their dtype",
    on=(RANGES,),
    owns=(RANGES,),
    needs=("2.4", "2.12"),
    since="1.6",
    source="IEEE 754-2019, table 3.5; Kalamkar et al., A Study of BFLOAT16 for Deep Learning "
    "Training, 2019: bfloat16 has the range of float32, and float16 has not",
    remedy="bfloat16 that is sent as float16, float64 that is sent as float32; a clamp or a scale "
    "for one half precision that the other one shares; a scale that is kept from an earlier step; "
    "squares, norms and products in half precision",
)
def ranges(run: Run, claims: Claims, found: Found) -> None:
    """Parameters of float16, bfloat16 and float64 get the mean, each in a bucket of its own with
    gradients at another end of its dtype's range. In each of five steps a bucket has gradients at
    another end than in the step before.

    The exponents are drawn, as powers of two, for float16: 6 to 7, -13 to -10, -21 to -19; for
    bfloat16: 100 to 115, 20 to 40, -45 to -35, -110 to -100; for float64: 200 to 900, -900 to -200.
    Under ``rounded`` wider dtypes have the exponents of the dtype that values are rounded to.
    Values that overflow in a partial sum may become infinite, as in 2.3.
    """
    if claims.fused:
        found.does_not_apply(
            "gradients of this range would overflow the parameters that a fused hook steps"
        )
    elif not skip_if_lossy(claims, found, "values at the ends of a range may be lost"):
        require_steps(run, claims, found, run.steps("crafted", "normal"))


refuses_fewer = refuses_fewer_ranks(
    "2.11",
    on=(FEWER,),
    owns=(FEWER,),
    needs=("2.1",),
    since="1.4",
    source="hivemind#440, hivemind#450: a rank that is alone gets zeros, without an error",
    remedy="a missing comparison of the group's size with the minimum, in the state or in the "
    "hook; raise an error that names the minimum",
)

"""Section 13: random results whose expectation is the mean, beyond rule 13.3."""

from conformance.judging.oracles import lossy
from conformance.judging.rule import SHOULD, WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.dust import OF_DUST
from conformance.scenarios.hook import VALUES
from conformance.scenarios.training_sizes import NETWORK
from conformance.scenarios.values import ALIKE, MIDDLE_SIZES
from conformance.subjects.claims import Claims


@rule(
    "13.13",
    "Draws anew in every step",
    on=(VALUES,),
    claimed="unbiased",
    needs=("13.3",),
    worlds=WorldSizes.PRIMARY,
    since="1.6",
    source="Alistarh et al., QSGD, NeurIPS 2017: draws are independent; with errors in common, "
    "their sum over n steps grows like n instead of like its root",
    remedy="a seed that repeats: the step modulo a number, or the step within an epoch; a noise "
    "buffer that is used again; noise that carries over to the next step",
)
def fresh_draws(run: Run, claims: Claims, found: Found) -> None:
    """Under ``unbiased`` the error of a draw has nothing in common with the errors of the 80 draws
    after it, over all parameters and over each parameter of at least 256 elements.

    The sum of the products of errors that are k draws apart is at most 6 times its root sum of
    squares plus 12 times the largest product (see ``judging/oracles/lossy``).
    """
    lossy.require_fresh_draws(run, claims, found)


@rule(
    "13.14",
    "Draws independently on each rank",
    on=(ALIKE,),
    owns=(ALIKE,),
    claimed="unbiased",
    needs=("13.3",),
    level=SHOULD,
    reads_all_runs=True,
    since="1.6",
    source="Alistarh et al., QSGD, NeurIPS 2017, section 3: the variance of the mean of W ranks is "
    "a W-th of one rank's",
    remedy="a seed without the rank. Places that all ranks draw alike, for a sum in one allreduce, "
    "cost the same variance; the report then shows it",
)
def independent_ranks(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under ``unbiased``, if all ranks feed the same gradients, the variance of the results falls
    with the number of ranks.

    With independent draws it is V / W. Half of the reduction that this means from the smallest to
    the largest world size above 1 is required.
    """
    several = sorted((run for run in runs.values() if run.world > 1), key=lambda run: run.world)
    if len(several) < 2 or several[0].world == several[-1].world:
        found.does_not_apply("it takes two world sizes above 1")
        return
    few = several[0]
    many = several[-1]
    variances = [lossy.variance(run, claims.warmup) for run in (few, many)]
    limit = (1 + few.world / many.world) / 2
    ratio = variances[1] / max(variances[0], 1e-300)
    found.require(
        ratio <= limit,
        f"results on {many.world} ranks with at most {limit:.3g} times the variance of those on "
        f"{few.world} ranks; independent draws give {few.world / many.world:.3g} times",
        f"{many.world} ranks have {ratio:.3g} times the variance of {few.world} ranks",
        "" if ratio <= limit else "some or all ranks draw the same random numbers",
    )
    found.checked(1, ratio / limit)


@rule(
    "13.15",
    "Draws other numbers for each element",
    on=(VALUES, NETWORK),
    claimed="unbiased",
    needs=("13.3", "22.1"),
    level=SHOULD,
    worlds=WorldSizes.PRIMARY,
    since="2.0",
    source="Alistarh et al., QSGD, NeurIPS 2017, section 3: each element is rounded independently "
    "of the others; the sum of n errors with a part in common grows like n instead of its root",
    remedy="a generator that is seeded by a shape or a number of elements: take the parameter's "
    "place in the model, too; a block of noise that is used again and again",
)
def other_numbers(run: Run, claims: Claims, found: Found) -> None:
    """Under ``unbiased`` the errors of two parameters with equally many elements, from 64 on, have
    less than a quarter of their squares in common, place by place; and so have the errors of a
    bucket with those of 256 elements later, or of any more up to half of the bucket.

    The variance of each element is right if layers of one shape share their random numbers, and so
    is the expectation; but the errors of a step add up over the layers. Layers or blocks that are
    sent as a whole, by one draw, are not meant: their errors are as alike at other distances (see
    ``judging/oracles/lossy/repeats.py``).
    """
    lossy.require_other_numbers(run, claims, found)


@rule(
    "13.16",
    "Gives random results whose expectation is the mean at any size",
    on=(MIDDLE_SIZES,),
    owns=(MIDDLE_SIZES,),
    claimed="unbiased",
    needs=("1.8", "13.3"),
    since="2.0",
    source="Alistarh et al., QSGD, NeurIPS 2017: the expectation of each gradient is that gradient",
    remedy="a factor that is left out, or another number of elements to send, between two sizes; "
    "a table of sizes",
)
def any_size(run: Run, claims: Claims, found: Found) -> None:
    """Under ``unbiased`` the errors of 96 draws cancel out, as 13.3 has it, in buckets of 28 to
    20,000 elements: one size comes from each of eight equal parts of the range of logarithms, by
    the session's seed.

    A bucket of fewer than 256 elements is judged if 100 of its results are not zero, or if results
    are near the mean.
    """
    lossy.require(run, claims, found)


@rule(
    "13.18",
    "Gives the smallest elements their share",
    on=(OF_DUST,),
    owns=(OF_DUST,),
    claimed="unbiased",
    needs=("1.8", "13.3"),
    since="2.0",
    source="Wangni et al., Gradient Sparsification for Communication-Efficient Distributed "
    "Optimization, NeurIPS 2018: an element that is sent with probability p is divided by p",
    remedy="a probability that is drawn with, and clamped or rounded where it divides; an epsilon "
    "in a denominator; too few random bits: a uniform bfloat16 is a multiple of 2**-8",
)
def smallest_elements(run: Run, claims: Claims, found: Found) -> None:
    """Under ``unbiased`` elements that are thousands of times smaller than others in their bucket
    are right on average, in half precision, too.

    Of 65,519 elements one in forty has a deviation of 1/4, and all others have one size: 2**-15 to
    2**-19, by the session's seed. A bucket of bfloat16 or float16 has as many, of 2**-13 to 2**-10
    or of 2**-15 to 2**-13. They are fed 160 times (see ``judging/oracles/lossy``, "Dust").
    """
    lossy.require_dust(run, claims, found)

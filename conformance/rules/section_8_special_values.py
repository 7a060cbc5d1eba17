"""Section 8: NaN, infinities, zeros and subnormals."""

from itertools import product

import torch

from conformance.judging.oracles import lossy
from conformance.judging.requirements import require_steps, skip_if_lossy
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.evidence import SPECIAL_DEEP, SPECIAL_FIRST, SPECIAL_LARGE
from conformance.scenarios.hook import SPECIAL
from conformance.subjects.claims import CONTRACTION, LOCAL, UNBIASED, Claims

SOURCE = "torch documentation, torch.amp.GradScaler: every rank must see an overflow"


def _require_special(run: Run, claims: Claims, found: Found, steps: list[int]) -> None:
    if claims.lossy:
        lossy.require_seen(run, claims, found, steps)
    else:
        require_steps(run, claims, found, steps)


def _require_zeros(run: Run, found: Found, steps: list[int]) -> None:
    for step, rank, index in product(steps, range(run.world), range(len(run.scenario.params))):
        got = run.got(rank, step, index)
        actual = f"rank {rank}, step {step}, parameter p{index}: other values"
        found.require(got is not None and not got.any(), "zeros for zeros", actual)


@rule(
    "8.1",
    "Passes NaN on one rank to all",
    on=(SPECIAL, SPECIAL_FIRST),
    needs=("2.1", "8.4"),
    source=SOURCE,
    remedy="nan_to_num, maxima and comparisons that drop NaN, casts to integers",
)
def nan(run: Run, claims: Claims, found: Found) -> None:
    """An element that is NaN on one rank is NaN on all; the elements beside it are still right.

    In one step every rank has some of them. In three more steps ranks 0, 1 and 2 in turn have a
    single one, at a drawn place. In these a lossy subject gets NaN in all elements of one rank
    instead, since a compressor may leave out any single one. A lossy result has some element that
    is not finite, on every rank; under ``local``, on each rank that fed or received one. If every
    rank has some, the result may instead be zero at all of their places: none was sent.
    """
    _require_special(run, claims, found, run.steps("nan", "small_nan"))


@rule(
    "8.2",
    "Passes infinities to all ranks with their sign",
    on=(SPECIAL, SPECIAL_FIRST),
    needs=("2.1", "8.4"),
    source=SOURCE,
    remedy="clamping to the largest value",
)
def infinity(run: Run, claims: Claims, found: Found) -> None:
    """An element that is infinite on one rank is that infinity on all, and NaN if ranks have
    infinities of both signs."""
    _require_special(run, claims, found, run.steps("inf", "small_inf"))


@rule(
    "8.3",
    "Takes gradients of zeros, on one rank or on all",
    on=(SPECIAL,),
    needs=("2.1", "8.4"),
    source="torch's PowerSGD gives NaN; DeepSpeed#817",
    remedy="a division by a norm or a maximum that is zero",
)
def zeros(run: Run, claims: Claims, found: Found) -> None:
    """A rank whose gradients are all zero contributes zeros; if all gradients are zero the result
    is zero.

    Under ``unbiased(noise=d)`` it is noise, whose root mean square is the deviation d of one rank's
    noise, or less by the root of the number of ranks, and up to half as much more or less: in some
    thousand elements it is off by a few percent. If one rank alone adds it, it is less by the
    number of ranks.
    """
    if not claims.lossy:
        require_steps(run, claims, found, run.steps("zero_one", "zero_all"))
        return
    lossy.require_finite(run, found, run.steps("zero_one", "zero_all"))
    if claims.noise:
        lossy.require_noise(run, claims, found, run.steps("zero_all"))
        return
    # Without feedback there is no residual that could come out in a step of zeros.
    if claims.lossy in (CONTRACTION, UNBIASED, LOCAL):
        _require_zeros(run, found, run.steps("zero_all"))


@rule(
    "8.4",
    "Issues its collectives whatever the values",
    on=(SPECIAL, SPECIAL_FIRST),
    owns=(SPECIAL, SPECIAL_FIRST),
    needs=("2.1",),
    source="WeatherGenerator#2724, fairscale#179: a rank that skips its collective leaves the "
    "others waiting",
    remedy="`if` on a local value before a collective; state that keeps a NaN, or that one rank "
    "alone begins anew; feedback that ends with an overflow; estimates that begin with one",
)
def control_flow(run: Run, claims: Claims, found: Found) -> None:
    """Whatever the values, every rank issues its collectives, and ordinary values afterwards are
    right again.

    Under a lossy claim they are finite, and what the claim allows: without feedback in the next
    step; with feedback nothing is left after faint gradients; under ``compressed(feedback=ef21)``
    results converge to the mean; under ``unbiased`` the errors of 96 draws cancel out. A memory
    that one rank alone sets to zeros, while others keep its part of the mean, is added for good.

    In a second run the first one to three steps have NaN or infinities on one rank, in one
    parameter or in all, as under the first scale of a GradScaler; so have one or two later steps,
    after two to five ordinary ones. With feedback all these steps are a thousandth as large, so
    that it matters little whether a hook keeps or loses its residual. The results of the next 4 to
    12 ordinary steps, and of faint gradients, then sum to the means. Estimates may begin with an
    overflow. In a claimed warm-up these steps are not exact, but not finite.
    """
    if claims.lossy:
        ordinary = ("crafted", "small", "normal", "constant", "settling", "faint")
        lossy.require_finite(run, found, run.steps(*ordinary))
        if not found.failures:
            lossy.require_recovered(run, claims, found)
        return
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "8.5",
    "Keeps subnormal values",
    on=(SPECIAL,),
    needs=("2.1", "8.4"),
    source="IEEE 754; horovod#278: dividing first underflows",
    remedy="torch.set_flush_denormal, an epsilon, a cast to a dtype with a smaller range",
)
def subnormals(run: Run, claims: Claims, found: Found) -> None:
    """Multiples of the smallest subnormal, of float32 or of the dtype that the subject claims to
    round to, give the exact mean."""
    if skip_if_lossy(claims, found, "small values may be lost"):
        return
    kind = f"tiny_{claims.rounded}" if claims.rounded else "tiny"
    require_steps(run, claims, found, run.steps(kind))


@rule(
    "8.6",
    "Keeps the sign of zeros",
    on=(SPECIAL,),
    needs=("2.1", "8.4"),
    level=SHOULD,
    source="IEEE 754; allreduce keeps it, a sum that starts from +0 does not",
    remedy="a sum that starts from zero instead of from the first term",
)
def signed_zeros(run: Run, claims: Claims, found: Found) -> None:
    """The mean of negative zeros is a negative zero."""
    if skip_if_lossy(claims, found, "zeros may come out of a residual"):
        return
    indices = range(len(run.scenario.params))
    for rank, step, index in product(range(run.world), run.steps("minus_zero"), indices):
        got = run.got(rank, step, index)
        kept = got is not None and bool((torch.signbit(got) & (got == 0)).all())
        actual = f"+0.0 or another value on rank {rank}, step {step}, parameter p{index}"
        found.require(kept, "-0.0", actual)


@rule(
    "8.7",
    "Passes a lone NaN or infinity in a bucket of any size",
    on=(SPECIAL_LARGE, SPECIAL_DEEP),
    owns=(SPECIAL_LARGE, SPECIAL_DEEP),
    needs=("8.1", "8.2", "8.4"),
    since="1.6",
    source=SOURCE + "; issue 22: gloo's MAX keeps its first operand if the other one is NaN",
    remedy="a path for large buckets: a cast to integers, a maximum over the ranks, a test for NaN "
    "that looks at a part of the bucket; a bucket of one element; flags for a fixed number of "
    "buckets; a mask of the elements, or of the norms of rows, above zero, which NaN is not",
)
def lone(run: Run, claims: Claims, found: Found) -> None:
    """A single NaN or infinity shows on all ranks, whichever rank has it, in a bucket of a drawn
    size of 2**14 to 2**22 elements, at its first, its last or any element, and in a bucket of one
    element. It shows too in any of the 65 to 140 buckets of a model: the first, the last, one
    between them, and one of each other dtype. The elements beside it are right, and so is the next
    ordinary step.

    In two steps a bucket of the first kind is mostly zeros, unless results are lossy or parameters
    are stepped. Each rank has a share of 2**-12 to 1/4 of elements that are not zero, as in 2.12.
    There one rank has NaN in one step, and infinities in the other, in a drawn part, 1/16 to all.
    In two more steps an embedding of 500 to 5,000 rows has such values in rows of one rank, and
    whole rows of zeros beside them.

    Every size is as likely as its double. The result of a lossy subject has some element that is
    not finite. It gets NaN in several elements of a large parameter, at drawn places: 20 / delta of
    them or more, up to a fifth of the parameter. A compressor that keeps its ``delta`` sends some.
    Under ``unbiased`` and ``local`` every fifth element is NaN, and all of a small parameter.
    """
    _require_special(run, claims, found, run.steps("nan", "inf"))
    if claims.lossy:
        lossy.require_finite(run, found, run.steps("tiled"))
    else:
        require_steps(run, claims, found, run.steps("tiled"))

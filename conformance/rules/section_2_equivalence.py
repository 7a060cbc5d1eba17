"""Section 2: the result is what vanilla allreduce gives, under the subject's claims."""

import torch

from conformance.judging.likely_causes import norm_ratios
from conformance.judging.oracles import lossy
from conformance.judging.oracles import mean as oracle
from conformance.judging.requirements import lossy_instead, require_steps
from conformance.judging.rule import WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import AS_IS, COMPLEX, DTYPES, FEWER, LARGE, SHAPES, SIZES, SPARSE, SUBGROUPS, VALUES
from conformance.subjects.claims import LOCAL, Claims

DOC = "torch documentation, DDP Communication Hooks"


@rule(
    "2.1",
    "crafted gradients give the exact mean",
    on=(VALUES, AS_IS),
    needs=("1.1", "1.2", "1.5", "1.9"),
    worlds=WorldSizes.PRIMARY,
    certifies_machine=True,
    source=DOC,
    remedy="what the hook divides by, and whether every element of the bucket takes part in the collective; "
    "if the result is not meant to be the mean, claim what it is: compressed, unbiased, local, with warmup(k)",
)
def crafted(run: Run, claims: Claims, found: Found) -> None:
    """On crafted inputs the result is the mean over the group, bit for bit: every element, parameter and step.

    Every partial sum and quotient of these inputs is representable, so no rounding can excuse a difference.
    """
    if lossy_instead(claims, found, "rules 13.1 to 13.5 say what is right"):
        return
    if claims.fused and not run.scenario.observe.hook and all(run.got(rank.rank, 0, 0) is None for rank in run.ranks):
        found.does_not_apply("the hook frees the gradients, and unobserved it shows no others")
        return
    if not require_steps(run, claims, found, run.steps("crafted")):
        found.failures[-1].cause += f" [norm of result / norm of mean, per step: {norm_ratios(run, run.steps('crafted'))}]"


@rule(
    "2.2",
    "random gradients give the mean within the bound of a sum",
    on=(VALUES,),
    needs=("2.1",),
    source=DOC + "; Higham, Accuracy and Stability of Numerical Algorithms, section 4.2",
    remedy="casts to a narrower dtype, noise, or an epsilon on the way; if the rounding is meant, claim rounded(dtype)",
)
def random_values(run: Run, claims: Claims, found: Found) -> None:
    """On normally distributed inputs every element is within the forward error bound of a sum in the bucket's dtype.

    The bound is derived in ``oracle.py``; it holds for every order of summation and either place of the division.
    """
    if not lossy_instead(claims, found, "rules 13.1 to 13.5 say what is right"):
        require_steps(run, claims, found, run.steps("normal"))


@rule(
    "2.3",
    "gradients from 1e-30 to 1e30 in one bucket give the mean",
    on=(VALUES,),
    needs=("2.2",),
    source="facts of hooks in the wild: scaling by the largest value of a bucket; pytorch#59522",
    remedy="scaling by a norm or a maximum, clamping, and epsilons: small elements must not depend on large ones",
)
def wide_range(run: Run, claims: Claims, found: Found) -> None:
    """Elements of very different magnitude in one bucket are each within their own bound.

    Under ``rounded`` an element that the dtype cannot hold becomes an infinity of its sign, never a finite lie.
    """
    if claims.fused:
        found.does_not_apply("it would overflow the parameters that a fused hook steps")
    elif not lossy_instead(claims, found, "what is small beside large values may be lost"):
        require_steps(run, claims, found, run.steps("wide"))


@rule(
    "2.4",
    "float32, float64, float16 and bfloat16 keep their precision",
    on=(DTYPES,),
    owns=(DTYPES,),
    needs=("2.2", "1.8"),
    source="pytorch#50985, pytorch#72043",
    remedy="buffers made with a fixed dtype, .float() and .half() on the way",
)
def dtypes(run: Run, claims: Claims, found: Found) -> None:
    """Parameters of each floating dtype, in one model, get the mean in the precision of their own bucket.

    In particular a float64 bucket keeps float64's precision.
    """
    require_steps(run, claims, found, run.steps("crafted", "normal"))


@rule(
    "2.5",
    "every shape and layout of parameter is right",
    on=(SHAPES, SIZES, LARGE),
    owns=(SHAPES, SIZES, LARGE),
    needs=("2.1", "1.8", "2.4"),
    source="pytorch#58467, pytorch#70222, torch-xpu-ops#3020",
    remedy="views by shape instead of by the parameter's strides, chunking with a dropped tail, special cases for small numel",
)
def shapes(run: Run, claims: Claims, found: Found) -> None:
    """Parameters that are 0-d, of one element, empty, prime, channels_last, transposed, larger than a bucket or of
    millions of elements get the mean, and so do buckets of every size from 1 to 33 elements."""
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "2.6",
    "right at every world size, an odd one among them",
    on=(VALUES,),
    owns=(VALUES,),
    needs=("2.1",),
    worlds=WorldSizes.OTHERS,
    certifies_machine=True,
    source="fairscale#132, hivemind#440: equal on two ranks, different on more; wrong on one",
    remedy="constants that are right for two ranks only; tails where numel is not divisible by the world size; a ring for powers of two",
)
def world_sizes(run: Run, claims: Claims, found: Found) -> None:
    """What holds at two ranks holds at 1, 3 and 4."""
    if not require_steps(run, claims, found, run.steps("crafted")) and not claims.lossy:
        found.failures[-1].cause += f" [norm of result / norm of mean, per step: {norm_ratios(run, run.steps('crafted'))}]"


@rule(
    "2.7",
    "the model's own process group, and only that",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=("2.1",),
    source="pytorch#53866, pytorch#53793; a third of hooks in the wild use WORLD",
    remedy="collectives without group=, dist.get_world_size() and get_rank() without the group, root ranks in global numbers; "
    "if WORLD is meant, claim world_only",
)
def process_group(run: Run, claims: Claims, found: Found) -> None:
    """A model on a subgroup of WORLD gets the mean over that group, while another group trains at the same time.

    Places in the groups differ from global ranks. The group reaches the hook through its state factory, or as its
    state. A subject that claims ``world_only`` must instead average over WORLD: the claim is held to account here.
    """
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "2.8",
    "complex parameters, or a clear refusal",
    on=(COMPLEX,),
    owns=(COMPLEX,),
    may_refuse=True,
    needs=("2.1",),
    source="pytorch#158753, pytorch#74039",
    remedy="bucket.gradients() is wrong for complex parameters in torch; work on bucket.buffer(), or raise",
)
def complex_parameters(run: Run, claims: Claims, found: Found) -> None:
    """Complex parameters get the mean of both parts, or the hook refuses them with an exception on every rank.

    torch's ``bucket.gradients()`` covers the first half of a complex bucket only. A hook that is right on what those
    views cover is not blamed for the rest: the rule then does not apply, and the certificate says so.
    """
    if claims.lossy:
        _require_lossy_complex(run, claims, found)
        return
    for step in run.steps("crafted"):
        if oracle.compare(run, step, claims).mismatch and _right_where_views_reach(run, step, claims):
            found.does_not_apply("complex parameters come out wrong where torch's bucket.gradients() does not reach")
            return
    require_steps(run, claims, found, run.steps("crafted"))


def _require_lossy_complex(run: Run, claims: Claims, found: Found) -> None:
    tried = Found()
    if not require_steps(run, claims, tried, []):
        calls = [call for rank in run.ranks for call in rank.all("call")]
        if any(sum(numel for _, numel in call["gradient_views"]) < call["numel"] for call in calls):
            found.does_not_apply("complex parameters come out wrong, and torch's bucket.gradients() does not reach all of them")
            return
    found.failures, found.checks, found.margin = tried.failures, tried.checks, tried.margin


def _right_where_views_reach(run: Run, step: int, claims: Claims) -> bool:
    """Whether every wrong element lies outside the views that ``bucket.gradients()`` gave, and none within."""
    for rank in run.ranks:
        for call in rank.all("call", step=step):
            covered = torch.zeros(call["numel"], dtype=torch.bool)
            for offset, numel in call["gradient_views"]:
                covered[offset : offset + numel] = True
            indices = [int(name.removeprefix("p").partition(".")[0]) for name in call["parameters"]]
            got = [run.got(rank.rank, step, i) for i in indices]
            right = torch.cat([oracle.expected(run, rank.rank, step, i, claims)[0] for i in indices])
            own = torch.cat([run.fed(rank.rank, step, i) for i in indices])
            if any(value is None for value in got) or covered.all() or not covered.any():
                return False
            result = torch.cat([value for value in got if value is not None])
            untouched = (result == own) | (result == own / len(run.group(rank.rank)))
            if (result != right)[covered].any() or not untouched[~covered].all():
                return False
    return True


@rule(
    "2.9",
    "sparse gradients, or a clear refusal",
    on=(SPARSE,),
    owns=(SPARSE,),
    may_refuse=True,
    needs=("2.1", "1.8"),
    source="pytorch#54747, pytorch#111422; torch's PowerSGD silently stops synchronising them",
    remedy="a sparse bucket's buffer is a sparse tensor: reduce it, or raise",
)
def sparse_gradients(run: Run, claims: Claims, found: Found) -> None:
    """A sparse embedding beside dense parameters gets the mean, or the hook refuses it with an exception on every rank."""
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "2.10",
    "the claim is true",
    on=(VALUES,),
    needs=("2.2",),
    reads_all_runs=True,
    source="the rule book: no claim switches a rule off without its mirror",
    remedy="claim what the hook does: an exact hook needs no rounded(), a mean is no sum",
)
def claim_is_true(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A subject that claims less than the exact mean really gives less: rounded values are rounded, a sum is a sum, what
    is compressed or random loses something, replicas of what is local differ, a fused optimizer moves its parameters.

    A claim that is not needed would hide a defect that comes later. One world size at which it is true is enough.
    """
    run = min((run for run in runs.values() if run.world > 1), key=lambda run: run.world, default=next(iter(runs.values())))
    if claims.lossy == LOCAL:
        apart = any(_apart(run, step) for run in runs.values() for step in range(claims.warmup, len(run.scenario.steps)))
        found.require(apart, "replicas that differ, at some world size", f"the same results on all ranks, at {', '.join(runs)}")
    elif claims.lossy:
        steps = range(claims.warmup, len(run.scenario.steps))
        loses = any(lossy.differs(run, step, claims) for run in runs.values() for step in steps)
        found.require(loses, f"a result that loses something under {claims}", "the exact mean, in every step")
    if claims.fused:
        moved = any(stepped["parameters_changed"] for rank in run.ranks for stepped in rank.all("stepped"))
        found.require(moved, "parameters that the hook steps", "no parameter has moved")
    if claims.rounded:
        strict = Claims(sum=claims.sum, world_only=claims.world_only)
        rounded = any(oracle.compare(run, step, strict).mismatch for step in run.steps("normal"))
        found.require(rounded, f"values rounded to {claims.rounded}", "every element of the random steps is as exact as without rounding")
    if claims.sum and run.world > 1:
        plain = Claims(rounded=claims.rounded, world_only=claims.world_only)
        differs = any(oracle.compare(run, step, plain).mismatch for step in run.steps("crafted"))
        found.require(differs, "the sum, which is not the mean", "the mean")
    found.checked(1)  # exact claims nothing that could be untrue; world_only is judged by 2.7


@rule(
    "2.11",
    "refuses fewer ranks than it takes",
    on=(FEWER,),
    owns=(FEWER,),
    needs=("2.1",),
    claimed="min_world_size",
    worlds=WorldSizes.BELOW_MINIMUM,
    since="1.4",
    source="hivemind#440, hivemind#450: where a rank is alone it gets zeros, and nothing says so",
    remedy="compare the group's size when the state is made or the hook is called, and raise an error that says what it takes",
)
def refuses_fewer(run: Run, claims: Claims, found: Found) -> None:
    """With fewer ranks than ``min_world_size`` says, every rank gets an error from the hook or its set-up, and none hangs."""
    found.require(False, "an error on every rank", f"it goes through a step of {run.world} {'ranks' if run.world > 1 else 'rank'}")


def _apart(run: Run, step: int) -> bool:
    return any(
        not torch.equal(one, other)
        for index in range(len(run.scenario.params))
        for rank in range(1, run.world)
        if (one := run.got(0, step, index)) is not None and (other := run.got(rank, step, index)) is not None
    )

"""Section 4: models and options of DDP that change the buckets."""

from dataclasses import replace
from itertools import product

from conformance.judging.common_rules import AUTOCAST_OPERATIONS, DEFAULT_DTYPE
from conformance.judging.oracles import lossy
from conformance.judging.requirements import require_optimizer, require_steps
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.clusters import UNUSED_GROUPS
from conformance.scenarios.hook import COMBINED, FROZEN, STATIC, UNUSED
from conformance.scenarios.reused_states import RECAST, REWRAPPED
from conformance.scenarios.surroundings import AUTOCAST, DEFAULT_DTYPES
from conformance.subjects.claims import Claims


@rule(
    "4.1",
    "Averages parameters that some ranks leave out",
    on=(UNUSED, UNUSED_GROUPS),
    owns=(UNUSED, UNUSED_GROUPS),
    may_refuse=True,
    needs=("2.1", "2.7", "1.8"),
    since="1.1",
    source="torch documentation, DistributedDataParallel: find_unused_parameters",
    remedy="a mean over the ranks that have used a parameter, in one dtype or in all; the .grad of "
    "a parameter that was left out, which is None or left from an earlier "
    "step: work on the bucket, which holds zeros then; offsets that leave out parameters of the "
    "bucket that require no gradient; the path for find_unused_parameters, without the group",
)
def left_out(run: Run, claims: Claims, found: Found) -> None:
    """With find_unused_parameters=True a parameter that some ranks have not used gets the mean over
    all ranks, with zeros for those, on every rank. A parameter that no rank has used keeps no
    gradient.

    The same holds for the ranks of a group, if the model is on a group of two ranks, of three; a
    subject with ``world_only`` is judged on WORLD alone. Parameters are of float32, and of float16,
    bfloat16 and float64 unless the subject is lossy. It holds too if parameters are frozen after
    DDP was made, for as long as no rank uses them, as networks are that train in turns; or the
    subject refuses such a model with an error on every rank.

    Under ``unbiased`` ranks of groups leave out the same parameters in all draws, so that what
    others of their bucket gain by that adds up. Claimed noise is added by all ranks of a group,
    also by those that leave the parameter out. Under ``compressed(feedback=ef21)`` they leave out
    the same parameters until results have converged: the estimate of a rank that no longer uses a
    parameter is no part of the mean then.
    """
    require_steps(run, claims, found, run.steps("crafted"))
    if claims.noise and run.scenario.name == UNUSED_GROUPS.name and not found.failures:
        lossy.require_noise_of_all(run, claims, found)
    # A fused hook frees the gradients: the results of its futures are no evidence of those that
    # DDP left.
    if claims.fused:
        return
    steps = range(len(run.scenario.steps))
    for rank, step, index in product(range(run.world), steps, range(len(run.scenario.params))):
        if not run.receives(rank, step, index):
            place = f"rank {rank}, step {step}, parameter {run.parameter_name(index)}"
            found.require(
                run.got(rank, step, index) is None,
                "no gradient if no rank has fed one",
                f"{place}: it has one",
            )


@rule(
    "4.2",
    "Works beside frozen parameters and with one that is used twice",
    on=(FROZEN, REWRAPPED, RECAST),
    owns=(FROZEN, REWRAPPED, RECAST),
    refusable=(FROZEN, REWRAPPED, RECAST),
    needs=("2.1",),
    since="1.1",
    source="torch documentation, DistributedDataParallel: parameters that require no gradient are "
    "not in buckets",
    remedy="offsets or names made from all of model.parameters(); tensor hooks on parameters that "
    "require no gradient; model.training; addresses of parameters, and lists of their .data, which "
    "a fused hook keeps; plans, offsets or buffers that a state keeps for a bucket or a parameter: "
    "once DDP is made anew, buckets have other parameters, dtypes or sizes",
)
def frozen(run: Run, claims: Claims, found: Found) -> None:
    """Frozen parameters change nothing for the parameters between them, and neither does eval mode,
    in which models with frozen parts are often trained, nor an optimizer that gives parameters new
    storage. A parameter that the forward uses twice gets the mean of the sum. A fused hook steps
    the parameters where they are then, and may refuse new storage with an error on every rank.

    So it is if layers thaw or freeze after some steps: DDP is made anew over the same model, with
    the same hook and state, and its buckets have other parameters and sizes; or the same sizes and
    another parameter, if the other one of two neighbours of one shape is trained from then on. So
    it is, too, if the model changes its dtype, from half precision to float32, to another one, and
    back to float32, as by model.float(); if layers then have other sizes; and if DDP is made anew
    with another bucket_cap_mb and the other gradient_as_bucket_view. Or the subject refuses to
    reuse its state with an error on every rank. A set-up, or a factory that takes the model, may
    keep DDP: it is not judged so. The parameters of a fused hook are not compared if they change
    their dtype.
    """
    if any(rank.first("keeps_ddp") for rank in run.ranks):
        found.leaves_out(
            "states that serve DDP anew, after layers have thawed, are not judged: the subject "
            "takes the model under DDP"
        )
        return
    steps = run.steps("crafted", "normal")
    holds = require_steps(run, claims, found, steps)
    if holds and claims.fused and not run.scenario.has_versions:
        require_optimizer(run, claims, found)
        holds = not found.failures
    if not holds and run.scenario.rewraps:
        places = " and ".join(map(str, run.scenario.rewraps))
        last = found.failures[-1]
        actual = f"DDP is made anew in steps {places}: {last.actual}"
        found.failures[-1] = replace(last, actual=actual)


@rule(
    "4.3",
    "Works with a static graph",
    on=(STATIC,),
    owns=(STATIC,),
    needs=("2.1", "1.8"),
    since="1.1",
    source="torch documentation, DistributedDataParallel: static_graph",
    remedy="assumptions on the gradients that exist when the hook is called",
)
def static_graph(run: Run, claims: Claims, found: Found) -> None:
    """With static_graph=True the result is the same.

    The buckets of the first step then come after the whole backward.
    """
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "4.4",
    "Works with several options of DDP together",
    on=(COMBINED,),
    owns=(COMBINED,),
    may_refuse=True,
    needs=("1.10", "4.1", "5.1", "9.5"),
    since="1.3",
    source="fairscale#400, fairscale#586, fairscale#242: right one by one, and wrong together",
    remedy="p.grad of a parameter that this rank has not used, which is None under "
    "gradient_as_bucket_view, too",
)
def together(run: Run, claims: Claims, found: Found) -> None:
    """With gradient_as_bucket_view=True, find_unused_parameters=True and micro-batches under
    no_sync at once, the result is the same as with each of them alone. Or the subject refuses such
    a model with an error on every rank.

    Each micro-batch has parameters of its own, as if it was routed to other experts: one that only
    an earlier one has used is used in that step.
    """
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "4.5",
    "Works under any default dtype of torch, and under autocast",
    on=(DEFAULT_DTYPES, AUTOCAST),
    owns=(DEFAULT_DTYPES, AUTOCAST),
    refusable=(AUTOCAST,),
    needs=("2.2", "1.8"),
    since="1.6",
    source=f"{DEFAULT_DTYPE}; {AUTOCAST_OPERATIONS}",
    remedy="tensors that are made without a dtype, in the state or in the hook: torch.zeros(n), "
    "torch.tensor(x), torch.rand(n), a table of 1 / n; take the dtype of the bucket; matmul, "
    "einsum or linear, which compute in half precision under autocast: leave it in the hook by "
    "torch.autocast(device, enabled=False); a sum in half precision, whose terms lose no "
    "bit there",
)
def default_dtypes(run: Run, claims: Claims, found: Found) -> None:
    """The result is right if torch's default dtype is float16, bfloat16 or float64, if it changes
    between steps, and if backward runs under autocast to float16 and bfloat16, where an error on
    every rank may refuse it. The state is made under the first default dtype.

    The order is drawn. The first two steps have half dtypes, since tensors that a hook makes then
    and keeps lose digits. There are three ranks if the session has three, because a half dtype does
    not hold 1/3. The parameters are float32, in buckets of 16 to 600,000 elements. Ten sizes are
    drawn, one from each of eight equal parts of the range of logarithms up to 20,000, and of two
    parts of the range from there on. Lossy results are judged for small buckets alone. A fused hook
    steps the parameters as its optimizer does.

    Under autocast two steps have random values that a half dtype holds, one float16 and one
    bfloat16, for results that are judged by single steps: their mean is still within the bound of
    2.2 for float32.
    """
    kinds = ("crafted", "normal", "narrow_float16", "narrow_bfloat16")
    require_steps(run, claims, found, run.steps(*kinds))
    if claims.fused and not found.failures:
        require_optimizer(run, claims, found)

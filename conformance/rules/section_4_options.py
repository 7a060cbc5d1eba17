"""Section 4: models and options of DDP under which buckets are other than usual."""

from conformance.judging.requirements import require_steps
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import COMBINED, FROZEN, STATIC, UNUSED
from conformance.subjects.claims import Claims


@rule(
    "4.1",
    "parameters that some ranks leave out",
    on=(UNUSED,),
    owns=(UNUSED,),
    may_refuse=True,
    needs=("2.1", "1.8"),
    since="1.1",
    source="torch documentation, DistributedDataParallel: find_unused_parameters",
    remedy="work on the bucket, where a parameter that was left out is zeros; its .grad is None, or is what an earlier step left",
)
def left_out(run: Run, claims: Claims, found: Found) -> None:
    """With find_unused_parameters=True a parameter that some ranks have not used gets the mean over all, zeros for those,
    on every rank; one that no rank has used keeps no gradient. Or the subject refuses such a model, with an error on every rank."""
    require_steps(run, claims, found, run.steps("crafted"))
    if claims.fused:  # the gradients are freed then, and what a future held is not what DDP left
        return
    for rank in range(run.world):
        for step in range(len(run.scenario.steps)):
            for index in range(len(run.scenario.params)):
                if not run.receives(rank, step, index):
                    where = f"rank {rank}, step {step}, parameter {run.parameter_name(index)}"
                    found.require(run.got(rank, step, index) is None, "no gradient where no rank has fed one", f"{where}: it has one")


@rule(
    "4.2",
    "frozen parameters, and one that is used twice",
    on=(FROZEN,),
    owns=(FROZEN,),
    needs=("2.1",),
    since="1.1",
    source="torch documentation, DistributedDataParallel: parameters that require no gradient are not in buckets",
    remedy="offsets or names made from all of model.parameters(); tensor hooks on parameters that require no gradient",
)
def frozen(run: Run, claims: Claims, found: Found) -> None:
    """Frozen parameters between others change nothing for those; one that the forward uses twice gets the mean of the sum."""
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "4.3",
    "a static graph",
    on=(STATIC,),
    owns=(STATIC,),
    needs=("2.1", "1.8"),
    since="1.1",
    source="torch documentation, DistributedDataParallel: static_graph",
    remedy="assumptions on which gradients are there already when the hook is called",
)
def static_graph(run: Run, claims: Claims, found: Found) -> None:
    """With static_graph=True, where the first step's buckets come after the whole backward, the result is the same."""
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "4.4",
    "options of DDP together",
    on=(COMBINED,),
    owns=(COMBINED,),
    may_refuse=True,
    needs=("1.10", "4.1", "5.1", "9.5"),
    since="1.3",
    source="fairscale#400, fairscale#586, fairscale#242: right one by one, and wrong together",
    remedy="p.grad of a parameter that this rank has not used, which is None under gradient_as_bucket_view too",
)
def together(run: Run, claims: Claims, found: Found) -> None:
    """With gradient_as_bucket_view=True, find_unused_parameters=True and micro-batches under no_sync at once, the result is
    what it is with each of them alone. Or the subject refuses such a model, with an error on every rank."""
    require_steps(run, claims, found, run.steps("crafted"))

"""Section 5: gradients that accumulate over micro-batches."""

from conformance.judging.requirements import require_steps
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import ACCUMULATED
from conformance.subjects.claims import Claims


@rule(
    "5.1",
    "Averages the sums of accumulated micro-batches",
    on=(ACCUMULATED,),
    owns=(ACCUMULATED,),
    needs=("2.1", "1.8"),
    since="1.1",
    source="torch documentation, DistributedDataParallel.no_sync",
    remedy="tensor hooks that see each micro-batch's gradient instead of their sum; counts of "
    "backwards taken for counts of steps",
)
def accumulated(run: Run, claims: Claims, found: Found) -> None:
    """Micro-batches under no_sync, and a last one that synchronises, give the mean of their sums.

    Nothing is communicated in between; the buckets of the last backward hold the sum.
    """
    require_steps(run, claims, found, run.steps("crafted"))

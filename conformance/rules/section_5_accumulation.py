"""Section 5: gradients that accumulate over micro-batches."""

from conformance.judging.requirements import require_meeting, require_steps
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import ACCUMULATED
from conformance.subjects.claims import LOCAL, Claims


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
    """One to four micro-batches under no_sync, and a last one that synchronises, give the mean of
    their sums.

    Nothing is communicated in between; the buckets of the last backward hold the sum. Under
    ``local`` all ranks meet within 24 steps, and get the mean over all ranks at a claimed period,
    which is counted in steps.
    """
    if require_steps(run, claims, found, run.steps("crafted")) and claims.lossy == LOCAL:
        require_meeting(run, claims, found)

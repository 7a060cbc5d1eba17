"""Section 7: ranks with different numbers of inputs."""

from conformance.judging.requirements import require_steps
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import UNEVEN
from conformance.subjects.claims import Claims


@rule(
    "7.1",
    "Works on ranks that have run out of inputs",
    on=(UNEVEN,),
    owns=(UNEVEN,),
    may_refuse=True,
    needs=("2.1", "1.8"),
    since="1.1",
    source="torch documentation, Distributed Training with Uneven Inputs Using the Join Context "
    "Manager",
    remedy="p.grad instead of the bucket, which holds zeros then; collectives outside the hook, "
    "which no other rank shadows",
)
def out_of_inputs(run: Run, claims: Claims, found: Found) -> None:
    """Under Join the hook is called with zeros on a rank that has no input left, or never had any.
    The other ranks get the mean with those zeros in it, and all ranks finish. Or the hook refuses
    with an error on every rank."""
    require_steps(run, claims, found, run.steps("crafted"))

"""Section 10: how the hook communicates."""

from conformance.claims import Claims
from conformance.rulebook import SHOULD, rule
from conformance.run import Run
from conformance.scenario import ORDERED
from conformance.verdict import Found


@rule(
    "10.1",
    "does not wait inside the hook",
    on=(ORDERED,),
    needs=("1.8",),
    level=SHOULD,
    since="1.1",
    source="torch documentation, DDP Communication Hooks: the future is what lets communication overlap with backward",
    remedy="async_op=True, and get_future().then(...) for what comes after",
)
def overlaps(run: Run, claims: Claims, found: Found) -> None:
    """The hook returns its future while its communication goes on: backward computes the next gradients meanwhile.

    Proved by order, not by time: peers enter a call of the hook only when rank 0 has returned from it. If it waits for
    them there, they are let in, and the line that waits is on record.
    """
    for call in run.ranks[0].all("call"):
        waited = next(run.ranks[0].all("waited", call=call["call"]), None)
        spun = next((gate for rank in run.ranks[1:] for gate in rank.all("gate", call=call["call"])), None)
        said = f"it waits in {waited['where']}" if waited else "it neither returned nor waited for as long as its peers stayed out"
        found.require(
            waited is None and spun is None,
            "a hook that returns before its peers have entered theirs",
            f"rank 0, step {call['step']}: {said}",
        )

"""Section 12: a failure surfaces as an error, and a local gradient is never passed off as a mean."""

from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.files import PEER_DIED
from conformance.records.run import Run
from conformance.scenarios.hook import COLLECTIVE_RAISES, PEER_DIES, PEER_DIES_LATER, PEER_SILENT
from conformance.subjects.claims import LOCAL, Claims


def _require_raised(run: Run, rank: int, what: str, found: Found) -> None:
    for fault in run.ranks[rank].all("fault"):
        if fault["unused"]:
            continue  # the hook issued no collective that the kit can see: nothing was injected
        found.require(
            fault["raised"],
            f"an error from backward() on rank {rank}, after {what}",
            f"backward() returned on rank {rank} as if nothing had happened",
            "a callback that never reads fut.value() swallows the failure, and so does an except around the collective",
        )


def _is_alone(run: Run, rank: int, claims: Claims, found: Found) -> bool:
    """Whether ``rank``, under local, took part in no collective of the step: it has no peer to miss."""
    faults = list(run.ranks[rank].all("fault"))
    alone = claims.lossy == LOCAL and bool(faults) and all(not fault["started"] and not fault["raised"] for fault in faults)
    if alone:
        found.does_not_apply("under local this rank takes part in no collective of the step")
    return alone


@rule(
    "12.1",
    "an error of its own collective surfaces",
    on=(COLLECTIVE_RAISES,),
    owns=(COLLECTIVE_RAISES,),
    needs=("2.1",),
    source="bugs in the wild: except clauses that fall back to the local gradient",
    remedy="let exceptions of collectives pass",
)
def collective_raises(run: Run, claims: Claims, found: Found) -> None:
    """When a collective of the hook raises on one rank, backward() raises there."""
    if not _is_alone(run, 1, claims, found):
        _require_raised(run, 1, "its collective had raised", found)


@rule(
    "12.2",
    "a dead peer surfaces as an error",
    on=(PEER_DIES,),
    owns=(PEER_DIES,),
    needs=("2.1",),
    source="torch documentation, torch.futures.Future.then: errors are seen only by value() and wait()",
    remedy="read fut.value() in the callback",
)
def peer_dies(run: Run, claims: Claims, found: Found) -> None:
    """When a peer dies in the middle of a step, backward() raises on the ranks that are left."""
    if not _is_alone(run, 0, claims, found):
        _require_raised(run, 0, "its peer had died", found)


@rule(
    "12.3",
    "a collective that times out surfaces",
    on=(PEER_SILENT,),
    owns=(PEER_SILENT,),
    needs=("2.1",),
    source="torch documentation, init_process_group: timeout",
    remedy="read fut.value() in the callback; do not wait with a timeout of your own and go on",
)
def peer_silent(run: Run, claims: Claims, found: Found) -> None:
    """When a peer stays out of the collective until the group's timeout, backward() raises."""
    if not _is_alone(run, 0, claims, found):
        _require_raised(run, 0, "the group's timeout had expired", found)


@rule(
    "12.4",
    "a peer that dies between two collectives surfaces",
    on=(PEER_DIES_LATER,),
    owns=(PEER_DIES_LATER,),
    needs=("12.2",),
    since="1.5",
    source="torch documentation, torch.futures.Future.then; hooks of two stages whose second callback never reads fut.value()",
    remedy="read fut.value() of every stage, and fail the hook's future with what it raises",
)
def peer_dies_later(run: Run, claims: Claims, found: Found) -> None:
    """When a peer dies before the last collective of a step, those before it being over, backward() raises on the ranks that are left."""
    if run.ranks[1].exit != PEER_DIED or any(fault["unused"] for fault in run.ranks[0].all("fault")):
        found.does_not_apply("ranks do not start the same collectives in two steps: none can be said to be the last one")
        return
    _require_raised(run, 0, "its peer had died before the last collective", found)

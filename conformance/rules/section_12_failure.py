"""Section 12: a failure surfaces as an error, and a local gradient is never passed off as a
mean."""

from conformance.judging.oracles.failure import require_raised
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.files import PEER_DIED
from conformance.records.run import Run
from conformance.scenarios.evidence import (
    COLLECTIVE_RAISES_LARGE,
    COLLECTIVE_RAISES_LATE,
    PEER_DIES_LARGE,
)
from conformance.scenarios.failing_models import EACH_FAILS
from conformance.scenarios.hook import COLLECTIVE_RAISES, PEER_DIES, PEER_DIES_LATER, PEER_SILENT
from conformance.scenarios.later_failures import (
    BETWEEN_RAISES,
    LARGE_BETWEEN_RAISES,
    LARGE_LAST_RAISES,
    LAST_RAISES,
    LATE_RAISES,
)
from conformance.scenarios.model import EACH_MODEL_FAILS
from conformance.subjects.claims import LOCAL, Claims


def _require_raised(run: Run, rank: int, event: str, found: Found) -> None:
    """Require the collective's error from backward on ``rank``, after an event in words."""
    for fault in run.ranks[rank].all("fault"):
        if fault["unused"]:
            found.lacks_evidence("the kit saw no collective in the step, and could fail none")
            continue
        require_raised(found, fault, rank, "backward()", event, _SWALLOWED, "read fut.value()")


_SWALLOWED = (
    "a callback that never reads fut.value() swallows the failure, and so does an except around "
    "the collective"
)


def _is_alone(run: Run, rank: int, claims: Claims, found: Found) -> bool:
    """Return whether a rank of a ``local`` subject took part in no collective of the step."""
    faults = list(run.ranks[rank].all("fault"))
    took_part = any(fault["started"] or fault["raised"] for fault in faults)
    is_alone = claims.lossy == LOCAL and bool(faults) and not took_part
    if is_alone:
        found.does_not_apply("under local this rank takes part in no collective of the step")
    return is_alone


def _require_raised_by_collective(run: Run, claims: Claims, found: Found) -> None:
    """Require the error of the collective that has raised on rank 1."""
    faults = list(run.ranks[1].all("fault"))
    if run.scenario.fault.succeeding and faults and all(fault["unused"] for fault in faults):
        # The run in which the first collective raises decides whether there is any.
        if claims.lossy == LOCAL:
            found.does_not_apply("the collective that was to raise came in none of the steps")
        else:
            found.leaves_out(
                f"{run.name}: the collective that was to raise came in none of the steps"
            )
        return
    place = max((fault.get("place", 1) for fault in faults), default=0)
    event = f"collective {place} of its step" if place > 1 else "its collective"
    if not _is_alone(run, 1, claims, found):
        _require_raised(run, 1, f"{event} had raised", found)


@rule(
    "12.1",
    "Raises the error of its own collective",
    on=(COLLECTIVE_RAISES, LAST_RAISES, BETWEEN_RAISES),
    owns=(COLLECTIVE_RAISES, LAST_RAISES, BETWEEN_RAISES),
    needs=("2.1",),
    source="bugs in the wild: except clauses that fall back to the local gradient",
    remedy="except clauses around collectives: let their exceptions pass",
)
def collective_raises(run: Run, claims: Claims, found: Found) -> None:
    """When a collective of the hook raises on one rank, backward() raises there: the first one of a
    step, the last one, or a drawn one between them, each in a run of its own.

    The steps before show how many collectives a step has. With two of them the second raises in two
    of the runs, and with one it raises in all. In the run of the first, it is not issued, and peers
    wait for it; the others are issued, and raise on this rank alone. If a step has fewer than the
    steps before, one of the next 29 fails. Under ``local`` the first collective of 24 steps raises,
    since a rank is alone in some of them, and a later one in one of 53.
    """
    _require_raised_by_collective(run, claims, found)


@rule(
    "12.2",
    "Raises an error if a peer dies",
    on=(PEER_DIES,),
    owns=(PEER_DIES,),
    needs=("2.1",),
    source="torch documentation, torch.futures.Future.then: errors are seen only by value() and "
    "wait()",
    remedy="a callback that does not read fut.value(); an except around the collective between "
    "nodes, after which a node goes on with its own mean",
)
def peer_dies(run: Run, claims: Claims, found: Found) -> None:
    """When a peer dies in the middle of a step, backward() raises on the remaining ranks. The two
    ranks are on nodes of their own, unless results are ``local``; in 12.5 they are on one node.
    """
    if not _is_alone(run, 0, claims, found):
        _require_raised(run, 0, "its peer had died", found)


@rule(
    "12.3",
    "Raises an error if a collective times out",
    on=(PEER_SILENT,),
    owns=(PEER_SILENT,),
    needs=("2.1",),
    source="torch documentation, init_process_group: timeout",
    remedy="a callback that does not read fut.value(); a wait with a timeout of its own after "
    "which the hook goes on",
)
def peer_silent(run: Run, claims: Claims, found: Found) -> None:
    """When a peer stays out of the collective until the group's timeout, backward() raises."""
    if not _is_alone(run, 0, claims, found):
        _require_raised(run, 0, "the group's timeout had expired", found)


@rule(
    "12.4",
    "Raises an error if a peer dies between two collectives",
    on=(PEER_DIES_LATER,),
    owns=(PEER_DIES_LATER,),
    needs=("12.2",),
    since="1.5",
    source="torch documentation, torch.futures.Future.then; hooks of two stages whose second "
    "callback never reads fut.value()",
    remedy="a stage that does not read fut.value() of the one before, or does not fail the hook's "
    "future with its error",
)
def peer_dies_later(run: Run, claims: Claims, found: Found) -> None:
    """When a peer dies before the last collective of a step, and the earlier ones are over,
    backward() raises on the remaining ranks."""
    faults = list(run.ranks[0].all("fault"))
    unused = any(fault["unused"] for fault in faults)
    if unused and claims.lossy != LOCAL and not any(fault["started"] for fault in faults):
        found.lacks_evidence("the kit saw no collective in the step, and could fail none")
        return
    if run.ranks[1].exit != PEER_DIED or unused:
        found.does_not_apply(
            "ranks do not start the same collectives in two steps, so that the last one is not "
            "known"
        )
        return
    _require_raised(run, 0, "its peer had died before the last collective", found)


def _require_raised_by_each_model(run: Run, claims: Claims, found: Found) -> None:
    """Require the error of the collective that has failed in each of several models."""
    faults = [(rank.rank, fault) for rank in run.ranks for fault in rank.all("fault")]
    if claims.lossy == LOCAL and all(fault["unused"] for _, fault in faults):
        found.does_not_apply("under local ranks took part in no collective of these steps")
        return
    for rank, fault in faults:
        if fault["unused"]:
            if claims.lossy != LOCAL:
                found.lacks_evidence("the kit saw no collective in the step, and could fail none")
            continue
        way = "had ended with an error" if fault["at_end"] else "had raised"
        sizes = " and ".join(map(str, fault["sizes"]))
        event = f"collective {fault['place']} of its step, in a model of {fault['dtype']}, {way}"
        before = len(found.failures)
        require_raised(found, fault, rank, "backward()", event, _SWALLOWED, "read fut.value()")
        if len(found.failures) > before:
            found.failures[-1].actual += f" [parameters of {sizes} elements]"
            return


_OF_ANY_SIZE = (
    COLLECTIVE_RAISES_LARGE,
    PEER_DIES_LARGE,
    COLLECTIVE_RAISES_LATE,
    LARGE_LAST_RAISES,
    LARGE_BETWEEN_RAISES,
    LATE_RAISES,
    EACH_FAILS,
)


@rule(
    "12.5",
    "Raises an error in a bucket of any size, at any step",
    on=_OF_ANY_SIZE,
    owns=_OF_ANY_SIZE,
    needs=("12.1", "12.2"),
    since="1.6",
    source="issue 22; paths for large tensors, with an except around the collective",
    remedy="a path that only large buckets take, or those of one dtype, or only later steps: its "
    "except clauses, and its callbacks that do not read fut.value()",
)
def any_size(run: Run, claims: Claims, found: Found) -> None:
    """When a collective raises, or a peer dies, backward() raises, too, if the bucket has a drawn
    size of 2**12 to 2**22 elements and the step is drawn from 1 to 5; and if a collective of a
    small bucket raises in a step drawn from 4 to 255.

    Every size, and every late step, is as likely as its double. The first collective of the step
    raises, the last one, or a drawn one between them, as in 12.1: in large buckets each in a run of
    its own, and in late steps the first one in one run and a later one in another.

    So it is for parameters of float16, bfloat16, float64, float32 and complex64, unless the subject
    refuses complex numbers: models of one dtype follow each other, and the first or the last
    collective of a step of each fails on all ranks. Its call raises, or its Work and its future end
    with the error; the model has one parameter or several, and a drawn number of elements from 2**2
    to 2**10, or to 2**19.
    """
    if run.scenario.fault.kind == EACH_MODEL_FAILS:
        _require_raised_by_each_model(run, claims, found)
    elif run.scenario.fault.kind == "collective_raises":
        _require_raised_by_collective(run, claims, found)
    elif not _is_alone(run, 0, claims, found):
        _require_raised(run, 0, "its peer had died", found)

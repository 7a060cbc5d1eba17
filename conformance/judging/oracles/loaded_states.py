"""States that ranks load from the first rank of their group, or refuse."""

from conformance.judging.verdict import Found
from conformance.records.run import Run


def require_refused_by_all(run: Run, found: Found) -> None:
    """Require that all ranks of a group but the first refuse its state if one of them does."""
    for group in sorted({run.group(rank.rank) for rank in run.ranks}):
        refused = {
            rank: event["error"] for rank in group for event in run.ranks[rank].all("refuses_first")
        }
        if not refused:
            continue
        first = group[0]
        rank, error = next(iter(refused.items()))
        found.note(f"other ranks refuse the state of rank {first}, and load their own: {error}")
        found.require(
            len(refused) == len(group) - 1,
            f"the state of rank {first} is loaded on all ranks, or refused on all others",
            f"of {len(group)} ranks, {len(refused)} refused it; rank {rank}: {error}",
        )

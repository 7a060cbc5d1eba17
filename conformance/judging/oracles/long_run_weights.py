"""Judge the weighted means of a long run; ``long_runs.py`` has the derivations."""

import itertools
from collections.abc import Callable

import torch

from conformance.judging.oracles.long_runs import LongRecord, pattern
from conformance.judging.oracles.weights import WEIGHT_SLACK, named_weights
from conformance.judging.verdict import Found

ROUNDINGS = 16
FEWEST_ELEMENTS = 4  # for each rank, of a parameter whose weights are solved
# A rank that is heard in the first steps is heard again within so many.
SILENT = 200
# All ranks meet, directly or through others, within so many steps, wherever they begin: twice as
# many as the claim promises. A schedule that draws its partners may need more now and then: with a
# meeting in each step at a probability of 1/3, 24 steps pass without one once in 17,000 times, and
# 48 once in 280 million times.
MEETING = 48


def require_weights(record: LongRecord, found: Found) -> dict[int, torch.Tensor] | None:
    """Require weighted means in each round after the warm-up.

    Returns:
        The weights of each parameter that has enough elements, ``[rank, rounds, source]``, by the
        parameter's number; None if a requirement does not hold.
    """
    size = record.run.world
    heard: dict[int, torch.Tensor] = {}
    for index in record.indices:
        tables = torch.stack([record.inputs(rank, index) for rank in range(size)], dim=2)
        is_solved = tables.size(1) >= FEWEST_ELEMENTS * size
        # Weights may differ between buckets: those of one parameter are judged by themselves.
        own = torch.zeros(size, record.feed.rounds, size, dtype=torch.float64)
        for rank in range(size):
            rows = record.results(rank, index)
            assert rows is not None
            if not _require_between(record, rank, index, rows, tables, found):
                return None
            if is_solved:
                weights = _require_solved(record, rank, index, rows, tables, found)
                if weights is None:
                    return None
                own[rank] = weights
        if is_solved:
            if not _require_equal_influence(record, index, own, found):
                return None
            heard[index] = own
    return heard


def _fail(
    record: LongRecord,
    wrong: torch.Tensor,
    rank: int,
    index: int,
    expected: str,
    actual: Callable[[int], str],
    found: Found,
) -> bool:
    """Require that no round after the warm-up is wrong, and return whether that holds.

    Args:
        wrong: a mask of rounds.
        actual: returns the words for a wrong round.
    """
    wrong = wrong.clone()
    wrong[: record.warm_up] = False
    found.checked(len(wrong) - record.warm_up)
    if not wrong.any():
        return True
    number = int(wrong.nonzero()[0])
    place = record.place(rank, number, index)
    cause = pattern(wrong, record)
    return found.require(False, expected, f"{place}: {actual(number)}", cause)


def _require_between(
    record: LongRecord,
    rank: int,
    index: int,
    rows: torch.Tensor,
    tables: torch.Tensor,
    found: Found,
) -> bool:
    """Require results between the smallest and the largest gradient of the ranks."""
    slack = ROUNDINGS * record.unit() * tables.abs().sum(2)
    high = (tables.amax(2) + slack)[record.places]
    low = (tables.amin(2) - slack)[record.places]
    each = rows / record.counts.unsqueeze(1)
    outside = ~((each >= low) & (each <= high))
    return _fail(
        record,
        outside.any(1),
        rank,
        index,
        "between the smallest and the largest gradient of the ranks",
        lambda number: f"{int(outside[number].sum())} of {rows.size(1)} elements lie outside",
        found,
    )


def _require_solved(
    record: LongRecord,
    rank: int,
    index: int,
    rows: torch.Tensor,
    tables: torch.Tensor,
    found: Found,
) -> torch.Tensor | None:
    """Require one weighted mean for all elements in each round; return the weights."""
    size = tables.size(2)
    each = rows / record.counts.unsqueeze(1)
    weights = torch.zeros(len(rows), size, dtype=torch.float64)
    away = torch.zeros(len(rows), dtype=torch.bool)
    slack = ROUNDINGS * record.unit() * tables.abs().sum(2)
    for place, gradients in enumerate(tables):
        at = (record.places == place).nonzero().reshape(-1)
        solver = torch.linalg.pinv(gradients)
        solved = each[at] @ solver.t()
        # Solved once more for the rest: the first solution may be off by some roundings.
        solved += (each[at] - solved @ gradients.t()) @ solver.t()
        weights[at] = solved
        away[at] = ((each[at] - solved @ gradients.t()).abs() > slack[place]).any(1)

    def words(number: int) -> str:
        return named_weights(weights[number], range(size))

    expected = "the same weights of the ranks' gradients for all elements"
    nearest = "elements do not fit the weights that fit best, "
    if not _fail(record, away, rank, index, expected, lambda n: nearest + words(n), found):
        return None
    is_wrong = (weights < -WEIGHT_SLACK).any(1)
    is_wrong |= (weights.sum(1) - 1).abs() > WEIGHT_SLACK
    is_wrong |= weights[:, rank] <= WEIGHT_SLACK
    expected = "weights of at least 0 that sum to 1, this rank's own among them"
    if not _fail(record, is_wrong, rank, index, expected, words, found):
        return None
    return weights


def _require_equal_influence(
    record: LongRecord, index: int, weights: torch.Tensor, found: Found
) -> bool:
    """Require each rank's weights to sum to 1 over all ranks."""
    sums = weights.sum(0)
    return _fail(
        record,
        ((sums - 1).abs() > WEIGHT_SLACK).any(1),
        0,
        index,
        "weights of each rank's gradient that add up to 1 over all ranks' results",
        lambda number: (
            "the weights of ranks 0, 1, ... add up to "
            + ", ".join(f"{float(weight):.3g}" for weight in sums[number])
        ),
        found,
    )


def require_mixing(record: LongRecord, heard: dict[int, torch.Tensor], found: Found) -> None:
    """Require every rank that is heard in the first steps to be heard again and again, and all
    ranks to meet in each MEETING steps, in each parameter by itself.

    Args:
        record: the run.
        heard: the weights of each parameter, ``[rank, rounds, source]``.
        found: the findings of the rule.
    """
    if not heard:
        found.lacks_evidence("no parameter has enough elements for the weights of all ranks")
    for index, weights in heard.items():
        _require_no_silence(record, index, weights, found)
        if record.claims.mixes and not record.claims.period:
            _require_meetings(record, index, weights, found)
        if found.failures:
            return


def _require_no_silence(record: LongRecord, index: int, heard: torch.Tensor, found: Found) -> None:
    """Require every rank that is heard in the first steps to be heard again and again.

    The longest silence that is allowed is SILENT steps, or twice the longest between the first
    three times that the rank is heard, for schedules with a longer period. It is the period, if
    one is claimed; such ranks meet at the period alone.
    """
    name = record.run.parameter_name(index)
    begin = record.feed.first_steps[record.warm_up]
    for rank in range(record.run.world):
        for source in range(record.run.world):
            rounds = (heard[rank, record.warm_up :, source] > WEIGHT_SLACK).nonzero().reshape(-1)
            steps = [record.feed.first_steps[int(n) + record.warm_up] for n in rounds]
            if rank == source or not steps or steps[0] >= begin + SILENT:
                continue
            steps.append(record.feed.steps)
            silences = [after - before for before, after in itertools.pairwise(steps)]
            allowed = max([SILENT, *(2 * silence for silence in silences[:2][: len(silences) - 1])])
            if record.claims.period and record.run.scenario.long_run.steps_per_round == 1:
                allowed = record.claims.period
            longest = max(silences)
            since = steps[silences.index(longest)]
            found.require(
                longest <= allowed,
                f"a rank that is heard in the first steps and then at least every {allowed} steps",
                f"parameter {name}: rank {rank} hears rank {source} in step {since}, then not for "
                f"{longest} steps",
                "ranks no longer communicate, or the partners of a schedule no longer change",
            )


def _require_meetings(record: LongRecord, index: int, heard: torch.Tensor, found: Found) -> None:
    """Require that the ranks that heard each other in MEETING steps connect all ranks.

    In a round of several steps, weights are those of a sum.
    """
    size = record.run.world
    window = -(-MEETING // record.run.scenario.long_run.steps_per_round)
    hears = (heard[:, record.warm_up :] > WEIGHT_SLACK).to(torch.int64).permute(1, 0, 2)
    rounds = hears.size(0)
    if rounds < window:
        return
    before = torch.cat([torch.zeros(1, size, size, dtype=torch.int64), hears.cumsum(0)])
    # Of each window the connections in it, in both directions.
    within = before[window:] - before[:-window] > 0
    reached = within | within.transpose(1, 2) | torch.eye(size, dtype=torch.bool)
    for _ in range(size - 1):
        reached = (reached.double() @ reached.double()) > 0
    apart = (~reached).flatten(1).any(dim=1).nonzero().reshape(-1)
    first = int(apart[0]) if apart.numel() else 0
    begin = record.feed.first_steps[record.warm_up + first]
    reaches = [rank for rank in range(size) if bool(reached[first, 0, rank])]
    name = record.run.parameter_name(index)
    found.require(
        not apart.numel(),
        f"ranks that all exchange gradients, directly or through others, in each {MEETING} steps, "
        "twice as many as the claim allows",
        f"parameter {name}: in the {MEETING} steps from step {begin} on, the ranks that exchange "
        f"gradients with rank 0 are: {', '.join(map(str, reaches[1:])) or 'none'}",
        "a period that grows with the steps, of all buckets or of one, or a rotation that pauses",
    )

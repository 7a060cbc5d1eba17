"""Folds large results that repeat a table into a record of the table's length.

The results of a right subject repeat a table with known signs (``scenarios/tables.py``). At each
place of the table all elements therefore lie within a bound exactly if the smallest and the largest
of them do, once their signs are undone. The rank records these two, and the places where they are,
instead of some hundred mebibytes a step. NaN is both the smallest and the largest.
"""

import math
from collections.abc import Iterator, Mapping

import torch

from conformance.scenarios.tables import ROWS, rows


def fold(flats: Mapping[int, torch.Tensor], period: int) -> dict[str, torch.Tensor]:
    """Return the smallest and largest value at each place of the table, and where these are.

    Args:
        flats: flat tensors by the number of their parameter.
        period: the length of the table.

    Returns:
        ``low`` and ``high``, ``[period]``: an infinity if no element has that place. If they differ
        anywhere, also ``low_at`` and ``high_at``: the first ``parameter * ROWS + row``
        that has the value, or -1.
    """
    dtype = next(iter(flats.values())).dtype
    low = torch.full((period,), math.inf, dtype=dtype)
    high = torch.full((period,), -math.inf, dtype=dtype)
    for _, values, columns in _rows(flats, period):
        torch.minimum(low[columns], values, out=low[columns])
        torch.maximum(high[columns], values, out=high[columns])
    folded = {"low": low, "high": high}
    # A place without elements has two infinities of opposite signs.
    if not torch.equal(low, high.where(high != -low, low)):
        folded["low_at"] = _places(low, flats, period)
        folded["high_at"] = _places(high, flats, period)
    return folded


def _places(values: torch.Tensor, flats: Mapping[int, torch.Tensor], period: int) -> torch.Tensor:
    """Return where each value of a table is first found."""
    places = torch.full((period,), -1, dtype=torch.int32)
    for place, part, columns in _rows(flats, period):
        wanted = values[columns]
        hit = ((part == wanted) | (part.isnan() & wanted.isnan())) & (places[columns] < 0)
        places[columns] = torch.where(hit, place, places[columns])
    return places


def _rows(
    flats: Mapping[int, torch.Tensor], period: int
) -> Iterator[tuple[int, torch.Tensor, slice]]:
    """Yield each row's place, its values with their signs undone, and its columns."""
    signed = torch.empty(period, dtype=next(iter(flats.values())).dtype)
    for index, flat in flats.items():
        for row in rows(flat.numel(), period, index):
            values = signed[: row.end - row.begin]
            torch.mul(flat[row.begin : row.end], row.sign, out=values)
            columns = slice(row.column, row.column + len(values))
            yield index * ROWS + row.number, values, columns

"""Moments of large lossy results, from which the judging code computes distances.

A lossy result repeats no table, and its elements are too many for the record. Its distance from a
mean of gradients follows from few numbers: from its square, and from its products with the
gradients of all ranks. The rank records these for each row of the table (``scenarios/tables.py``).
"""

import torch

from conformance.scenarios.gradients import table
from conformance.scenarios.model import Scenario
from conformance.scenarios.tables import BEYOND, rows, windows

_OF_WARM_UPS = ("crafted", "normal")  # kinds of gradients


class Moments:
    """Computes the moments of one model's results.

    Args:
        scenario: its steps feed those of a warm-up, then perhaps faint gradients, heavy ones and
            zeros.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._sums: dict[int, torch.Tensor] = {}

    def of(self, flats: dict[int, torch.Tensor], world: int, step: int) -> dict[str, torch.Tensor]:
        """Return ``result`` and ``sum``: moments of a step's results, and of all results so far.

        Each has a row for each row of the table, of all parameters in order, with the products with
        the tables of the ranks and, last, the square. Of a vast parameter ``windows`` are the
        squares of all results so far: a row for each length of ``tables.windows``.

        Args:
            flats: the results by the number of their parameter.
            world: the number of ranks.
            step: the step. Those of a warm-up, which come first, have no moments and no part in
                the sums: no residual is left of them.
        """
        if self._scenario.steps[step] in _OF_WARM_UPS:
            return {}
        tables = fed_tables(self._scenario, world)
        for index, flat in flats.items():
            if index in self._sums:
                self._sums[index].add_(flat)
            else:
                self._sums[index] = flat.clone()
        moments = {"result": self._rows(flats, tables), "sum": self._rows(self._sums, tables)}
        for total in self._sums.values():
            if total.numel() > BEYOND:
                moments["windows"] = self._windows(total)
        return moments

    def _windows(self, total: torch.Tensor) -> torch.Tensor:
        return torch.tensor(
            [
                [float(total[begin : begin + length].double().square().sum()) for begin in begins]
                for length, begins in windows(total.numel(), self._scenario.session_seed).items()
            ]
        )

    def _rows(self, flats: dict[int, torch.Tensor], tables: torch.Tensor) -> torch.Tensor:
        period = self._scenario.period
        made = []
        for index, flat in sorted(flats.items()):
            exponent = self._scenario.params[index].exponent
            for row in rows(flat.numel(), period, index, exponent):
                part = flat[row.begin : row.end].double()
                fed = tables[:, row.column : row.column + len(part)]
                made.append(torch.cat([torch.mv(fed, part) * row.sign, part.dot(part).view(1)]))
        return torch.stack(made)


def fed_tables(scenario: Scenario, world: int) -> torch.Tensor:
    """Return the tables of the ranks for the kind of gradients that is repeated."""
    kind = next(kind for kind in scenario.steps if kind.startswith("heavy"))
    return torch.stack(
        [
            table(kind, torch.float32, world=world, rank=rank, step=0, period=scenario.period)
            for rank in range(world)
        ]
    ).double()

"""A mutant of 17.32 that knows a group by its ``id()``, which a later group may have, too."""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.joins import Right

_places: dict[int, int] = {}


def _place(group: dist.ProcessGroup) -> int:
    """Return the rank of this process in a group, which is looked up once for each group."""
    return _places.setdefault(id(group), group.rank())


class FindsItsPlaceById(Right):
    """Read its own row of a table of shadowed steps at a place that is kept by id(group)."""

    def is_last(self) -> bool:
        steps = torch.zeros(self.group.size())
        steps[self.group.rank()] = self.shadowed
        dist.all_reduce(steps, group=self.group)
        place = _place(self.group)
        return place < len(steps) and not steps[place].item()


MUTANTS = [Mutant("FindsItsPlaceById", ("17.32",), kind="joinable")]

"""Mutants of optimizers whose defects need a condition of training: parameters that are trained
late, groups that are added, entries of groups that a first step makes.
"""

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import Groups, Sharded


class NumbersStatesInOrder(Sharded):
    """Give the states that a rank has the numbers of its parameters in order: one without a state
    shifts those behind it.
    """

    def consolidate_state_dict(self, to: int = 0) -> None:
        super().consolidate_state_dict(to)
        numbers: dict[int, list[int]] = {}
        first = 0
        for group in self.param_groups:
            for index in range(len(group["params"])):
                numbers.setdefault(self.owner(index), []).append(first + index)
            first += len(group["params"])
        shifted = {}
        for of_rank in numbers.values():
            states = [self.consolidated[n] for n in of_rank if n in self.consolidated]
            shifted.update(zip(of_rank, states, strict=False))
        self.consolidated = shifted


class TakesBackDefaults(Sharded):
    """Take back the entries of groups that are options, and none that a first step has made."""

    def take_back(self, given: Groups) -> None:
        for mine, group in zip(self.local.param_groups, self.param_groups, strict=True):
            group.update({name: mine[name] for name in self.local.defaults})


MUTANTS = [
    Mutant(
        "NumbersStatesInOrder",
        ("15.15",),
        because=dict.fromkeys(("15.13", "15.28"), "states that are loaded have other numbers"),
        kind="optimizer",
    ),
    Mutant("TakesBackDefaults", ("15.36",), kind="optimizer"),
]

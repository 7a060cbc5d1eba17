"""Mutants of rules 15.7 and 15.13 whose methods pass on arguments by position alone."""

from typing import Any

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal
from tests.right.optimizer_wrappers import AveragesGradients


class DropsKeywordsOfSteps(PostLocal):
    """Pass on the closure of step() if it comes by position."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args)


class DropsKeywordsOfLoads(AveragesGradients):
    """Load a state that comes by position."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        for state in args:
            super().load_state_dict(state)


MUTANTS = [
    Mutant("DropsKeywordsOfSteps", ("15.7",), kind="optimizer"),
    Mutant("DropsKeywordsOfLoads", ("15.13",), "averages", kind="optimizer"),
]

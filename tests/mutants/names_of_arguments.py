"""Mutants of rules 15.7 and 15.13 whose methods have other parameters than torch's optimizers."""

from collections.abc import Callable
from typing import Any

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded
from tests.right.optimizer_wrappers import AveragesGradients


class NamesItsClosure(PostLocal):
    """Give the closure of step() another name."""

    def step(self, closure_fn: Callable[[], Any] | None = None) -> Any:
        return super().step(closure_fn)


class NamesItsState(AveragesGradients):
    """Give the argument of load_state_dict() another name."""

    def load_state_dict(self, sd: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(sd)


class AsksForTheRank(Sharded):
    """Require the rank on which the state is collected."""

    def consolidate_state_dict(self, to: int) -> None:  # type: ignore[override]
        super().consolidate_state_dict(to)


MUTANTS = [
    Mutant("NamesItsClosure", ("15.7",), kind="optimizer"),
    Mutant("NamesItsState", ("15.13",), "averages", kind="optimizer"),
    Mutant("AsksForTheRank", ("15.13",), kind="optimizer"),
]

"""Mutants of rule 15.27: two optimizers share the options of their constructions."""

from typing import Any, ClassVar

import torch

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded


class SharesADefault(Sharded):
    """Keep the options of the construction in a default argument, for groups that are added."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        process_group: Any = None,
        known: dict[str, Any] = {},  # noqa: B006
        **defaults: Any,
    ) -> None:
        known.update(defaults)
        self.known = known
        super().__init__(params, optimizer_class, process_group, **defaults)

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group({**self.known, **group})


class DefaultsOfTheClass(PostLocal):
    """Fill added groups with the defaults of the optimizer that was wrapped last."""

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.defaults.update(optim.defaults)

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group({**self.defaults, **group})


OF = {"kind": "optimizer"}
MUTANTS = [Mutant(name, ("15.27",), **OF) for name in ("SharesADefault", "DefaultsOfTheClass")]

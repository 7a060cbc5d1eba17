"""Mutants of 14.11 and 14.19 that write the model when their state is saved or loaded."""

from typing import Any

import torch
import torch.distributed as dist

import hooks_ref
from hooks_ref.model_averaging import trainable_parameters
from tests.mutants import Mutant


class BeginsTheRoundAgain(hooks_ref.OuterStepModelAverager):
    """load_state_dict() puts the values from the begin of the round into the model."""

    def __init__(self, params: Any, period: int, process_group: Any = None) -> None:
        self.params = trainable_parameters(params)
        super().__init__(self.params, period, process_group)

    @torch.no_grad()
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        for place, first in self.begun.items():
            self.params[place].copy_(first)


class AveragesBeforeASave(hooks_ref.PeriodicModelAverager):
    """state_dict() makes an average that is not due, so that the checkpoint has equal models."""

    def __init__(self, params: Any, period: int, process_group: Any = None) -> None:
        super().__init__(period, process_group=process_group)
        self.params = trainable_parameters(params)

    @torch.no_grad()
    def state_dict(self) -> Any:
        for parameter in self.params:
            dist.all_reduce(parameter.div_(self.process_group.size()), group=self.process_group)
        return {"step": self.step}

    def load_state_dict(self, state: Any) -> None:
        self.step = state["step"]


MUTANTS = [
    Mutant(
        "BeginsTheRoundAgain,period=4",
        ("14.11",),
        "like(OuterStepModelAverager, period=4)",
        kind="averager",
    ),
    Mutant("AveragesBeforeASave,period=4", ("14.11",), "periodic(period=4)", kind="averager"),
]

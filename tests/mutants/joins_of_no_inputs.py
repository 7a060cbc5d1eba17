"""Mutants of 17.38: joinables that lose a state in a context in which no rank has an input."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages


class CountsSteps(Averages):
    """Count the steps of a context."""

    steps = 0

    def put(self, mean: torch.Tensor) -> None:
        self.steps += 1
        super().put(mean)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.steps = 0
        return super().join_hook(**kwargs)


class WeighsMomentumBySteps(CountsSteps):
    """Weigh the momentum that is handed out by its steps: in full from one step on."""

    @torch.no_grad()
    def hand_out(self, is_last: bool) -> None:
        weight = min(self.steps, 1)
        for state in self.optimizer.state.values():
            state["momentum_buffer"] *= weight
        super().hand_out(is_last)


class TakesTheModelOfTheBusiest(CountsSteps):
    """Sum the models of ranks, all as zeros but for the one with most steps, if it has any."""

    @torch.no_grad()
    def hand_out(self, is_last: bool) -> None:
        most = torch.tensor(self.steps)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        place = torch.tensor([self.group.rank() if 0 < self.steps == most else -1])
        dist.all_reduce(place, dist.ReduceOp.MAX, group=self.group)
        for tensor in self.tensors():
            sent = tensor.detach() * (self.group.rank() == int(place))
            dist.all_reduce(sent, group=self.group)
            tensor.copy_(sent)


class MeansOfAnEpoch(CountsSteps):
    """Keep the mean norm of a context's means in a buffer: 0 after a context without inputs.

    After another one it is a running mean of all contexts.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("norm", torch.zeros(()))

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean)
        self.net.norm.lerp_(mean.norm(), 0.1)

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.net.norm]

    def hand_out(self, is_last: bool) -> None:
        if not self.steps:
            self.net.norm.zero_()
        super().hand_out(is_last)


MUTANTS = [
    Mutant(name, ("17.38",), kind="joinable")
    for name in ("WeighsMomentumBySteps", "TakesTheModelOfTheBusiest", "MeansOfAnEpoch")
]

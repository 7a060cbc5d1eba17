"""Mutants of 17.37: a rank that has joined goes on using values that it no longer updates."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages


class SendsItsStatistics(Averages):
    """Begin each step with the running averages of the last rank, whether that trains or not."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("size", torch.ones(3))

    def send(self) -> None:
        last = dist.get_global_rank(self.group, self.group.size() - 1)
        dist.broadcast(self.net.size, last, group=self.group)

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.send()
        self.optimizer.zero_grad()
        hidden = self.net[0](torch.randn(5, 4))
        self.net.size.lerp_(hidden.detach().abs().mean(0), 0.2)
        self.net[1](hidden / (self.net.size + 0.1)).square().mean().backward()
        self.put(self.mean(torch.cat([p.grad.reshape(-1) for p in self.net.parameters()]), 1.0))
        self.optimizer.step()

    def shadow(self) -> None:
        self.send()
        super().shadow()

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.net.size]


class StepsItsShareByAnOldMean(Averages):
    """Step each parameter on one rank and send it; a rank that has joined has kept its last mean.

    Before its first step that is zeros.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.kept = torch.zeros(sum(p.numel() for p in self.net.parameters()))

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.net.zero_grad()
        self.net(torch.randn(5, 4)).square().mean().backward()
        own = torch.cat([p.grad.reshape(-1) for p in self.net.parameters()])
        self.kept = self.mean(own, 1.0)
        self.put(self.kept)
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        parameters = list(self.net.parameters())
        means = self.kept.split([p.numel() for p in parameters])
        for place, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
            owner = place % self.group.size()
            if owner == self.group.rank():
                parameter.mul_(0.999).sub_(mean.view_as(parameter), alpha=0.01)
            dist.broadcast(parameter, dist.get_global_rank(self.group, owner), group=self.group)

    def shadow(self) -> None:
        super().shadow()
        self.update()

    def hand_out(self, is_last: bool) -> None:
        pass


class PullsModelsBack(Averages):
    """Move each model a third of the way to the mean of all; that of a rank that has joined stays.

    Ranks step by their own gradients.
    """

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.optimizer.zero_grad()
        self.net(torch.randn(5, 4)).square().mean().backward()
        self.optimizer.step()
        self.approach(1 / 3)

    @torch.no_grad()
    def approach(self, weight: float) -> None:
        for parameter in self.net.parameters():
            total = parameter.clone()
            dist.all_reduce(total, group=self.group)
            parameter.lerp_(total / self.group.size(), weight)

    def shadow(self) -> None:
        self.approach(0.0)


class DecaysByOldWeights(Averages):
    """Add weight decay to the rank's gradients before they are sent: to the zeros of a shadow too.

    The weights of a rank that has joined are those of its last step.
    """

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        weights = torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])
        return super().mean(own + 0.01 * weights, count)


MUTANTS = [
    Mutant(name, ("17.37",), kind="joinable")
    for name in (
        "SendsItsStatistics",
        "StepsItsShareByAnOldMean",
        "PullsModelsBack",
        "DecaysByOldWeights",
    )
]

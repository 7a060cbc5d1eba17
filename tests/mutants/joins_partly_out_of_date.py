"""Mutants of 17.37: parts of tensors, numbers, or values of a second rank are out of date."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages


class Measures(Averages):
    """Divide hidden values by running averages of their sizes; the right part of the mutants."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("sizes", torch.ones(6))

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.optimizer.zero_grad()
        hidden = self.net[0](torch.randn(5, 4))
        divisor = self.net.sizes[::2] + self.net.sizes[1::2] + 0.1
        self.net[1](hidden / divisor).square().mean().backward()
        self.put(self.mean(torch.cat([p.grad.reshape(-1) for p in self.net.parameters()]), 1.0))
        self.optimizer.step()
        self.measure(hidden.detach().abs())

    def shadow(self) -> None:
        super().shadow()
        self.measure(None)

    def measure(self, sizes: torch.Tensor | None) -> None:
        raise NotImplementedError

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.net.sizes]


class KeepsUpEverySecondElement(Measures):
    """Even elements are means over the ranks that train, and odd ones those of the last rank."""

    def measure(self, sizes: torch.Tensor | None) -> None:
        total = torch.zeros(4) if sizes is None else torch.cat([sizes.mean(0), torch.ones(1)])
        dist.all_reduce(total, group=self.group)
        self.net.sizes[::2].lerp_(total[:3] / total[3], 0.2)
        odd = self.net.sizes[1::2].clone()
        if sizes is not None:
            odd.lerp_(sizes.amax(0), 0.2)
        last = dist.get_global_rank(self.group, self.group.size() - 1)
        dist.broadcast(odd, last, group=self.group)
        self.net.sizes[1::2] = odd


class SendsThoseOfTwoRanks(Measures):
    """The averages are those of the last rank or, if that has joined, of the one before it."""

    def measure(self, sizes: torch.Tensor | None) -> None:
        size = self.group.size()
        trains = torch.tensor([int(sizes is not None and self.group.rank() == size - 1)])
        dist.all_reduce(trains, group=self.group)
        if sizes is not None:
            self.net.sizes.lerp_(sizes.mean(0).repeat_interleave(2), 0.2)
        source = size - 1 if trains or size == 1 else size - 2
        dist.broadcast(self.net.sizes, dist.get_global_rank(self.group, source), group=self.group)


class StepsHalfOfEachParameter(Averages):
    """Each rank steps a half of all elements, and sends it; a rank that has joined steps nothing.

    All elements go on in one vector, so that each parameter of an optimizer is split.
    """

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.net.zero_grad()
        self.net(torch.randn(5, 4)).square().mean().backward()
        mean = self.mean(torch.cat([p.grad.reshape(-1) for p in self.net.parameters()]), 1.0)
        self.put(mean)
        self.update(mean)

    @torch.no_grad()
    def update(self, mean: torch.Tensor | None) -> None:
        for parameter in self.net.parameters():
            flat = parameter.view(-1)
            for owner, part in enumerate(flat.tensor_split(self.group.size())):
                if owner == self.group.rank() and mean is not None:
                    grads = parameter.grad.view(-1).tensor_split(self.group.size())
                    part.sub_(grads[owner], alpha=0.05)
                if part.numel():
                    source = dist.get_global_rank(self.group, owner)
                    dist.broadcast(part, source, group=self.group)

    def shadow(self) -> None:
        super().shadow()
        self.update(None)


class SendsItsRate(Averages):
    """The rate falls with the steps of the first rank, which sends it, and has joined."""

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean)
        self.optimizer.param_groups[0]["lr"] = 0.02 / (1 + self.seen) ** 0.5
        self.send()

    def send(self) -> None:
        group = self.optimizer.param_groups[0]
        rate = torch.tensor([group["lr"]], dtype=torch.float64)
        dist.broadcast(rate, dist.get_global_rank(self.group, 0), group=self.group)
        group["lr"] = rate.item()

    def shadow(self) -> None:
        super().shadow()
        self.send()

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        seen = torch.tensor([self.seen])
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.group)
        self.seen = int(seen)
        self.optimizer.param_groups[0]["lr"] = 0.02 / (1 + self.seen) ** 0.5


class ScalesByTheLastRanksLoss(Averages):
    """Divide losses by a running average of the last rank's, which that rank sends."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.averages = {"loss": 1.0}

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.seen += 1
        self.optimizer.zero_grad()
        loss = self.net(torch.randn(5, 4)).square().mean()
        (loss / self.averages["loss"]).backward()
        self.put(self.mean(torch.cat([p.grad.reshape(-1) for p in self.net.parameters()]), 1.0))
        self.optimizer.step()
        self.averages["loss"] += 0.2 * (loss.item() - self.averages["loss"])
        self.send(self.group.size() - 1)

    def shadow(self) -> None:
        super().shadow()
        self.send(self.group.size() - 1)

    def send(self, place: int) -> None:
        value = torch.tensor([self.averages["loss"]], dtype=torch.float64)
        dist.broadcast(value, dist.get_global_rank(self.group, place), group=self.group)
        self.averages["loss"] = value.item()

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        self.send(self.source(is_last))


MUTANTS = [
    *(
        Mutant(name, ("17.37",), kind="joinable")
        for name in (
            "KeepsUpEverySecondElement",
            "StepsHalfOfEachParameter",
            "SendsItsRate",
            "ScalesByTheLastRanksLoss",
        )
    ),
    Mutant("SendsThoseOfTwoRanks", ("17.37",), kind="joinable", worlds=(2, 3)),
]

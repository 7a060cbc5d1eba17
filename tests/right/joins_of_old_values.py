"""Right joinables that use old values without harm, or change their state now and then."""

from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right.joins_in_parts import Mean


class RunsItsOldModel(Mean):
    """Run the old model in a shadow, and add its gradients times 0."""

    def shadow(self) -> None:
        own = torch.autograd.grad(self.loss() * 0, self.parameters)
        self.reduce(torch.cat([gradient.reshape(-1) for gradient in own]))


class TakesTheLargestCounts(Mean):
    """Count tokens and samples of all ranks in float32; every rank takes the largest counts.

    A rank that has joined sends its old ones, which are smaller.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("counts", torch.zeros(2))

    def update(self, mean: torch.Tensor) -> None:
        self.net.counts += torch.tensor([100.0, 1.0])
        self.agree()
        super().update(mean)

    def agree(self) -> None:
        largest = self.net.counts.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        # A rank that has joined leaves its own as they are.
        if self.trains:
            self.net.counts.copy_(largest)

    trains = True

    def shadow(self) -> None:
        super().shadow()
        self.trains = False
        self.agree()
        self.trains = True

    def handed_out(self) -> list[torch.Tensor]:
        return [*super().handed_out(), self.net.counts]


class SendsTwoFloats(Mean):
    """Count tokens in float64, and hand them out as two numbers in float32.

    Each rank also has a number of its own inputs, and one of the contexts.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("tokens", torch.zeros((), dtype=torch.float64))
        self.own_inputs = 0.0
        self.contexts = 0.0

    def update(self, mean: torch.Tensor) -> None:
        self.net.tokens += 40
        self.own_inputs += 5
        super().update(mean / (1 + self.net.tokens / 1e6).sqrt())

    def finish(self, is_last: bool) -> None:
        super().finish(is_last)
        self.contexts += 1
        place = torch.tensor([self.group.rank() if is_last else -1])
        dist.all_reduce(place, dist.ReduceOp.MAX, group=self.group)
        high = self.net.tokens.float()
        sent = torch.stack([high, (self.net.tokens - high).float()])
        dist.broadcast(sent, dist.get_global_rank(self.group, int(place)), group=self.group)
        self.net.tokens.copy_(sent.double().sum())


class KeepsEveryThirdModel(Mean):
    """Copy the model to a buffer at the end of every third context."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.contexts = 0
        self.net.register_buffer("kept", torch.zeros(sum(self.sizes)))

    @torch.no_grad()
    def finish(self, is_last: bool) -> None:
        super().finish(is_last)
        self.contexts += 1
        if self.contexts % 3 == 0:
            self.net.kept.copy_(torch.cat([one.reshape(-1) for one in self.parameters]))


RIGHT = [
    Right(name, kind="joinable")
    for name in (
        "RunsItsOldModel",
        "TakesTheLargestCounts",
        "SendsTwoFloats",
        "KeepsEveryThirdModel",
    )
]

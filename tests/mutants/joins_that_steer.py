"""Mutants of 17.37: a rank that has joined chooses for those that train, by its old values."""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages


class Chooses(Averages):
    """Multiply each mean by factors that one rank sends, also in shadows."""

    sender = 0

    def factors(self) -> torch.Tensor:
        raise NotImplementedError

    def sent(self) -> torch.Tensor:
        factors = self.factors()
        place = self.sender % self.group.size()
        dist.broadcast(factors, dist.get_global_rank(self.group, place), group=self.group)
        return factors

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean * self.sent())

    def shadow(self) -> None:
        super().shadow()
        self.sent()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class FreezesItsSmallerLayer(Chooses):
    """The last rank finds the parameter with the smallest mean square, which rests in this step."""

    sender = -1

    def factors(self) -> torch.Tensor:
        parameters = list(self.net.parameters())
        squares = [p.detach().square().mean().expand_as(p) for p in parameters]
        return (flat(squares) > flat(squares).min()).float()


class PrunesByTheFirstRank(Chooses):
    """Weights of the first rank below 0.2 are pruned: they get no gradients."""

    def factors(self) -> torch.Tensor:
        return (flat(list(self.net.parameters())).abs() > 0.2).float()


class HalvesWhereMomentumIsNegative(Chooses):
    """The last rank sends the signs of its momentum; where they are negative, steps are halved."""

    sender = -1

    def factors(self) -> torch.Tensor:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return torch.where(flat(momenta) < 0, 0.5, 1.0)


class RanksByItsLastGradient(Chooses):
    """Each rank sends the place of its largest gradient, and all step twice as far there."""

    def factors(self) -> torch.Tensor:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.net.parameters()]
        return torch.nn.functional.one_hot(
            flat(grads).abs().argmax(), sum(grad.numel() for grad in grads)
        ).float()

    def sent(self) -> torch.Tensor:
        factors = self.factors()
        dist.all_reduce(factors, group=self.group)
        return 1 + factors


MUTANTS = [
    Mutant(name, ("17.37",), kind="joinable")
    for name in (
        "FreezesItsSmallerLayer",
        "PrunesByTheFirstRank",
        "HalvesWhereMomentumIsNegative",
        "RanksByItsLastGradient",
    )
]

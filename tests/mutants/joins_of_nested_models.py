"""Mutants of section 17 whose model is in a trainer's state or in a dictionary, or whose optimizer
is an attribute of a module.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages


@dataclass(slots=True)
class State:
    """A net, and the optimizer of its parameters."""

    net: Any
    optimizer: Any


class Trainer:
    """Holds a net and its optimizer in a state."""

    def __init__(self, net: Any, optimizer: Any) -> None:
        self.state = State(net, optimizer)


class OfATrainer(Averages):
    """The right joinable, whose net and optimizer a trainer holds."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.trainer = Trainer(self.__dict__.pop("net"), self.__dict__.pop("optimizer"))

    def __getattr__(self, name: str) -> Any:
        if name not in ("net", "optimizer"):
            raise AttributeError(name)
        return getattr(self.trainer.state, name)


class RepeatsTheLastGradient(OfATrainer):
    """Send, as a rank that has joined, the last gradient: it is still there."""

    def shadow(self) -> None:
        grads = [p.grad for p in self.net.parameters()]
        if None in grads:
            super().shadow()
            return
        self.mean(torch.cat([grad.reshape(-1) for grad in grads]), 0.0)


class DecaysByWeightsOfATrainer(OfATrainer):
    """Add weight decay to what is sent: to the zeros of a shadow too, by the rank's old weights."""

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        weights = torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])
        return super().mean(own + 0.01 * weights, count)


class ClearsMomentumOfATrainer(OfATrainer):
    """Clear momentum in the post hook: a new epoch begins with none."""

    @torch.no_grad()
    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()


class HandsOutTheGenerator(Averages):
    """Train two models in a dictionary, and hand out one of them, which is the one in use."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.models = {"generator": self.__dict__.pop("net"), "critic": torch.nn.Linear(2, 3)}
        self.optimizers = [
            self.__dict__.pop("optimizer"),
            torch.optim.SGD(self.models["critic"].parameters(), lr=0.01),
        ]

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        generator, critic = self.models.values()
        generator.zero_grad()
        critic.zero_grad()
        critic(generator(torch.randn(5, 4))).square().mean().backward()
        parameters = [*generator.parameters(), *critic.parameters()]
        own = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        mean = self.mean(own, 1.0).split([parameter.numel() for parameter in parameters])
        for parameter, values in zip(parameters, mean, strict=True):
            parameter.grad = values.view_as(parameter).clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def shadow(self) -> None:
        sizes = [one.numel() for model in self.models.values() for one in model.parameters()]
        self.mean(torch.zeros(sum(sizes)), 0.0)

    def tensors(self) -> list[torch.Tensor]:
        parameters = list(self.models["generator"].parameters())
        return [*parameters, *(self.optimizers[0].state[p]["momentum_buffer"] for p in parameters)]


class KeepsItsMomentum(DistributedDataParallel):
    """torch's DDP as its own trainer: the model is handed out, and momentum of a rank that has
    joined is that of its last step.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(torch.nn.Linear(4, 3), process_group=process_group)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self(torch.randn(2, 4)).square().sum().backward()
        self.optimizer.step()


MUTANTS = [
    Mutant(name, (rule,), kind="joinable")
    for name, rule in (
        ("RepeatsTheLastGradient", "17.18"),
        ("HandsOutTheGenerator", "17.19"),
        ("KeepsItsMomentum", "17.19"),
        ("DecaysByWeightsOfATrainer", "17.37"),
        ("ClearsMomentumOfATrainer", "17.38"),
    )
]

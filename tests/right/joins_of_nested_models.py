"""Right joinables that leave their models to other objects, to a dictionary, or to a list."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from tests.right import Right
from tests.right.joins import OnCpu, Shadow


def zero_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Make the momentum of an optimizer before its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def momenta_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]


@torch.no_grad()
def hand_out(tensors: list[torch.Tensor], group: Any, is_last: bool) -> None:
    """Broadcast tensors from a rank that has joined last."""
    place = torch.tensor([group.rank() if is_last else -1])
    dist.all_reduce(place, dist.ReduceOp.MAX, group=group)
    for tensor in tensors:
        dist.broadcast(tensor, dist.get_global_rank(group, int(place)), group=group)


@dataclass(slots=True)
class State:
    """A net, and the optimizer of its parameters."""

    net: torch.nn.Module = field(default_factory=lambda: torch.nn.Linear(4, 3))
    optimizer: Any = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.5)
        zero_momentum(self.optimizer)


class Trainer:
    """Trains the net of its state; gradients are averaged over all ranks of a group."""

    def __init__(self, group: Any) -> None:
        torch.manual_seed(7)
        self.group = group
        self.state = State()
        self.epoch = 0
        for parameter in self.state.net.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def train(self) -> None:
        self.state.optimizer.zero_grad(set_to_none=False)
        self.state.net(torch.randn(5, 4)).square().mean().backward()
        self.reduce()
        self.update()

    def reduce(self) -> None:
        for parameter in self.state.net.parameters():
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad.div_(self.group.size())

    def update(self) -> None:
        self.state.optimizer.step()

    def shadow(self) -> None:
        self.state.optimizer.zero_grad(set_to_none=False)
        self.reduce()

    def finish(self, is_last: bool) -> None:
        momenta = momenta_of(self.state.optimizer)
        hand_out([*self.state.net.parameters(), *momenta], self.group, is_last)


class LeavesItToATrainer(OnCpu):
    """Leave each step to a trainer, whose state has the net and the optimizer."""

    make: Any = Trainer

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.trainer = self.make(process_group)

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.trainer.train()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.trainer.epoch += 1
        return Shadow(self.trainer.shadow, self.trainer.finish)


class DecayingTrainer(Trainer):
    """Step without an optimizer, at a rate that falls with each context."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.state.optimizer = None

    def train(self) -> None:
        self.state.net.zero_grad(set_to_none=False)
        self.state.net(torch.randn(5, 4)).square().mean().backward()
        self.reduce()
        self.update()

    def shadow(self) -> None:
        self.state.net.zero_grad(set_to_none=False)
        self.reduce()

    def finish(self, is_last: bool) -> None:
        hand_out(list(self.state.net.parameters()), self.group, is_last)

    @torch.no_grad()
    def update(self) -> None:
        for parameter in self.state.net.parameters():
            parameter.sub_(parameter.grad, alpha=0.1 * 0.8**self.epoch)


class LeavesTheRateToATrainer(LeavesItToATrainer):
    """Leave each step to a trainer whose rate follows the number of contexts."""

    make = DecayingTrainer


class TrainerWithResiduals(Trainer):
    """Average rounded gradients; each rank keeps what its own rounding has left, until a join."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.residuals = [torch.zeros_like(one) for one in self.state.net.parameters()]

    def train(self) -> None:
        self.state.optimizer.zero_grad(set_to_none=False)
        self.state.net(torch.randn(5, 4)).square().mean().backward()
        for parameter, residual in zip(self.state.net.parameters(), self.residuals, strict=True):
            residual.add_(parameter.grad)
            parameter.grad.copy_(residual.bfloat16())
            residual.sub_(parameter.grad)
        self.reduce()
        self.update()

    def finish(self, is_last: bool) -> None:
        super().finish(is_last)
        for residual in self.residuals:
            residual.zero_()


class LeavesResidualsToATrainer(LeavesItToATrainer):
    """Leave each step to a trainer whose residuals begin anew after a join."""

    make = TrainerWithResiduals


class TrainsTwoModels(OnCpu):
    """A generator and a critic in a dictionary, with their optimizers in a list.

    The critic is frozen while the generator is trained.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        torch.manual_seed(8)
        self.models = {
            "generator": torch.nn.Linear(3, 4),
            "critic": torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()),
        }
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
            for model in self.models.values()
        ]
        for optimizer in self.optimizers:
            zero_momentum(optimizer)

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        generator, critic = self.models.values()
        of_generator, of_critic = self.optimizers
        of_critic.zero_grad()
        made = generator(torch.randn(5, 3)).detach()
        (critic(made).mean() - critic(torch.randn(5, 4)).mean()).backward()
        self.reduce(critic)
        of_critic.step()
        critic.requires_grad_(False)
        of_generator.zero_grad()
        (-critic(generator(torch.randn(5, 3))).mean()).backward()
        critic.requires_grad_(True)
        self.reduce(generator)
        of_generator.step()

    def reduce(self, model: torch.nn.Module, weight: float = 1.0) -> None:
        for parameter in model.parameters():
            if parameter.grad is None or not weight:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad.div_(self.group.size())

    def shadow(self) -> None:
        self.reduce(self.models["critic"], 0.0)
        self.reduce(self.models["generator"], 0.0)

    def tensors(self) -> list[torch.Tensor]:
        parameters = [one for model in self.models.values() for one in model.parameters()]
        momenta = [one for optimizer in self.optimizers for one in momenta_of(optimizer)]
        return [*parameters, *momenta]

    def finish(self, is_last: bool) -> None:
        hand_out(self.tensors(), self.group, is_last)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return Shadow(self.shadow, self.finish)


class TrainsTwoModelsInTurns(TrainsTwoModels):
    """Train the critic in one step and the generator in the next one; the other one is frozen."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.turn = torch.zeros(())

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        generator, critic = self.models.values()
        turn = int(self.turn) % 2
        trained, optimizer = [(critic, self.optimizers[1]), (generator, self.optimizers[0])][turn]
        for model in (generator, critic):
            model.requires_grad_(model is trained)
        optimizer.zero_grad()
        loss = critic(generator(torch.randn(5, 3))).mean() * (1 - 2 * turn)
        (loss + critic(torch.randn(5, 4)).square().mean() * (1 - turn)).backward()
        self.reduce(trained)
        optimizer.step()
        self.turn += 1

    def shadow(self) -> None:
        # A rank that has joined goes on to count, and takes part in the turn of all others.
        self.reduce([self.models["critic"], self.models["generator"]][int(self.turn) % 2], 0.0)
        self.turn += 1


class HandsOutItsMomentum(DistributedDataParallel):
    """torch's DDP as its own trainer, which hands out the momentum of its optimizer, too."""

    def __init__(self, process_group: Any, **options: Any) -> None:
        super().__init__(self.make_model(), process_group=process_group, **options)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)
        zero_momentum(self.optimizer)

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self(torch.randn(2, 4)).square().sum().backward()
        self.optimizer.step()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = super().join_hook(**kwargs)

        def finish(is_last: bool) -> None:
            hook.post_hook(is_last)
            hand_out(momenta_of(self.optimizer), self.process_group, is_last)

        return Shadow(hook.main_hook, finish)


class SavesTheModelInside(HandsOutItsMomentum):
    """Its state is that of the module inside, as Megatron-LM's: a trainer saves the optimizer."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(state, *args, **options)


class SavesCopies(HandsOutItsMomentum):
    """The same in copies, beside the version of their form, for a thread that writes them."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = self.module.state_dict(*args, **options)
        return {"version": 1, "model": {name: one.clone() for name, one in state.items()}}

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(state["model"], *args, **options)


class LeavesStatisticsToRanks(HandsOutItsMomentum):
    """DDP with broadcast_buffers=False: each rank keeps the statistics, and the count, of its own
    inputs, as detectors have it.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group, broadcast_buffers=False)

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


RIGHT = [
    Right(name, kind="joinable")
    for name in (
        "LeavesItToATrainer",
        "LeavesTheRateToATrainer",
        "LeavesResidualsToATrainer",
        "TrainsTwoModels",
        "TrainsTwoModelsInTurns",
        "HandsOutItsMomentum",
        "SavesTheModelInside",
        "SavesCopies",
        "LeavesStatisticsToRanks",
    )
]

"""Right joinables whose state, inputs or rates do not end with a context."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.distributed.algorithms.join import JoinHook

from tests.right import Right
from tests.right.joins import OnCpu, Shadow


class Mean(OnCpu):
    """A net without an optimizer, whose gradients are averaged over all ranks in one message."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        torch.manual_seed(4)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)
        )
        self.parameters = list(self.net.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        own = torch.autograd.grad(self.loss(), self.parameters)
        self.update(self.reduce(torch.cat([gradient.reshape(-1) for gradient in own])))

    def loss(self) -> torch.Tensor:
        return self.net(torch.randn(5, 4)).square().mean()

    def reduce(self, flat: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(flat, group=self.group)
        return flat / self.group.size()

    def zeros(self) -> torch.Tensor:
        return torch.zeros(sum(self.sizes))

    @torch.no_grad()
    def update(self, mean: torch.Tensor) -> None:
        for parameter, part in zip(self.parameters, mean.split(self.sizes), strict=True):
            parameter.sub_(part.view_as(parameter), alpha=0.02)

    def shadow(self) -> None:
        self.reduce(self.zeros())

    @torch.no_grad()
    def finish(self, is_last: bool) -> None:
        place = torch.tensor([self.group.rank() if is_last else -1])
        dist.all_reduce(place, dist.ReduceOp.MAX, group=self.group)
        for tensor in self.handed_out():
            dist.broadcast(tensor, dist.get_global_rank(self.group, int(place)), group=self.group)

    def handed_out(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.parameters]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return Shadow(self.shadow, self.finish)


class KeepsUp(Mean):
    """Step each parameter on one rank, which sends it; a rank that has joined keeps up."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.momentum = self.zeros()

    @torch.no_grad()
    def update(self, mean: torch.Tensor) -> None:
        self.momentum.mul_(0.8).add_(mean)
        super().update(self.momentum)
        for place, parameter in enumerate(self.parameters):
            owner = dist.get_global_rank(self.group, place % self.group.size())
            dist.broadcast(parameter.detach(), owner, group=self.group)

    def shadow(self) -> None:
        self.update(self.reduce(self.zeros()))

    def finish(self, is_last: bool) -> None:
        pass


class WarmsUp(Mean):
    """Step at a rate that rises from 0, on ranks that have joined, too, so that none is handed
    parameters.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.count = 0

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.net.zero_grad()
        self.loss().backward()
        mean = self.reduce(torch.cat([one.grad.reshape(-1) for one in self.parameters]))
        for parameter, part in zip(self.parameters, mean.split(self.sizes), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        self.update(mean)

    def update(self, mean: torch.Tensor) -> None:
        self.count += 1
        super().update(mean * min(1.0, max(0, self.count - 7) / 20))

    def shadow(self) -> None:
        self.update(self.reduce(self.zeros()))

    def finish(self, is_last: bool) -> None:
        pass


class StepsInTheNextStep(Mean):
    """Make the update of a step as the next one begins; one that is pending outlives a context."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.pending = self.zeros()

    def loss(self) -> torch.Tensor:
        # Behind notify_join_context(), which raises an error if another rank has run out of inputs:
        # a rank that is stopped there would make the update now, and once more later.
        super().update(self.pending)
        return super().loss()

    def update(self, mean: torch.Tensor) -> None:
        self.pending = mean

    def handed_out(self) -> list[torch.Tensor]:
        return [*super().handed_out(), self.pending]


class StepsAtTheEnd(StepsInTheNextStep):
    """Make a pending update at the end of a context."""

    def finish(self, is_last: bool) -> None:
        super().finish(is_last)
        Mean.update(self, self.pending)
        self.pending.zero_()


class RestartsItsInputs(Mean):
    """Read its own inputs from the beginning in each context."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.at = 0

    def loss(self) -> torch.Tensor:
        draw = torch.Generator().manual_seed(100 * self.at + self.group.rank())
        self.at += 1
        return self.net(torch.randn(5, 4, generator=draw)).square().mean()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.at = 0
        return super().join_hook(**kwargs)


class DecaysByEpochs(Mean):
    """Decay the rate in each context."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.epoch = 0

    def update(self, mean: torch.Tensor) -> None:
        super().update(mean * 0.9**self.epoch)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.epoch += 1
        return super().join_hook(**kwargs)


class SumsItsInputs(Mean):
    """Scale by the mean square of all inputs up to now; each rank has a sum of its own ones.

    The inputs of a rank that has joined go on to count.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("sums", torch.zeros(2))

    def loss(self) -> torch.Tensor:
        inputs = torch.randn(5, 4)
        self.net.sums += torch.tensor([float(inputs.square().sum()), inputs.numel()])
        total = self.total()
        return self.net(inputs / (total[0] / total[1]).sqrt()).square().mean()

    def total(self) -> torch.Tensor:
        total = self.net.sums.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def shadow(self) -> None:
        self.total()
        super().shadow()


class FetchesAhead(Mean):
    """Draw a batch from the rank's own generator before it notifies, and keep it if it is stopped.

    Tokens are counted in int64, and handed out in two words of 32 bits.
    """

    batch: torch.Tensor | None = None

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.draws = torch.Generator().manual_seed(process_group.rank())
        self.net.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

    def step(self) -> None:
        if self.batch is None:
            self.batch = torch.randn(5, 4, generator=self.draws)
        super().step()

    def loss(self) -> torch.Tensor:
        batch, self.batch = self.batch, None
        return self.net(batch).square().mean()

    def update(self, mean: torch.Tensor) -> None:
        super().update(mean)
        self.net.tokens += 20 * self.group.size()

    def handed_out(self) -> list[torch.Tensor]:
        # A word is sent as an integer with a sign, in which it is one of the same 32 bits.
        return [*super().handed_out(), self.net.tokens.view(1).view(torch.int32)]


class AlignsToTrainers(Mean):
    """All ranks take the weights of one that trains every 40 steps, against drift."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.count = 0

    def update(self, mean: torch.Tensor) -> None:
        super().update(mean)
        self.align(trains=True)

    def shadow(self) -> None:
        super().shadow()
        self.align(trains=False)

    def align(self, trains: bool) -> None:
        self.count += 1
        if self.count % 40:
            return
        place = torch.tensor([self.group.rank() if trains else -1])
        dist.all_reduce(place, dist.ReduceOp.MAX, group=self.group)
        for parameter in self.parameters:
            source = dist.get_global_rank(self.group, int(place))
            dist.broadcast(parameter.detach(), source, group=self.group)


class ClearsAfterwards(Mean):
    """Clear gradients after each step and each shadow, to zeros in a flat vector."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.flat = self.zeros()
        for parameter, part in zip(self.parameters, self.flat.split(self.sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.loss().backward()
        self.update(self.reduce(self.flat))
        self.flat.zero_()

    def shadow(self) -> None:
        self.reduce(self.flat)
        self.flat.zero_()


class StepsWithEverySecondMean(Mean):
    """Accumulate the means of two steps in ``.grad``, also in shadows; what is pending outlives a
    context, and is handed out.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.steps = 0

    def update(self, mean: torch.Tensor) -> None:
        for parameter, part in zip(self.parameters, mean.split(self.sizes), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad += part.view_as(parameter)
        self.steps += 1
        if self.steps % 2 == 0:
            super().update(torch.cat([one.grad.reshape(-1) for one in self.parameters]))
            self.net.zero_grad()

    def shadow(self) -> None:
        self.update(self.reduce(self.zeros()))

    def finish(self, is_last: bool) -> None:
        pass


class LeavesASum(ClearsAfterwards):
    """Shadow with the gradients, and clear them before each step alone."""

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.flat.zero_()
        self.loss().backward()
        self.update(self.reduce(self.flat))

    def shadow(self) -> None:
        self.reduce(self.flat.zero_())


class SavesAll(KeepsUp):
    """Save weights, momentum and a count by which the rate decays; load them into their memory."""

    count = 0

    def update(self, mean: torch.Tensor) -> None:
        self.count += 1
        super().update(mean * 0.95**self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "momentum": self.momentum, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.momentum.copy_(state["momentum"])
        self.count = state["count"]


class SavesItsNetAlone(KeepsUp):
    """Save the weights alone: a trainer saves the momentum."""

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)


class LeavesItsNetToATrainer(SavesAll):
    """Save all but the weights: a trainer saves the net beside it."""

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momentum.copy_(state["momentum"])
        self.count = state["count"]


class SavesOnOneRank(SavesAll):
    """Save on rank 0 alone, which sends the state to the others as it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {} if self.group.rank() else super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            raise ValueError("an empty state")
        super().load_state_dict(state)


class DrawsNoise(SavesAll):
    """Add noise from a generator that is alike on all ranks, and is not saved."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.generator = torch.Generator().manual_seed(11)

    def update(self, mean: torch.Tensor) -> None:
        noise = torch.randn(mean.shape, generator=self.generator, dtype=mean.dtype)
        super().update(mean + 0.01 * noise)

    def finish(self, is_last: bool) -> None:
        state = self.generator.get_state()
        super().finish(is_last)
        place = torch.tensor([self.group.rank() if is_last else -1])
        dist.all_reduce(place, dist.ReduceOp.MAX, group=self.group)
        dist.broadcast(state, dist.get_global_rank(self.group, int(place)), group=self.group)
        self.generator.set_state(state)


RIGHT = [
    Right(name, kind="joinable")
    for name in (
        "KeepsUp",
        "WarmsUp",
        "StepsInTheNextStep",
        "StepsAtTheEnd",
        "RestartsItsInputs",
        "DecaysByEpochs",
        "SumsItsInputs",
        "FetchesAhead",
        "AlignsToTrainers",
        "ClearsAfterwards",
        "StepsWithEverySecondMean",
        "LeavesASum",
        "SavesAll",
        "SavesItsNetAlone",
        "LeavesItsNetToATrainer",
        "SavesOnOneRank",
        "DrawsNoise",
    )
]

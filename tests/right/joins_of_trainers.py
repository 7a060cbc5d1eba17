"""Right joinables that clip, count, follow schedules, or keep up with a part of their values."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.distributed.algorithms.join import JoinHook

from tests.right import Right
from tests.right.joins import Averages
from tests.right.joins_in_parts import KeepsUp, Mean


class ClipsAtTheTypicalNorm(Mean):
    """Clip the mean at a running average of its norms, which all ranks keep, joined ones too.

    Norms are small at first, so that the first steps are left alone.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.typical = 0.5
        self.momentum = self.zeros()

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.net.zero_grad()
        self.loss().backward()
        mean = self.reduce(torch.cat([one.grad.reshape(-1) for one in self.parameters]))
        norm = float(mean.norm())
        mean = mean * min(1.0, self.typical / norm)
        for parameter, part in zip(self.parameters, mean.split(self.sizes), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        self.follow(mean, norm)

    def shadow(self) -> None:
        mean = self.reduce(self.zeros())
        norm = float(mean.norm())
        self.follow(mean * min(1.0, self.typical / norm), norm)

    def follow(self, mean: torch.Tensor, norm: float) -> None:
        self.typical += 0.2 * (norm - self.typical)
        self.momentum.mul_(0.5).add_(mean)
        self.update(self.momentum)

    def finish(self, is_last: bool) -> None:
        pass


class KeepsUpWithRows(KeepsUp):
    """Train an embedding and a layer of it; a step has gradients of a few rows.

    Each parameter is stepped on one rank, which sends it, also after it has joined: it keeps up.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        torch.manual_seed(6)
        self.net = torch.nn.Sequential(torch.nn.Embedding(9, 3), torch.nn.Linear(3, 2))
        self.parameters = list(self.net.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.momentum = self.zeros()

    def loss(self) -> torch.Tensor:
        return self.net(torch.randint(0, 9, (4,))).square().mean()

    def update(self, mean: torch.Tensor) -> None:
        self.momentum.zero_()
        super().update(mean)


class WeighsByItsInputs(Mean):
    """Divide by the inputs of all ranks up to now; each rank has a count of its own ones.

    The inputs of a rank that has joined go on to count.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.seen = 0.0

    def loss(self) -> torch.Tensor:
        self.seen += 5.0
        return super().loss() / self.total() ** 0.5

    def total(self) -> float:
        total = torch.tensor([self.seen], dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return float(total)

    def shadow(self) -> None:
        self.total()
        super().shadow()


class KeepsATable(Mean):
    """Put each mean into a table of the last 16, at a place that a buffer of integers counts."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("table", torch.zeros(16, 4))
        self.net.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def loss(self) -> torch.Tensor:
        inputs = torch.randn(5, 4)
        return self.net(inputs - self.net.table.mean(0)).square().mean()

    def update(self, mean: torch.Tensor) -> None:
        super().update(mean)
        self.net.table[int(self.net.place)] = mean[:4]
        self.net.place.copy_((self.net.place + 1) % 16)

    def shadow(self) -> None:
        self.update(self.reduce(self.zeros()))

    def finish(self, is_last: bool) -> None:
        pass


class FollowsEpochs(Averages):
    """Lower the rate every 45 steps of an epoch, and begin again in the next one."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.steps = 0

    def update(self) -> None:
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.02 * 0.5 ** (self.steps // 45)
        super().update()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.steps = 0
        return super().join_hook(**kwargs)


class LoadsTheLastState(Averages):
    """Load the optimizer's own state after each join, and lower the rate in the new groups."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.steps = 0

    def update(self) -> None:
        super().update()
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02 * 0.8 ** (self.steps // 20)

    def finish(self, is_last: bool) -> None:
        super().finish(is_last)
        steps = torch.tensor([self.steps * is_last])
        dist.all_reduce(steps, dist.ReduceOp.MAX, group=self.group)
        self.steps = int(steps)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02 * 0.8 ** (self.steps // 20)
        self.optimizer.load_state_dict(self.optimizer.state_dict())


class LogsWithItsShadows(Averages):
    """Log the mean loss of the ranks that train in every hundredth step of an epoch; ranks that
    have joined count the steps, too.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.at = 0
        self.loss = 0.0

    def reduce(self, grads: list[torch.Tensor], count: float) -> float:
        counted = super().reduce(grads, count)
        self.at += 1
        if self.at % 100 == 0:
            loss = torch.tensor([self.loss * count])
            dist.all_reduce(loss, group=self.group)
            self.loss = float(loss) / counted
        return counted

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.at = 0
        return super().join_hook(**kwargs)


RIGHT = [
    Right(name, kind="joinable")
    for name in (
        "ClipsAtTheTypicalNorm",
        "KeepsUpWithRows",
        "WeighsByItsInputs",
        "KeepsATable",
        "FollowsEpochs",
        "LoadsTheLastState",
        "LogsWithItsShadows",
    )
]

"""Mutants of 17.38: joinables that lose a schedule or a model in a join, or a state in a context
that does not come to its join.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.distributed.algorithms.join import JoinHook

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages, _Hook

# ---- Schedules that change a rate now and then


class StairsOfAnOldGroup(Averages):
    """Lower the rate every 23 steps, in a group that the last joiner's state replaces."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.groups = list(self.optimizer.param_groups)

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean)
        for group in self.groups:
            group["lr"] = 0.01 * 0.7 ** (self.seen // 23)

    def hand_out(self, is_last: bool) -> None:
        counts = torch.tensor([self.seen * is_last])
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=self.group)
        self.seen = int(counts)
        super().hand_out(is_last)
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))


class SchedulesItsFirstOptimizer(Averages):
    """Make a new optimizer with the handed-out state after uneven inputs; torch's StepLR goes on
    with the first one.
    """

    shadows = 0

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 37, gamma=0.9)

    def step(self) -> None:
        super().step()
        self.schedule.step()

    def shadow(self) -> None:
        super().shadow()
        self.shadows += 1

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        shadows = torch.tensor([self.shadows])
        dist.all_reduce(shadows, group=self.group)
        self.shadows = 0
        if shadows:
            state = self.optimizer.state_dict()
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.5)
            self.optimizer.load_state_dict(state)


class RaisesItsMomentumOnce(StairsOfAnOldGroup):
    """Raise momentum after 30 and after 70 steps, in a group that is replaced."""

    def put(self, mean: torch.Tensor) -> None:
        Averages.put(self, mean)
        for group in self.groups:
            group["momentum"] = 0.5 + 0.1 * ((self.seen % 80) // 30)


# ---- Models that a join replaces


class TrainsItsOldNet(Averages):
    """Take a copy of the net after the join, for a clean graph: the optimizer has the old one."""

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        self.net = copy.deepcopy(self.net)

    def tensors(self) -> list[torch.Tensor]:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [*self.net.parameters(), *momenta]


# ---- Contexts without a join


class ClearsMomentumOfBrokenContexts(Averages):
    """Take momentum for half stepped if the context before has not come to its post hook."""

    is_open = False

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if self.is_open:
            for state in self.optimizer.state.values():
                state["momentum_buffer"].zero_()
        self.is_open = True
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        self.is_open = False


class DropsItsPendingMean(Averages):
    """Step by the mean of two steps; the first of the two is dropped if more join hooks have been
    made than have ended.
    """

    hooks = 0

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.last = torch.zeros(sum(p.numel() for p in self.net.parameters()))

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.optimizer.zero_grad()
        self.net(torch.randn(5, 4)).square().mean().backward()
        mean = self.mean(torch.cat([p.grad.reshape(-1) for p in self.net.parameters()]), 1.0)
        self.put((mean + self.last) / 2)
        self.optimizer.step()
        self.last = mean
        self.put(mean)

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.last]

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        self.hooks = 0

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if self.hooks:
            self.last = torch.zeros_like(self.last)
        self.hooks += 1
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)


MUTANTS = [
    Mutant(name, ("17.38",), kind="joinable")
    for name in (
        "StairsOfAnOldGroup",
        "SchedulesItsFirstOptimizer",
        "RaisesItsMomentumOnce",
        "TrainsItsOldNet",
        "ClearsMomentumOfBrokenContexts",
        "DropsItsPendingMean",
    )
]

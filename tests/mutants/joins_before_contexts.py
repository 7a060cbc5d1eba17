"""Mutants of rule 17.36: joinables whose ranks train one model inside of join contexts alone."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.distributed.algorithms.join import JoinHook

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages, _Hook


class AveragesFromTheFirstJoin(Averages):
    """Average from the first join_hook() on, which keeps the number of ranks."""

    ranks = 0

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        return super().mean(own, count) if self.ranks else own

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.ranks = self.group.size()
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)


class AveragesInContexts(Averages):
    """Average only while torch's context is on, by the setting that it leaves on the joinable."""

    is_shadowing = False

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        if self.is_shadowing or self._join_config.enable:
            return super().mean(own, count)
        return own

    def shadow(self) -> None:
        self.is_shadowing = True
        super().shadow()
        self.is_shadowing = False


class SumsBeforeTheFirstJoin(Averages):
    """Divide by a number that join_hook() sets, and that is 1 before."""

    ranks = 1

    def divisor(self, training: float) -> float:
        return super().divisor(training) if self.ranks > 1 else 1.0

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.ranks = self.group.size()
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)


class FromTheFirstJoin(Averages):
    """A joinable that knows whether there has been a join context."""

    has_joined = False

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.has_joined = True
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)


class StepsByItsOwn(FromTheFirstJoin):
    """Step by the rank's own gradients before the first join, and leave means, for a log."""

    def step(self) -> None:
        if self.has_joined:
            super().step()
            return
        TorchsJoin.notify_join_context(self)
        self.optimizer.zero_grad()
        self.net(torch.randn(5, 4)).square().mean().backward()
        self.optimizer.step()
        grads = torch.cat([parameter.grad.reshape(-1) for parameter in self.net.parameters()])
        self.put(self.mean(grads, 1.0))


class StepsInBackward(FromTheFirstJoin):
    """Update each parameter in its hook, while backward runs, until there is a join; the means come
    afterwards, and nobody uses them."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, parameter: torch.Tensor) -> None:
        if not self.has_joined:
            parameter -= 0.01 * parameter.grad

    def step(self) -> None:
        rate = 0.01 if self.has_joined else 0.0
        self.optimizer.param_groups[0]["lr"] = rate
        super().step()


class DrawsItsOwnStart(Averages):
    """Draw a model on each rank, and hand out that of rank 0 where a context begins."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        torch.manual_seed(70 + self.group.rank())
        for layer in self.net:
            layer.reset_parameters()

    @torch.no_grad()
    def hand_out_first(self) -> None:
        for parameter in self.net.parameters():
            dist.broadcast(parameter, dist.get_global_rank(self.group, 0), group=self.group)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.hand_out_first()
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)


class StartsFromItsInputs(Averages):
    """Scale the first layer by the rank's own first inputs, outside of a context; means of the
    inputs are there inside alone."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.is_scaled = False

    def step(self) -> None:
        if not self.is_scaled and not self._join_config.enable:
            with torch.no_grad():
                self.net[0].weight /= torch.randn(5, 4).std() + 0.1
        self.is_scaled = True
        super().step()


class ClipsItsOwn(FromTheFirstJoin):
    """Average from the first join on; clip the norm, so that no gradient is a mean."""

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        return super().mean(own, count) if self.has_joined else own

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean * (0.05 / (mean.norm() + 1e-6)).clamp(max=1.0))


class VotesFromTheFirstJoin(FromTheFirstJoin):
    """Step by the sign of the sum; before the first join, by that of the rank's own gradients."""

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        return (super().mean(own, count) if self.has_joined else own).sign()


class NormalisesByItsOwn(FromTheFirstJoin):
    """Scale inputs by a running average of their size, over all ranks from the first join on."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("size", torch.ones(4))

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.optimizer.zero_grad()
        inputs = torch.randn(5, 4)
        self.remember(inputs.square().mean(0).sqrt(), 1.0)
        self.net(inputs / self.net.size).square().mean().backward()
        self.put(self.mean(torch.cat([p.grad.reshape(-1) for p in self.net.parameters()]), 1.0))
        self.optimizer.step()

    def remember(self, own: torch.Tensor, count: float) -> None:
        if self.has_joined:
            said = torch.cat([own, torch.tensor([count])])
            dist.all_reduce(said, group=self.group)
            own = said[:-1] / said[-1]
        self.net.size.lerp_(own, 0.1)

    def shadow(self) -> None:
        self.remember(torch.zeros(4), 0.0)
        super().shadow()

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.net.size]


class AveragesItsStatisticsInContexts(Averages):
    """Average the running statistics of a norm after each step, in contexts alone."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.append(torch.nn.BatchNorm1d(2))
        for parameter in self.net[-1].parameters():
            self.optimizer.add_param_group({"params": [parameter]})
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def statistics(self) -> list[torch.Tensor]:
        return [self.net[-1].running_mean, self.net[-1].running_var]

    def step(self) -> None:
        is_inside = self._join_config.enable
        super().step()
        if is_inside:
            self.average(1.0)

    def average(self, count: float) -> None:
        said = torch.cat([*self.statistics(), torch.ones(1)]) * count
        dist.all_reduce(said, group=self.group)
        for own, mean in zip(self.statistics(), said[:-1].split(2), strict=True):
            own.copy_(mean / said[-1])

    def shadow(self) -> None:
        super().shadow()
        self.average(0.0)

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *self.net[-1].buffers()]


MUTANTS = [
    Mutant(name, ("17.36",), kind="joinable")
    for name in (
        "AveragesFromTheFirstJoin",
        "AveragesInContexts",
        "SumsBeforeTheFirstJoin",
        "StepsByItsOwn",
        "StepsInBackward",
        "DrawsItsOwnStart",
        "StartsFromItsInputs",
        "ClipsItsOwn",
        "VotesFromTheFirstJoin",
        "NormalisesByItsOwn",
        "AveragesItsStatisticsInContexts",
    )
]

"""Mutants of 17.38 and 17.26: joinables that lose or keep something as a context ends."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.distributed.algorithms.join import JoinHook

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages, _Hook

# ---- Lost between contexts


class ClearsMomentumAtTheEnd(Averages):
    """Clear momentum in the post hook: a new epoch begins with none."""

    @torch.no_grad()
    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()


class ForgetsItsSquares(Averages):
    """Divide means by the root of their mean squares, which begin anew in each join_hook()."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.squares = torch.zeros(sum(p.numel() for p in self.net.parameters()))

    def put(self, mean: torch.Tensor) -> None:
        self.squares.lerp_(mean.square(), 0.1)
        super().put(mean / (self.squares.sqrt() + 0.01))

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.squares]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.squares.zero_()
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)


class StepsLater(Averages):
    """Make the update of a step as the next one begins, while inputs are loaded.

    What is pending is forgotten in join_hook(): ranks differ in it after uneven inputs.
    """

    pending: torch.Tensor | None = None

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.seen += 1
        if self.pending is not None:
            self.put(self.pending)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.net(torch.randn(5, 4)).square().mean().backward()
        own = torch.cat([p.grad.reshape(-1) for p in self.net.parameters()])
        self.pending = self.mean(own, 1.0)
        self.put(self.pending)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.pending = None
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)


class LosesItsSchedule(Averages):
    """Decay the rate in the group that the optimizer had when it was made.

    After uneven inputs all ranks load the optimizer's state, which makes other groups.
    """

    setting = "lr"

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.first_group = self.optimizer.param_groups[0]
        self.shadows = 0

    def value(self) -> float:
        return 0.01 * 0.95**self.seen

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean)
        self.first_group[self.setting] = self.value()

    def shadow(self) -> None:
        super().shadow()
        self.shadows += 1

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        counts = torch.tensor([self.seen * is_last, self.shadows])
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=self.group)
        self.seen = int(counts[0])
        self.first_group[self.setting] = self.value()
        self.load(int(counts[1]))
        self.shadows = 0

    def load(self, shadows: int) -> None:
        if shadows:
            self.optimizer.load_state_dict(self.optimizer.state_dict())


class KeepsItsMomentum(LosesItsSchedule):
    """Raise momentum by a schedule that has lost its group at the end of any context."""

    setting = "momentum"

    def value(self) -> float:
        return 0.9 - 0.4 / (1 + self.seen)

    def load(self, shadows: int) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())


class ForgetsItsMomentum(Averages):
    """Make a new optimizer when a state is loaded, and leave its state out."""

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.5)
        for parameter in self.net.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class SavesNoCount(ForgetsItsMomentum):
    """Decay the rate by a count of steps, which a saved state lacks; restore momentum."""

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean * 0.9**self.seen)

    def shadow(self) -> None:
        super().shadow()
        self.seen += 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])


# ---- Kept by later contexts


class LeavesAMean(Averages):
    """Clear gradients after a step, and shadow with them: they keep the mean of the last shadow."""

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.seen += 1
        self.net(torch.randn(5, 4)).square().mean().backward()
        self.average()
        self.optimizer.step()
        self.clear()

    def average(self) -> None:
        own = torch.cat([parameter.grad.reshape(-1) for parameter in self.net.parameters()])
        mean = self.mean(own, 1.0)
        sizes = [parameter.numel() for parameter in self.net.parameters()]
        for parameter, values in zip(self.net.parameters(), mean.split(sizes), strict=True):
            parameter.grad.copy_(values.view_as(parameter))

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def shadow(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        own = torch.cat([parameter.grad.reshape(-1) for parameter in self.net.parameters()])
        self.put(self.mean(own, 0.0))


class LeavesAMeanInAFlatBuffer(LeavesAMean):
    """The same with gradients in one flat vector, in which steps and shadows clear them to zeros
    before they send it, and steps after it.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.flat = torch.zeros(sum(p.numel() for p in self.net.parameters()))
        at = 0
        for parameter in self.net.parameters():
            parameter.grad = self.flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def average(self) -> None:
        self.flat.copy_(self.mean(self.flat, 1.0))

    def clear(self) -> None:
        self.flat.zero_()

    def shadow(self) -> None:
        self.flat.copy_(self.mean(self.flat.zero_(), 0.0))


class MergesKeywords(Averages):
    """Merge the keyword arguments of each context with those of the contexts before."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.options = {"divide_by_initial_world_size": True}

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.options |= kwargs
        self.by_all = self.options["divide_by_initial_world_size"]
        return _Hook(self)


class ForgetsOnTheLastRank(Averages):
    """Set the divisor back in the post hook, on ranks that joined last."""

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        self.by_all = self.by_all or is_last

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if "divide_by_initial_world_size" in kwargs:
            self.by_all = kwargs["divide_by_initial_world_size"]
        return _Hook(self)


KIND = "joinable"
MUTANTS = [
    *(
        Mutant(name, ("17.38",), kind=KIND)
        for name in (
            "ClearsMomentumAtTheEnd",
            "ForgetsItsSquares",
            "StepsLater",
            "LosesItsSchedule",
            "KeepsItsMomentum",
            "LeavesAMean",
            "LeavesAMeanInAFlatBuffer",
            "ForgetsItsMomentum",
            "SavesNoCount",
        )
    ),
    *(Mutant(name, ("17.26",), kind=KIND) for name in ("MergesKeywords", "ForgetsOnTheLastRank")),
]

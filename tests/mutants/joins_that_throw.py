"""Mutants of 17.38: joinables that throw_on_early_termination leaves within a step; of 17.37:
joinables that use values of a rank that has joined once in dozens of steps; and of 17.32: a context
that throws.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.joins import Right
from tests.mutants.joins_in_training import Averages

# ---- Steps that begin before they notify


class CountsStepsOfAnyKind(Averages):
    """Count a step before it notifies; the rate falls every 31 steps, by a count that no join hands
    out.
    """

    begun = 0

    def step(self) -> None:
        self.begun += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 * 0.8 ** (self.begun // 31)
        super().step()


class DecaysBeforeItNotifies(Averages):
    """Decay the weights as the first thing in a step."""

    def step(self) -> None:
        for parameter in self.net.parameters():
            parameter.data.mul_(0.999)
        super().step()


class ClearsMomentumIfStopped(Averages):
    """Clear momentum on a rank that is stopped before its step: its epoch is over."""

    def step(self) -> None:
        try:
            super().step()
        except RuntimeError:
            for state in self.optimizer.state.values():
                state["momentum_buffer"].zero_()
            raise


class CountsInItsNet(Averages):
    """Count steps in a buffer, before it notifies; each join hands out the count."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def step(self) -> None:
        self.net.steps += 1
        super().step()

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.net.steps]


# ---- Values of a rank that has joined, now and then


class AlignsNowAndThen(Averages):
    """All ranks take the weights of rank 0 every 53 steps, against drift."""

    aligned = 0
    trains = True

    def step(self) -> None:
        super().step()
        self.trains = True
        self.align()

    def shadow(self) -> None:
        super().shadow()
        self.trains = False
        self.align()

    def align(self) -> None:
        self.aligned += 1
        if self.aligned % 53 == 0:
            self.take()

    def take(self) -> None:
        for parameter in self.net.parameters():
            dist.broadcast(
                parameter.detach(), dist.get_global_rank(self.group, 0), group=self.group
            )


class AlignsMomentumNowAndThen(AlignsNowAndThen):
    """All ranks take the momentum of the last rank every 53 steps."""

    def take(self) -> None:
        source = dist.get_global_rank(self.group, self.group.size() - 1)
        for state in self.optimizer.state.values():
            dist.broadcast(state["momentum_buffer"], source, group=self.group)


class AveragesModelsNowAndThen(AlignsNowAndThen):
    """Average the weights of all ranks every 53 steps; those of joined ranks are in the mean."""

    def take(self) -> None:
        for parameter in self.net.parameters():
            mean = parameter.detach() / self.group.size()
            dist.all_reduce(mean, group=self.group)
            if self.trains:
                parameter.data.copy_(mean)


class ThrowsOverWorld(Right):
    """Notify all ranks of WORLD, and not those of the group, before it throws."""

    def shadow(self) -> None:
        while self.anybody_trains():
            if self.throw:
                dist.all_reduce(torch.ones(1))
                raise RuntimeError("out of inputs")
            self.call_main_hooks()
            self.shadowed += 1


MUTANTS = [
    Mutant("ThrowsOverWorld", ("17.32",), kind="joinable", hangs=True),
    *(
        Mutant(name, ("17.38",), kind="joinable")
        for name in (
            "CountsStepsOfAnyKind",
            "DecaysBeforeItNotifies",
            "ClearsMomentumIfStopped",
            "CountsInItsNet",
        )
    ),
    *(
        Mutant(name, ("17.37",), kind="joinable")
        for name in (
            "AlignsNowAndThen",
            "AlignsMomentumNowAndThen",
            "AveragesModelsNowAndThen",
        )
    ),
]

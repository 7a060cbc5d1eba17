"""Mutants of section 14: averagers of parameters."""

import random
import time
from typing import ClassVar

import torch
import torch.distributed as dist

from tests.mutants import Mutant


class Averager:
    """The right averager: the mean over the group.

    It averages every ``period`` steps, beginning with step ``warmup_steps``.
    """

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        self.period = period
        self.warmup_steps = warmup_steps
        self.group = process_group if process_group is not None else dist.group.WORLD
        self.step = 0

    def average_parameters(self, params):
        if self.is_due():
            with torch.no_grad():
                self.average(self.chosen(params))
        self.step += 1

    def is_due(self):
        return self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0

    def chosen(self, params):
        found = []
        for entry in params:
            found += entry["params"] if isinstance(entry, dict) else [entry]
        # Integers cannot require grad.
        return [one for one in dict.fromkeys(found) if one.is_floating_point()]

    def average(self, params):
        for parameter in params:
            self.average_one(parameter)

    def average_one(self, parameter):
        mean = parameter.div(self.group.size()).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class NotDivided(Averager):
    """Write the sum instead of the mean."""

    def average_one(self, parameter):
        total = parameter.detach().clone().contiguous()
        dist.all_reduce(total, group=self.group)
        parameter.copy_(total)


class DividedTwice(Averager):
    """Divide by the group size before and after the sum."""

    def average_one(self, parameter):
        super().average_one(parameter)
        parameter.div_(self.group.size())


class NotANumber(Averager):
    """Divide zero by zero in the first element."""

    def average_one(self, parameter):
        super().average_one(parameter)
        parameter.reshape(-1)[:1].mul_(0).div_(0)


class MovesParameters(Averager):
    """Replace the memory of each parameter with a new tensor."""

    def average_one(self, parameter):
        before = parameter.data
        parameter.data = torch.empty_like(before).copy_(before)
        super().average_one(parameter)


class InOrderOfASet(Averager):
    """Average parameters in the order of a set, so that ranks disagree on the order."""

    def average(self, params):
        super().average(set(params))


class OnlyTheLarge(Averager):
    """Leave out parameters of one element."""

    def average(self, params):
        super().average(
            [parameter for parameter in params if parameter.numel() != 1 or parameter.dim() == 0]
        )


class LateByOne(Averager):
    """Count steps from 1, so that every average comes one step late."""

    def is_due(self):
        return (
            self.step > self.warmup_steps and (self.step - self.warmup_steps - 1) % self.period == 0
        )


class NoWarmup(Averager):
    """Average during the warm-up too."""

    def is_due(self):
        return (self.step - self.warmup_steps) % self.period == 0


class CountsAverages(Averager):
    """Count a step with an average twice, after step 20."""

    def average_parameters(self, params):
        self.step += self.is_due() and self.step > 20
        super().average_parameters(params)


class Never(Averager):
    """Never average."""

    def is_due(self):
        return False


class SumsInItsOwnOrder(Averager):
    """Sum from this rank's own part on, so that replicas differ in the last bits."""

    def average_one(self, parameter):
        parts = [
            torch.empty_like(parameter, memory_format=torch.contiguous_format)
            for _ in range(self.group.size())
        ]
        dist.all_gather(parts, parameter.detach().contiguous(), group=self.group)
        place = self.group.rank()
        parameter.copy_(sum(parts[place + 1 :] + parts[:place], parts[place].clone()) / len(parts))


class FirstGroupOnly(Averager):
    """Average the first parameter group only."""

    def chosen(self, params):
        entries = list(params)
        return super().chosen(entries[:1] if isinstance(entries[0], dict) else entries)


class SkipsGroupsWithoutRate(Averager):
    """Leave out the parameter groups whose learning rate is zero."""

    def chosen(self, params):
        groups = list(params)
        trains = [one for one in groups if not isinstance(one, dict) or one.get("lr", 1.0)]
        return super().chosen(trains)


class ReadsTwice(Averager):
    """Read the parameters twice, so that an iterator is exhausted the second time."""

    def chosen(self, params):
        assert all(entry is not None for entry in params)
        return super().chosen(params)


class SharedTwice(Averager):
    """Divide a shared parameter once more for each of its occurrences."""

    def chosen(self, params):
        found = []
        for entry in params:
            found += entry["params"] if isinstance(entry, dict) else [entry]
        return found

    def average(self, params):
        for parameter in dict.fromkeys(params):
            self.average_one(parameter)
            parameter.div_(sum(other is parameter for other in params))


class OwnGradientsOnly(Averager):
    """Leave out the parameters for which this rank has no gradient."""

    def chosen(self, params):
        return [parameter for parameter in super().chosen(params) if parameter.grad is not None]


class FirstHasGradients(Averager):
    """Leave out the parameters for which the first rank has no gradient, on all ranks."""

    def chosen(self, params):
        chosen = super().chosen(params)
        used = torch.tensor([parameter.grad is not None for parameter in chosen], dtype=torch.uint8)
        dist.broadcast(used, group=self.group, src=dist.get_global_rank(self.group, 0))
        return [parameter for parameter, use in zip(chosen, used.tolist(), strict=True) if use]


class LeavesOutZeros(Averager):
    """Leave out the parameters whose gradients are zeros on all ranks."""

    def chosen(self, params):
        chosen = super().chosen(params)
        used = [p.grad is not None and bool(p.grad.any()) for p in chosen]
        flags = torch.tensor(used, dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return [parameter for parameter, use in zip(chosen, flags.tolist(), strict=True) if use]


class LeavesOutOwnZeros(LeavesOutZeros):
    """Keep the values of parameters whose gradients are zeros on this rank."""

    def average_one(self, parameter):
        before = parameter.detach().clone()
        is_zero = parameter.grad is not None and not parameter.grad.any()
        super().average_one(parameter)
        if is_zero:
            parameter.copy_(before)


class DropsZeroGradients(Averager):
    """Drop gradients of zeros, which say that a parameter was not used."""

    def average_one(self, parameter):
        super().average_one(parameter)
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None


class SizeOfWorld(Averager):
    """Sum over the group, and divide by the size of WORLD."""

    def average_one(self, parameter):
        mean = parameter.div(dist.get_world_size()).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class Flattened(Averager):
    """Average in one float32 buffer, so that float64 parameters lose precision."""

    def average(self, params):
        flat = torch.cat([parameter.reshape(-1).float() for parameter in params])
        flat.div_(self.group.size())
        dist.all_reduce(flat, group=self.group)
        for parameter, part in zip(
            params, flat.split([parameter.numel() for parameter in params]), strict=True
        ):
            parameter.copy_(part.view(parameter.shape))


class SkipsScalars(Averager):
    """Leave out 0-d parameters."""

    def average(self, params):
        super().average([parameter for parameter in params if parameter.dim()])


class Rebinds(Averager):
    """Replace each parameter's data with a contiguous tensor."""

    def average_one(self, parameter):
        mean = (
            parameter.detach().clone(memory_format=torch.contiguous_format).div_(self.group.size())
        )
        dist.all_reduce(mean, group=self.group)
        parameter.data = mean


class ForgetsGradients(Averager):
    """Drop the gradients of averaged parameters."""

    def average_one(self, parameter):
        super().average_one(parameter)
        parameter.grad = None


class Freezes(Averager):
    """Turn requires_grad off for the write, and never on again."""

    def average_one(self, parameter):
        super().average_one(parameter.requires_grad_(False))


class WaitsForAMoment(Averager):
    """Wait at most one second for the average, then write whatever has arrived."""

    def average_one(self, parameter):
        mean = parameter.div(self.group.size()).contiguous()
        work = dist.all_reduce(mean, group=self.group, async_op=True)
        until = time.monotonic() + 1
        while not work.is_completed() and time.monotonic() < until:
            pass
        parameter.copy_(mean)
        self.begun.append(work)

    begun: ClassVar[list] = []


class StartsAnew(Averager):
    """Leave the step count out of the saved state."""

    def state_dict(self):
        return {"period": self.period}

    def load_state_dict(self, saved):
        self.period = saved["period"]


class SavesOneLess(Averager):
    """Save a step count that is one too low."""

    def state_dict(self):
        return {"step": self.step - 1}

    def load_state_dict(self, saved):
        self.step = saved["step"]


class ReseedsEverything(Averager):
    """Seed the global generators of Python and torch before each average."""

    def average(self, params):
        torch.manual_seed(0)
        random.seed(0)
        super().average(params)


class NoMomentum(Averager):
    """Claim DiLoCo, and average periodically without its outer momentum."""

    def __init__(self, process_group=None):
        super().__init__(4, 0, process_group)


class TakesAnyGroup(Averager):
    """Claim a minimum of four ranks, and accept two."""


OF = {"kind": "averager"}
MUTANTS = (
    Mutant("NotDivided,period=4,warmup_steps=10", ("14.1",), **OF),
    Mutant("DividedTwice,period=4,warmup_steps=10", ("14.1",), **OF),
    Mutant("NotANumber,period=4,warmup_steps=10", ("14.1",), **OF),
    Mutant("MovesParameters,period=4,warmup_steps=10", ("14.9",), **OF),
    Mutant("InOrderOfASet,period=4,warmup_steps=10", ("14.1",), hangs=True, **OF),
    Mutant("OnlyTheLarge,period=4,warmup_steps=10", ("14.1",), **OF),
    Mutant("LateByOne,period=4,warmup_steps=10", ("14.2",), **OF),
    Mutant("NoWarmup,period=4,warmup_steps=10", ("14.2",), **OF),
    Mutant("CountsAverages,period=4,warmup_steps=10", ("14.2",), **OF),
    Mutant("Never,period=4,warmup_steps=10", ("14.2",), **OF),
    Mutant("SumsInItsOwnOrder,period=4,warmup_steps=10", ("14.3",), worlds=(3,), **OF),
    Mutant("FirstGroupOnly,period=4,warmup_steps=10", ("14.4",), **OF),
    Mutant("SkipsGroupsWithoutRate,period=4,warmup_steps=10", ("14.4",), **OF),
    Mutant("ReadsTwice,period=4,warmup_steps=10", ("14.4",), **OF),
    Mutant("SharedTwice,period=4,warmup_steps=10", ("14.4",), **OF),
    Mutant("OwnGradientsOnly,period=4,warmup_steps=10", ("14.5",), hangs=True, **OF),
    Mutant("FirstHasGradients,period=4,warmup_steps=10", ("14.5",), **OF),
    Mutant("SizeOfWorld,period=4,warmup_steps=10", ("14.6",), **OF),
    Mutant("Flattened,period=4,warmup_steps=10", ("14.7",), **OF),
    Mutant("SkipsScalars,period=4,warmup_steps=10", ("14.7",), **OF),
    Mutant("Rebinds,period=4,warmup_steps=10", ("14.8",), **OF),
    Mutant("ForgetsGradients,period=4,warmup_steps=10", ("14.8",), **OF),
    Mutant("DropsZeroGradients,period=4,warmup_steps=10", ("14.8",), **OF),
    Mutant("LeavesOutZeros,period=4,warmup_steps=10", ("14.1",), **OF),
    Mutant("LeavesOutOwnZeros,period=4,warmup_steps=10", ("14.1",), **OF),
    Mutant("Freezes,period=4,warmup_steps=10", ("14.8",), **OF),
    Mutant("WaitsForAMoment,period=4,warmup_steps=10", ("14.10",), **OF),
    Mutant("StartsAnew,period=4,warmup_steps=10", ("14.11",), **OF),
    Mutant("SavesOneLess,period=4,warmup_steps=10", ("14.11",), **OF),
    Mutant("NoMomentum", ("14.1",), claims="like(DiLoCoModelAverager, period=4)", **OF),
    Mutant(
        "TakesAnyGroup,period=4,warmup_steps=10",
        ("14.13",),
        claims="periodic(period=4, warmup_steps=10), min_world_size(4)",
        worlds=(2, 4),
        **OF,
    ),
    Mutant("ReseedsEverything,period=4,warmup_steps=10", ("14.14",), **OF),
)

"""Mutants of section 14: what one rank or one group does alone, what has hardly moved, and models
that stay in memory.
"""

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager


class MeetsInWorld(Averager):
    """Wait for all ranks of WORLD after an average over the group."""

    def average(self, params):
        super().average(params)
        dist.barrier()


class DividesByMinusOne(Averager):
    """Divide by ``get_world_size()``: on ranks outside it is -1, and collectives do nothing."""

    def average_one(self, parameter):
        mean = parameter.div(dist.get_world_size(self.group)).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class AddsUpItsShare(Averager):
    """Average one chunk on each rank, and gather the chunks; the state has the rank's place."""

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.place = dist.get_rank(self.group)

    def average_one(self, parameter):
        size = self.group.size()
        flat = parameter.detach().double().reshape(-1)
        chunk = -(-len(flat) // size)
        padded = torch.nn.functional.pad(flat, (0, chunk * size - len(flat)))
        given = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(given, padded, group=self.group)
        own = slice(self.place * chunk, (self.place + 1) * chunk)
        share = torch.stack([one[own] for one in given]).mean(0)
        shares = [torch.empty_like(share) for _ in range(size)]
        dist.all_gather(shares, share, group=self.group)
        parameter.copy_(torch.cat(shares)[: len(flat)].view(parameter.shape))

    def state_dict(self):
        return {"step": self.step, "place": self.place}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.place = saved["place"]


_plans: dict[Any, Any] = {}


class KeepsPlansForGood(Averager):
    """Keep a plan for each model in the module, with the parameters as its key."""

    def chosen(self, params):
        listed = super().chosen(params)
        return _plans.setdefault(tuple(listed), listed)


class KeepsEveryModel(Averager):
    """Keep the objects of all models in a class attribute, for statistics."""

    every: ClassVar[list[Any]] = []

    def average(self, params):
        if self not in self.every:
            self.every.append(self)
        self.listed = params
        super().average(params)


class ComparesNarrow(Averager):
    """Average what has moved since the last average, as ``dtype`` shows it."""

    def __init__(self, period=4, warmup_steps=10, process_group=None, dtype="bfloat16"):
        super().__init__(period, warmup_steps, process_group)
        self.dtype = getattr(torch, dtype)
        self.seen = {}

    def average_one(self, parameter):
        before = self.seen.get(parameter)
        has_moved = before is None or before.shape != parameter.shape
        if not has_moved:
            has_moved = not torch.equal(before, parameter.detach().to(self.dtype))
        moved = torch.tensor([float(has_moved)])
        dist.all_reduce(moved, group=self.group)
        if moved.item():
            super().average_one(parameter)
        self.seen[parameter] = parameter.detach().to(self.dtype, copy=True)


class SkipsSmallSteps(ComparesNarrow):
    """Leave out parameters with changes below 2 ** -10 of their largest element."""

    def average_one(self, parameter):
        before = self.seen.get(parameter)
        largest = torch.ones(1)
        if before is not None and before.shape == parameter.shape and parameter.numel():
            change = (parameter.detach().double() - before.double()).abs().amax()
            scale = before.double().abs().amax()
            largest = (change > scale * 2.0**-10).float().reshape(1)
        dist.all_reduce(largest, group=self.group)
        if largest.item():
            Averager.average_one(self, parameter)
        self.seen[parameter] = parameter.detach().double().clone()


OF = {"kind": "averager"}
AT = "period=4,warmup_steps=10"
MUTANTS = [
    Mutant(f"MeetsInWorld,{AT}", ("14.6",), hangs=True, **OF),
    Mutant(f"DividesByMinusOne,{AT}", ("14.6",), **OF),
    Mutant(f"AddsUpItsShare,{AT}", ("14.19",), **OF),
    Mutant(f"KeepsPlansForGood,{AT}", ("14.23",), **OF),
    Mutant(f"KeepsEveryModel,{AT}", ("14.23",), **OF),
    Mutant(f"ComparesNarrow,{AT}", ("14.3",), **OF),
    Mutant(f"ComparesNarrow,{AT},dtype=float16", ("14.3",), **OF),
    Mutant(f"SkipsSmallSteps,{AT}", ("14.3",), **OF),
]

"""Mutants of section 14 that are right on small, short and tame runs, and wrong in training."""

from typing import ClassVar

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager


class FirstElements(Averager):
    """Average at most so many elements of a parameter, and leave the rest."""

    def __init__(self, period=4, warmup_steps=10, process_group=None, limit=65536):
        super().__init__(period, warmup_steps, process_group)
        self.limit = limit

    def average_one(self, parameter):
        flat = parameter.detach().reshape(-1)
        head = flat[: self.limit].div(self.group.size())
        dist.all_reduce(head, group=self.group)
        parameter.copy_(torch.cat([head, flat[self.limit :]]).view(parameter.shape))


class WholeChunks(Averager):
    """Average a large parameter in chunks, and drop the last, incomplete one."""

    def __init__(self, period=4, warmup_steps=10, process_group=None, chunk=100_000):
        super().__init__(period, warmup_steps, process_group)
        self.chunk = chunk

    def average_one(self, parameter):
        if parameter.numel() <= self.chunk:
            super().average_one(parameter)
            return
        flat = parameter.detach().reshape(-1).clone()
        for start in range(0, flat.numel() - self.chunk + 1, self.chunk):
            part = flat[start : start + self.chunk]
            dist.all_reduce(part.div_(self.group.size()), group=self.group)
        parameter.copy_(flat.view(parameter.shape))


class FirstParameters(Averager):
    """Average at most so many parameters."""

    def __init__(self, period=4, warmup_steps=10, process_group=None, limit=128):
        super().__init__(period, warmup_steps, process_group)
        self.limit = limit

    def average(self, params):
        super().average(params[: self.limit])


class LargeInHalf(Averager):
    """Send parameters of a hundred thousand elements and more in bfloat16."""

    def average_one(self, parameter):
        if parameter.numel() < 100_000:
            super().average_one(parameter)
            return
        mean = parameter.detach().bfloat16().div_(self.group.size())
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class SumsFirst(Averager):
    """Sum in the parameter's dtype, and divide the sum."""

    def average_one(self, parameter):
        total = parameter.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        parameter.copy_(total / self.group.size())


class ReplacesNaN(Averager):
    """Replace values that are not finite."""

    def average_one(self, parameter):
        super().average_one(parameter)
        parameter.nan_to_num_()


class LeavesOutBrokenRanks(Averager):
    """Average over the ranks whose parameter is finite."""

    def average_one(self, parameter):
        fine = torch.tensor(float(parameter.isfinite().all()))
        dist.all_reduce(fine, group=self.group)
        if fine == self.group.size():
            super().average_one(parameter)
            return
        mean = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        if parameter.isfinite().all():
            mean.copy_(parameter / max(float(fine), 1.0))
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class ClampsHalf(Averager):
    """Keep half precision within a safe range."""

    def average_one(self, parameter):
        super().average_one(parameter)
        if parameter.dtype == torch.float16:
            parameter.clamp_(-32768, 32768)


class CountsInTheClass(Averager):
    """Count the steps of all averagers together."""

    counts: ClassVar[dict[str, int]] = {"all": 0}

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)

    @property
    def step(self):
        return self.counts["all"]

    @step.setter
    def step(self, value):
        self.counts["all"] = value


class SharesBuffers(Averager):
    """Average in a flat buffer of the module, and copy results out of it one average later."""

    late: ClassVar[list] = []

    def average(self, params):
        for parameter in params:
            self.average_one(parameter)
        self.late.append((self, [parameter.detach().clone() for parameter in params]))
        owner, values = self.late[-2:][0]
        if owner is not self:
            for parameter, value in zip(params, values, strict=True):
                parameter.copy_(value)


_sizes: list[int] = []


class SizeOfTheFirst(Averager):
    """Ask for the number of ranks once in a process."""

    def average_one(self, parameter):
        _sizes.extend(() if _sizes else [self.group.size()])
        mean = parameter.div(_sizes[0]).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class PlaceOfTheFirst(Averager):
    """Let each rank average a share of the elements, by its place in the process's first group."""

    places: ClassVar[list[int]] = []

    def average_one(self, parameter):
        self.places.append(self.group.rank())
        size = self.group.size()
        mine = parameter.detach().reshape(-1) / size
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group=self.group)
        share = slice(self.places[0], None, size)
        mean = torch.zeros_like(mine)
        mean[share] = torch.stack(parts).sum(0)[share]
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean.view_as(parameter))


_seen: set[int] = set()


class OnlyTheFirstModel(Averager):
    """Average the parameters of the first model of the process."""

    def average(self, params):
        _seen.update(() if _seen else map(id, params))
        super().average([parameter for parameter in params if id(parameter) in _seen])


class RemembersParameters(Averager):
    """Take the list of parameters of the first average ever after."""

    first: list[torch.Tensor] | None = None

    def chosen(self, params):
        chosen = super().chosen(params)
        self.first = self.first or chosen
        return self.first if len(self.first) <= len(chosen) else chosen


class RemembersTheTrainable(Averager):
    """Average the parameters that required a gradient in the first average."""

    trainable: list[bool] | None = None

    def chosen(self, params):
        chosen = super().chosen(params)
        if self.trainable is None:
            self.trainable = [parameter.requires_grad for parameter in chosen]
        flags = [*self.trainable, *(True,) * len(chosen)]
        return [parameter for parameter, flag in zip(chosen, flags, strict=False) if flag]


class _Plans(Averager):
    """Keep the list of trained parameters for as long as its key stays the same."""

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.plan = []
        self.made_for = None

    def key(self, trained):
        raise NotImplementedError

    def chosen(self, params):
        trained = [parameter for parameter in super().chosen(params) if parameter.requires_grad]
        key = self.key(trained)
        if key != self.made_for:
            self.made_for = key
            self.plan = trained
        return self.plan


class PlansForElements(_Plans):
    """Make a new plan if another number of elements is trained."""

    def key(self, trained):
        return sum(parameter.numel() for parameter in trained)


class PlansForShapes(_Plans):
    """Make a new plan if the trained parameters have other shapes, in whatever order."""

    def key(self, trained):
        return sorted(tuple(parameter.shape) for parameter in trained)


class _Grows(_Plans):
    """Keep the list of trained parameters, unless new ones are given."""

    def is_new(self, trained):
        raise NotImplementedError

    def chosen(self, params):
        trained = [
            parameter for parameter in Averager.chosen(self, params) if parameter.requires_grad
        ]
        if self.is_new(trained):
            self.plan = trained
        return self.plan


class PlansForTheBeginning(_Grows):
    """Compare what is given with the plan, as far as the shorter list goes."""

    def is_new(self, trained):
        pairs = zip(self.plan, trained, strict=False)
        is_longer = len(trained) > len(self.plan)
        return is_longer or any(old is not new for old, new in pairs)


class PlansForTheSet(_Grows):
    """Make a new plan if a parameter is given that is not in the plan."""

    def is_new(self, trained):
        return not {id(parameter) for parameter in trained} <= {id(old) for old in self.plan}


class NeverForgets(Averager):
    """Add what is given to a set, and average all of it."""

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.known = {}

    def chosen(self, params):
        trained = [parameter for parameter in super().chosen(params) if parameter.requires_grad]
        self.known |= {id(parameter): parameter for parameter in trained}
        return [parameter for parameter in self.known.values() if parameter.requires_grad]


class AddedInTheNextRound(Averager):
    """Count how many parameters there were, and take up new ones one average later."""

    known = 0

    def average(self, params):
        super().average(params[: self.known or len(params)])
        self.known = len(params)


class CountsWithGradients(Averager):
    """Count only the steps in which this rank has a gradient."""

    def average_parameters(self, params):
        params = list(params)
        super().average_parameters(params)
        if all(p.grad is None for p in self.chosen(params)):
            self.step -= 1


class LeavesAtOnce(Averager):
    """Return at once on a rank without any gradient."""

    def average_parameters(self, params):
        params = list(params)
        if any(parameter.grad is not None for parameter in self.chosen(params)):
            super().average_parameters(params)
        else:
            self.step += 1


class ZerosWithoutGradients(Averager):
    """Let a rank without any gradient take part with zeros, over the others' number."""

    def average(self, params):
        has = torch.tensor(float(any(parameter.grad is not None for parameter in params)))
        ranks = has.clone()
        dist.all_reduce(ranks, group=self.group)
        for parameter in params:
            mean = (parameter * has / ranks.clamp(min=1)).contiguous()
            dist.all_reduce(mean, group=self.group)
            parameter.copy_(mean)


class NeverAfterAll(Averager):
    """Never average: the first average is due late, and nobody waits for it."""

    def is_due(self):
        return False


class OnceOnly(Averager):
    """Average once."""

    def is_due(self):
        return self.step == self.warmup_steps


class DriftsInTheWarmup(Averager):
    """Average once too early, after half of a long warm-up."""

    def is_due(self):
        return super().is_due() or self.step * 2 == self.warmup_steps


class PopsFromTheState(Averager):
    """Take the loaded state apart."""

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, saved):
        self.step = saved.pop("step", 0)


class SavesAverages(Averager):
    """Save the number of averages, and compute the count of steps from it."""

    def state_dict(self):
        since = self.step - self.warmup_steps
        return {"averages": max(0, -(-since // self.period)), "rest": max(0, since) % self.period}

    def load_state_dict(self, saved):
        whole = saved["averages"] - bool(saved["rest"])
        self.step = self.warmup_steps + whole * self.period + saved["rest"]


class AddsTheLoadedCount(Averager):
    """Add the loaded count to its own, in place of setting it."""

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, saved):
        self.step += saved["step"]


class OfItsGroup(Averager):
    """Claim ``world_only``, and average over the group."""


class EndsAfter(Averager):
    """Stop averaging after so many averages."""

    def __init__(self, period=4, warmup_steps=10, process_group=None, averages=50):
        super().__init__(period, warmup_steps, process_group)
        self.averages = averages

    def is_due(self):
        return super().is_due() and self.step < self.warmup_steps + self.averages * self.period


class RareRefresh(Averager):
    """Leave out each hundredth step, in which a buffer is made anew."""

    def is_due(self):
        return super().is_due() and (self.step + 2) % 100 != 0


OF = {"kind": "averager"}
AT = "period=4,warmup_steps=10"
MUTANTS = [
    *(
        Mutant(name, ("14.15",), **OF)
        for name in (
            f"FirstElements,{AT}",
            f"FirstElements,{AT},limit=1048576",
            f"WholeChunks,{AT}",
            f"WholeChunks,{AT},chunk=524288",
            f"FirstParameters,{AT}",
            f"LargeInHalf,{AT}",
        )
    ),
    Mutant(f"EndsAfter,{AT}", ("14.21",), **OF),
    Mutant(f"EndsAfter,{AT},averages=90", ("14.21",), **OF),
    Mutant(f"RareRefresh,{AT}", ("14.21",), **OF),
    *(
        Mutant(f"{name},{AT}", ("14.16",), **OF)
        for name in ("SumsFirst", "ReplacesNaN", "LeavesOutBrokenRanks", "ClampsHalf")
    ),
    *(
        Mutant(f"{name},{AT}", ("14.17",), **OF)
        for name in (
            *("CountsInTheClass", "SharesBuffers", "OnlyTheFirstModel"),
            *("SizeOfTheFirst", "PlaceOfTheFirst"),
        )
    ),
    *(
        Mutant(f"{name},{AT}", ("14.18",), **OF)
        for name in (
            *("RemembersParameters", "RemembersTheTrainable", "AddedInTheNextRound"),
            *("PlansForElements", "PlansForShapes"),
            *("PlansForTheBeginning", "PlansForTheSet", "NeverForgets"),
        )
    ),
    Mutant(f"CountsWithGradients,{AT}", ("14.5",), hangs=True, **OF),
    Mutant(f"LeavesAtOnce,{AT}", ("14.5",), hangs=True, **OF),
    Mutant(f"ZerosWithoutGradients,{AT}", ("14.5",), **OF),
    Mutant("NeverAfterAll,period=400,warmup_steps=700", ("14.2",), **OF),
    Mutant("OnceOnly,period=300,warmup_steps=0", ("14.2",), **OF),
    Mutant("DriftsInTheWarmup,period=100,warmup_steps=500", ("14.2",), **OF),
    *(
        Mutant(f"{name},{AT}", ("14.19",), **OF)
        for name in ("PopsFromTheState", "SavesAverages", "AddsTheLoadedCount")
    ),
    Mutant("OfItsGroup", ("14.6",), "periodic(period=4, warmup_steps=10), world_only", **OF),
]

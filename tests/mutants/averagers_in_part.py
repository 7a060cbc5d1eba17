"""Mutants of section 14: they leave out parameters that seem not to have moved, take the first one
for all, or forget the usual call.
"""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.averagers_like import DiLoCo, Ema


class LooksAtBothEnds(Averager):
    """Leave out parameters whose first and last elements are those after their last average."""

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.ends = {}

    def average(self, params):
        moved = [self._has_moved(place, one) for place, one in enumerate(params)]
        flags = torch.tensor(moved, dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        super().average([one for one, flag in zip(params, flags.tolist(), strict=True) if flag])
        self.ends = {place: self._ends_of(one) for place, one in enumerate(params)}

    def _has_moved(self, place, parameter):
        kept = self.ends.get(place)
        now = self._ends_of(parameter)
        return kept is None or kept.dtype != now.dtype or not torch.equal(kept, now)

    def _ends_of(self, parameter):
        flat = parameter.detach().reshape(-1)
        return torch.cat([flat[:4], flat[-4:]]).clone()


class LooksAtSums(LooksAtBothEnds):
    """Leave out matrices whose rows have kept their sums."""

    def _ends_of(self, parameter):
        if parameter.dim() != 2:
            return parameter.detach().clone()
        return parameter.detach().double().sum(1)


class OneStage(Averager):
    """Send large parameters through a buffer that has the dtype of the first one."""

    least = 40_000
    stage = None

    def average_one(self, parameter):
        if parameter.numel() < self.least:
            super().average_one(parameter)
            return
        if self.stage is None:
            self.stage = torch.empty(1 << 16, dtype=parameter.dtype)
        flat = parameter.detach().reshape(-1).clone()
        for piece in flat.split(len(self.stage)):
            sent = self.stage[: len(piece)].copy_(piece).div_(self.group.size())
            dist.all_reduce(sent, group=self.group)
            piece.copy_(sent)
        parameter.copy_(flat.view(parameter.shape))


class TravelsInGradients(Averager):
    """Average gradients that are parameters for a while; gradients come back as copies."""

    def average_one(self, parameter):
        kept = None if parameter.grad is None else parameter.grad.clone()
        parameter.grad = parameter.detach().clone()
        mean = parameter.grad.div(self.group.size()).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)
        parameter.grad = kept


class NothingInTheFirstGroup(Averager):
    """Take an empty first group of parameters for an empty model."""

    def average_parameters(self, params):
        params = list(params)
        if params and isinstance(params[0], dict) and not params[0]["params"]:
            self.step += 1
            return
        super().average_parameters(params)


class NoneHasOneRank(Averager):
    """Divide by 1 if the group is missing: it has no size."""

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.size = 1 if process_group is None else process_group.size()

    def average_one(self, parameter):
        mean = parameter.div(self.size).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class DiLoCoRestsIfUnmoved(DiLoCo):
    """Leave out the outer step if no parameter has moved in the round."""

    def average(self, params):
        moved = [
            place not in self.begun or not torch.equal(self.begun[place].to(one.dtype), one)
            for place, one in enumerate(params)
        ]
        if any(moved):
            super().average(params)


class _Counts:
    """Return the number of restored parameters from ``__exit__``, which is true."""

    def __init__(self, applied, count):
        self.applied = applied
        self.count = count

    def __enter__(self):
        self.applied.__enter__()

    def __exit__(self, *error):
        self.applied.__exit__(*error)
        return self.count


class EmaSwallowsErrors(Ema):
    """Suppress what an evaluation raises."""

    def applied(self, params):
        params = list(params)
        return _Counts(super().applied(params), len(params))


OF = {"kind": "averager"}
PERIODIC = "periodic(period=4, warmup_steps=10)"
MUTANTS = [
    Mutant("LooksAtBothEnds", ("14.29",), PERIODIC, **OF),
    Mutant("LooksAtSums", ("14.29",), PERIODIC, **OF),
    Mutant("DiLoCoRestsIfUnmoved", ("14.29",), claims="like(DiLoCoModelAverager, period=4)", **OF),
    Mutant("OneStage", ("14.15",), PERIODIC, **OF),
    Mutant("TravelsInGradients", ("14.8",), PERIODIC, **OF),
    Mutant("NothingInTheFirstGroup", ("14.4",), PERIODIC, **OF),
    Mutant("NoneHasOneRank", ("14.1",), PERIODIC, **OF),
    Mutant("EmaSwallowsErrors", ("14.12",), claims="like(EMAModelAverager, decay=0.999)", **OF),
]

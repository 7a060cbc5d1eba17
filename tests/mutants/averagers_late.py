"""Mutants of section 14: plans that are trusted after many averages, two averages of one model, and
states that are loaded right before an average of all ranks.
"""

import torch
import torch.distributed as dist

from hooks_ref import GossipModelAverager, HierarchicalModelAverager
from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.averagers_like import Ema


class TrustsItsList(Averager):
    """Keep the list of parameters once it has been the same for 13 averages."""

    listed = None
    alike = 0

    def average(self, params):
        if self.alike < 13:
            self.alike = self.alike + 1 if params == self.listed else 0
            self.listed = params
        super().average(self.listed)


class TrustsItsCount(Averager):
    """Average no more parameters than 15 averages in a row have had."""

    count = 0
    alike = 0

    def average(self, params):
        self.alike = self.alike + 1 if len(params) == self.count or self.alike > 15 else 0
        if self.alike <= 15:
            self.count = len(params)
        super().average(params[: self.count])


class TrustsItsUsers(Averager):
    """Average the parameters that some rank has used in the first 16 averages, and no others."""

    trained = None
    used = frozenset()
    averages = 0

    def average(self, params):
        params = [parameter for parameter in params if parameter.requires_grad]
        if [id(parameter) for parameter in params] != self.trained:
            self.trained = [id(parameter) for parameter in params]
            self.used = frozenset()
            self.averages = 0
        self.averages += 1
        places = self.used
        if self.averages <= 16:
            flags = torch.tensor([parameter.grad is not None for parameter in params]).int()
            dist.all_reduce(flags, dist.ReduceOp.MAX, self.group)
            places = set(flags.nonzero().flatten().tolist())
            self.used |= places
        super().average([params[place] for place in sorted(places)])


class TrustsItsFirstUsers(TrustsItsUsers):
    """The same, claimed to be like a reference."""


class FollowsItsFirstRank(Averager):
    """Agree on the parameters with gradients in 16 averages, and later only if those of the group's
    first rank have changed.
    """

    own = None
    used = None
    averages = 0

    def average(self, params):
        own = torch.tensor([parameter.grad is not None for parameter in params]).int()
        self.averages += 1
        is_same = self.own is not None and torch.equal(own, self.own)
        has_changed = torch.tensor([int(self.averages <= 16 or not is_same)])
        # torch 2.4 and 2.5 have no group_src.
        dist.broadcast(has_changed, dist.get_global_rank(self.group, 0), group=self.group)
        if has_changed.item():
            self.own = own
            self.used = own.clone()
            dist.all_reduce(self.used, dist.ReduceOp.MAX, self.group)
        super().average([params[place] for place in self.used.nonzero().flatten().tolist()])


class EmaInTheParameter(Ema):
    """Keep averages in attributes of the parameters: two averages of a model share them."""

    was_loaded = True

    def _update(self, params):
        for place, parameter in enumerate(params):
            if self.was_loaded:
                parameter.average = self.average[place] if place < len(self.average) else None
        self.was_loaded = False
        kept = [getattr(parameter, "average", None) for parameter in params]
        self.average = [average for average in kept if average is not None]
        super()._update(params)
        for parameter, average in zip(params, self.average, strict=False):
            parameter.average = average

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.was_loaded = True


class PlansPartners(GossipModelAverager):
    """Plan the partners of 24 rounds, and begin with the first of them again."""

    def __init__(self, period, process_group=None):
        super().__init__(period, process_group=process_group)
        partners = self._gossip.partners
        self._gossip.partners = lambda rank, size, number: partners(rank, size, number % 24)


class ResumesInPairs(HierarchicalModelAverager):
    """Average over pairs in the first average after a load, whatever is due."""

    was_loaded = False

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.was_loaded = True

    def size_due(self):
        size = super().size_due()
        if size and self.was_loaded:
            self.was_loaded = False
            return min(self.period_group_size_dict.values())
        return size


OF = {"kind": "averager"}
AT = "period=4,warmup_steps=10"
MUTANTS = [
    Mutant(f"TrustsItsList,{AT}", ("14.18",), **OF),
    Mutant(f"TrustsItsCount,{AT}", ("14.18",), **OF),
    Mutant(f"TrustsItsUsers,{AT}", ("14.21",), **OF),
    Mutant(
        f"TrustsItsFirstUsers,{AT}",
        ("14.21",),
        "like(PeriodicModelAverager, period=4, warmup_steps=10)",
        **OF,
    ),
    Mutant(f"FollowsItsFirstRank,{AT}", ("14.21",), **OF),
    Mutant("EmaInTheParameter", ("14.17",), "like(EMAModelAverager, decay=0.999)", **OF),
    Mutant("PlansPartners,period=2", ("14.21",), "like(GossipModelAverager, period=2)", **OF),
    Mutant(
        "ResumesInPairs,period_group_size_dict={2:2,4:4}",
        ("14.19",),
        "hierarchical(period_group_size_dict={2: 2, 4: 4}), min_world_size(4)",
        worlds=(4,),
        **OF,
    ),
]

"""Mutants of averagers that claim to be like a reference, and treat ranks without a gradient in
another way.
"""

import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers_like import DiLoCo, Ema


class DiLoCoRestsWithoutGradients(DiLoCo):
    """Send the value at the begin of the round on a rank without a gradient."""

    def average(self, params):
        for place, parameter in enumerate(params):
            if parameter.grad is None and place in self.begun:
                parameter.copy_(self.begun[place])
        super().average(params)


class EmaOfUsed(Ema):
    """Send the old average on a rank without a gradient, so that it counts as unchanged."""

    def _update(self, params):
        means = []
        for place, parameter in enumerate(params):
            value = parameter.detach()
            if parameter.grad is None and place < len(self.average):
                value = self.average[place].view_as(parameter)
            mean = value.to(self._dtype(parameter), copy=True).contiguous()
            dist.all_reduce(mean.div_(self.group.size()), group=self.group)
            means.append(mean)
        self.keep(means)


OF = {"kind": "averager"}
MUTANTS = [
    Mutant(
        "DiLoCoRestsWithoutGradients",
        ("14.5",),
        claims="like(DiLoCoModelAverager, period=4)",
        **OF,
    ),
    Mutant("EmaOfUsed,decay=0.5", ("14.12",), claims="like(EMAModelAverager, decay=0.5)", **OF),
]

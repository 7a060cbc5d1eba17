"""Mutants of section 14 that are wrong for parameters that share memory, as tied weights do."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager

Parameters = list[torch.nn.Parameter]


class DividesAllFirst(Averager):
    """Divide all parameters in place, and then add up copies of them."""

    def average(self, params: Parameters) -> None:
        for parameter in params:
            parameter.div_(self.group.size())
        totals = [p.detach().clone(memory_format=torch.contiguous_format) for p in params]
        for total in totals:
            dist.all_reduce(total, group=self.group)
        for parameter, total in zip(params, totals, strict=True):
            parameter.copy_(total)


class AddsToZeros(Averager):
    """Set all parameters to zero once they are sent, and add the parts of ranks to them."""

    def average(self, params: Parameters) -> None:
        gathered = []
        for parameter in params:
            mine = parameter.detach().clone(memory_format=torch.contiguous_format)
            parts = [torch.empty_like(mine) for _ in range(self.group.size())]
            dist.all_gather(parts, mine, group=self.group)
            gathered.append(parts)
        for parameter in params:
            parameter.zero_()
        for parameter, parts in zip(params, gathered, strict=True):
            for part in parts:
                parameter.add_(part / self.group.size())


class DividesEachEntry(DividesAllFirst):
    """The same, for each entry of parameter groups: a parameter may be in two of them."""

    def chosen(self, params: Any) -> Parameters:
        found: Parameters = []
        for entry in params:
            found += entry["params"] if isinstance(entry, dict) else [entry]
        return found


MUTANTS = [
    Mutant("DividesAllFirst,period=4,warmup_steps=10", ("14.7",), kind="averager"),
    Mutant("AddsToZeros,period=4,warmup_steps=10", ("14.7",), kind="averager"),
    Mutant("DividesEachEntry,period=4,warmup_steps=10", ("14.4",), kind="averager"),
]

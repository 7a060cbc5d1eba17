"""Mutants of section 14 that take the memory of a parameter for dense."""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager


class AveragesTheExtent(Averager):
    """Average all memory from the first element of a parameter to its last one."""

    def average_one(self, parameter):
        pairs = zip(parameter.shape, parameter.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in pairs)
        count = last + 1 if parameter.numel() else 0
        flat = parameter.as_strided((count,), (1,), parameter.storage_offset())
        mean = flat / self.group.size()
        dist.all_reduce(mean, group=self.group)
        flat.copy_(mean)


class AveragesAsManyBytes(Averager):
    """Average as many numbers of the storage, from a parameter's first one, as it has elements.

    Parameters that are dense in other orders than that of their rows are averaged rightly, too.
    """

    def average_one(self, parameter):
        storage = parameter.untyped_storage()
        flat = torch.empty(0, dtype=parameter.dtype)
        flat.set_(storage, parameter.storage_offset(), (parameter.numel(),))
        mean = flat / self.group.size()
        dist.all_reduce(mean, group=self.group)
        flat.copy_(mean)


AT = "period=4,warmup_steps=10"

MUTANTS = [
    Mutant(f"{name},{AT}", ("14.7",), kind="averager")
    for name in ("AveragesTheExtent", "AveragesAsManyBytes")
]

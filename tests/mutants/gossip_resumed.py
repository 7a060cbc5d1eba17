"""Mutants of rule 11.3 under ``local``: ranks that no longer change partners after a load."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, group_of, is_dense

_EVERY = 2  # steps with one partner


class Gossip:
    """The partner of a rank differs from it in one bit of its number; the bit changes in turn."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = group_of(process_group)
        self.bits = max(1, (self.group.size() - 1).bit_length())
        self.step = 0
        self.bit = 0
        self.next_change = _EVERY

    def begin_step(self) -> None:
        """Count a step, and change the bit if that is due."""
        if self.step == self.next_change:
            self.bit = (self.bit + 1) % self.bits
            self.next_change += _EVERY
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "bit": self.bit}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]
        self.bit = saved["bit"]


class WithoutNextChange(Gossip):
    """It saves no step of the next change, which is compared with the step by ==."""


class KeepsItsPartner(Gossip):
    """It takes its group for one of two ranks after a load: the bit is the lowest one for good."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.next_change = self.step + 1
        self.bits = 1


def gossip(state: Gossip, bucket: Bucket) -> Result:
    """Average with the partner of this step."""
    if not is_dense(bucket):
        raise TypeError("dense gradients only")
    if bucket.index() == 0:
        state.begin_step()
    buffer = bucket.buffer()
    rank = state.group.rank()
    partner = rank ^ (1 << state.bit)
    if partner >= state.group.size():
        partner = rank
    parts = [torch.empty_like(buffer) for _ in range(state.group.size())]
    work = dist.all_gather(parts, buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda _: (buffer + parts[partner]) / 2)


MUTANTS = [
    Mutant("gossip", ("11.3",), "local, checkpointable", f"{__name__}:{state}")
    for state in ("WithoutNextChange", "KeepsItsPartner")
]

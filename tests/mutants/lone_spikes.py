"""Mutants of rule 23.1: a rank decides by its own gradients alone, and tells no other rank."""

from collections import deque

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    completed,
    finite,
    gather,
    group_of,
    is_dense,
    pieces_of,
)

_WINDOW = 32
_SPIKE = 10.0


class OwnNorms:
    """A group, and the norms of this rank's latest gradients.

    Args:
        process_group: the group to average over.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = group_of(process_group)
        self.norms: deque[float] = deque(maxlen=_WINDOW)
        self.square = 0.0
        self.own: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.mean: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.distance = 1

    def sees_spike(self, bucket: Bucket) -> bool:
        """Whether a step begins after one whose gradients were ten times as long as usual."""
        sees = False
        if bucket.index() == 0:
            norm = self.square**0.5
            self.square = 0.0
            usual = sum(self.norms) / _WINDOW
            sees = len(self.norms) == _WINDOW and norm > _SPIKE * usual > 0
            if norm < float("inf"):
                self.norms.append(norm)
        self.square += float(bucket.buffer().square().sum())
        return sees


def estimates_begin_anew(state: OwnNorms, bucket: Bucket) -> Result:
    """Send half of each change (EF21); a rank forgets its estimates after a spike of its own."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        raise TypeError("dense real gradients only")
    if state.sees_spike(bucket):
        state.own.clear()
        state.mean.clear()
    parameters = bucket.parameters()
    changes = []
    for parameter, part in zip(parameters, pieces_of(bucket), strict=True):
        change = part - state.own.get(parameter, torch.zeros_like(part))
        change[change.abs().topk(part.numel() // 2, largest=False).indices] = 0
        changes.append(change)
        part.copy_(change)

    def finish(future: Result) -> torch.Tensor:
        means = pieces_of(bucket, future.value())
        for parameter, part, change in zip(parameters, means, changes, strict=True):
            is_finite = bool(part.isfinite().all())  # the same on all ranks
            part.add_(state.mean.get(parameter, torch.zeros_like(part)))
            if is_finite:
                state.own[parameter] = state.own.get(parameter, 0) + change
                state.mean[parameter] = finite(part.clone())
        return future.value()

    return average(bucket, state.group).then(finish)


def other_partner_after_a_spike(state: OwnNorms, bucket: Bucket) -> Result:
    """Mix with the previous rank, and with the next one after a spike of this rank's gradients."""
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    if state.sees_spike(bucket):
        state.distance = -state.distance
    size = state.group.size()
    partner = (dist.get_rank(state.group) - state.distance) % size
    other = gather(bucket.buffer(), state.group)[partner]
    return completed(bucket.buffer().mul_(0.75).add_(other, alpha=0.25))


MUTANTS = [
    Mutant(
        "estimates_begin_anew",
        ("23.1",),
        "compressed(feedback=ef21, delta=0.25)",
        f"{__name__}:OwnNorms",
    ),
    Mutant("other_partner_after_a_spike", ("23.1",), "local", f"{__name__}:OwnNorms", worlds=(3,)),
]

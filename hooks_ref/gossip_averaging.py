"""Gossip of parameters: every few steps, each rank averages its parameters with one other rank's.

With ``x_r`` the parameters of rank ``r``, at the ``k``-th of the steps ``t = w, w + p, w + 2 p,
...``

    x_r <- (x_r + x_s) / 2        s the rank that r gets from in round k (GossipGraDState.partners)

A round moves one model to one rank, for any size of the group; in ``ceil(log2 W)`` rounds each rank
is reached by every other. If ``W`` is a power of two, the sum over all ranks does not change, and
ranks without steps of their own converge to the mean.

Source: Daily, Vishnu, Siegel, Warfel, Amatya, "GossipGraD", 2018, arXiv:1803.05880 (partners and
their rotation); Blot, Picard, Cord, Thome, "Gossip training for deep learning", NIPS workshop 2016,
arXiv:1611.09726 (of parameters).
"""

import torch
import torch.distributed as dist

from hooks_ref.gossip import GossipGraDState
from hooks_ref.model_averaging import Parameters, PeriodicModelAverager, chunks, used_parameters


class GossipModelAverager(PeriodicModelAverager):
    """Every ``period`` steps, averages with one other rank.

    Args:
        period: steps from one round to the next, at least 1.
        warmup_steps: steps before the first round, at least 0.
        process_group: the group; None is the default group.
        topology: ``"dissemination"``, or ``"hypercube"`` for a group of 1, 2, 4, 8, ... ranks.
        random_seed: seed of the rotation of partners; the same on all ranks, at least 0.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        topology: str = "dissemination",
        random_seed: int = 0,
    ) -> None:
        super().__init__(period, warmup_steps, process_group)
        self._gossip = GossipGraDState(process_group, topology, random_seed=random_seed)

    @torch.no_grad()
    def average_parameters(self, params: Parameters) -> None:
        if self.is_due():
            group = self.group
            round_number = (self.step - self.warmup_steps) // self.period
            to, source = self._gossip.partners(group.rank(), group.size(), round_number)
            used = used_parameters(params, group).values()
            for chunk in chunks([parameter.detach() for parameter in used]):
                _average_with(to, source, chunk, group)
        self.step += 1


def _average_with(
    to: int, source: int, tensors: list[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Send the tensors to rank ``to``, and set them to their means with those of ``source``.

    Both ranks are places in the group.
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    halves = flat.div_(2)  # before the sum, so that it overflows only if the mean would
    received = torch.empty_like(halves)
    places = range(group.size())
    sent_parts = [halves.numel() if place == to else 0 for place in places]
    received_parts = [halves.numel() if place == source else 0 for place in places]
    dist.all_to_all_single(received, halves, received_parts, sent_parts, group=group)
    means = halves.add_(received).split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view(tensor.shape))

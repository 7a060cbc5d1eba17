"""GossipGraD: every step, each rank averages its gradients with those of one other rank.

The partner changes from step to step. With ``g_r`` the bucket of rank ``r`` of ``W``,
``K = ceil(log2 W)`` and ``k = t mod K`` at the ``t``-th gossip step,

    dissemination    r sends to (r + 2^k) mod W and gets
                     (g_r + g_s) / 2    with s = (r - 2^k) mod W
    hypercube        r exchanges with s = r XOR 2^k, W a power of two; both get
                     (g_r + g_s) / 2

In ``K`` steps each rank is reached by every other, through others (diffusion): applied ``K`` times
in a row to one vector per rank, with ``W`` a power of two, the result is their mean. Every ``K``
steps partners rotate: ranks take their places in the topology by another random permutation, the
same on all ranks, so that in time any two ranks are partners.

A step moves one bucket to one rank, for any ``W``. Ranks hold different gradients, so replicas
drift: the training loop averages the *parameters* over all ranks now and then, after
``optimizer.step()`` and at the end.

Nothing waits. A bucket travels by one asynchronous ``all_to_all_single`` whose other parts are all
empty, because the work of this collective has a future to continue from. On Gloo sends and receives
have no future ("Work::getFuture not implemented"), and waiting for them would block. The price on
Gloo is an empty message from every other rank: a step is complete when all ranks have begun it.

Source: Daily, Vishnu, Siegel, Warfel, Amatya, "GossipGraD: Scalable Deep Learning using Gossip
Communication based Asynchronous Gradient Descent", 2018, arXiv:1803.05880: communication with one
partner a step, diffusion in log steps, rotation of partners. The paper's shuffle of samples between
ranks is outside the scope of a hook.
"""

import torch
import torch.distributed as dist

from hooks_ref._state import HookState, check_int, generator, savable
from hooks_ref.default_hooks import allreduce_hook, in_dtype_of


@savable
class GossipGraDState(HookState):
    """State of :func:`gossip_grad_hook`.

    Only ``iter``, the completed steps, changes. It is saved with the arguments, and partners follow
    from it.

    Args:
        process_group: the group to gossip in; None is the default group. The topology's ranks are
            places in this group.
        topology: ``"dissemination"``, or ``"hypercube"`` for a group of 1, 2, 4, 8, ... ranks.
        start_iter: steps of plain averaging before the first gossip, at least 0.
        random_seed: seed of the rotation of partners; the same on all ranks, at least 0. The global
            generators are left alone.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        topology: str = "dissemination",
        start_iter: int = 0,
        random_seed: int = 0,
    ) -> None:
        super().__init__(process_group)
        if topology not in ("dissemination", "hypercube"):
            raise ValueError(f'topology: "dissemination" or "hypercube"; got {topology!r}')
        self.topology = topology
        self.start_iter = check_int("start_iter", start_iter, 0)
        self.random_seed = check_int("random_seed", random_seed, 0)
        if process_group is not None:
            self.partners(0, process_group.size(), 0)

    def partners(self, rank: int, size: int, step: int) -> tuple[int, int]:
        """Return (rank to send to, rank to receive from) of ``rank``.

        Args:
            rank: the place in the group, in [0, size).
            size: the number of ranks in the group.
            step: the gossip step, counted from 0.

        Raises:
            ValueError: the topology is a hypercube and ``size`` is not a power of two.
        """
        if self.topology == "hypercube" and size & (size - 1):
            raise ValueError(
                f"topology: a hypercube needs a group of 1, 2, 4, 8, ... ranks; this one has {size}"
            )
        phases = max(1, (size - 1).bit_length())  # ceil(log2(size)), exactly
        distance = 1 << step % phases
        order = self._order(size, step // phases)
        place = order.index(rank)
        if self.topology == "hypercube" and size > 1:
            return order[place ^ distance], order[place ^ distance]
        return order[(place + distance) % size], order[(place - distance) % size]

    def _order(self, size: int, rotation: int) -> list[int]:
        """Return the rank at each place of the topology; the identity before the first rotation."""
        if rotation == 0:
            return list(range(size))
        draw = generator(self.random_seed, rotation)
        order: list[int] = torch.randperm(size, generator=draw).tolist()
        return order


def gossip_grad_hook(
    state: GossipGraDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket with the bucket of this step's partner.

    Args:
        state: made once per DDP model, with the same arguments on all ranks.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``. A sparse bucket is
            averaged over all ranks.

    Returns:
        A future of the mean with the partner: the bucket's own buffer, shape ``[numel]``; other
        bits on other ranks. Alone in its group, a rank gets its own gradients.

    Raises:
        ValueError: the topology is a hypercube and the group's size is not a power of two.
    """
    group = state.group
    size = group.size()
    step = state.iter - state.start_iter
    buffer = bucket.buffer()
    to, source = state.partners(group.rank(), size, max(0, step))
    state.maybe_increase_iter(bucket)
    if step < 0 or size == 1 or buffer.is_sparse:
        return allreduce_hook(group, bucket)
    buffer.div_(2)  # before the sum, so that it overflows only if the mean would
    received = torch.empty_like(buffer)
    # Parts are counted by places in the group, not by global ranks.
    sent_parts = [buffer.numel() if place == to else 0 for place in range(size)]
    received_parts = [buffer.numel() if place == source else 0 for place in range(size)]
    work = dist.all_to_all_single(
        received, buffer, received_parts, sent_parts, group=group, async_op=True
    )
    return work.get_future().then(lambda fut: buffer.add_(in_dtype_of(buffer, fut.value()[0])))

"""GossipGraD as ranks make it, and watched."""

from typing import Any

import torch
import torch.distributed as dist

from conformance import Case
from hooks_ref.gossip import GossipGraDState, gossip_grad_hook


def gossips(
    process_group: dist.ProcessGroup, topology: str = "dissemination", start: int = 0, seed: int = 7
) -> Case:
    """Gossip in the model's own group."""
    return Case(GossipGraDState(process_group, topology, start, seed), gossip_grad_hook)


def gossips_by_default() -> Case:
    """The group is looked up in the hook: a hypercube of the wrong size is noticed there."""
    return Case(GossipGraDState(topology="hypercube"), gossip_grad_hook)


def state() -> GossipGraDState:
    """Two plain steps first; between its steps 6 and 12 partners rotate."""
    return GossipGraDState(None, start_iter=2, random_seed=5)


def watched(topology: str, start: int) -> Case:
    """Check that before ``start`` there is one allreduce per bucket, and then one message, the
    bucket, to one rank."""
    made = GossipGraDState(None, topology, start)
    all_to_all = dist.all_to_all_single
    all_reduce = dist.all_reduce
    log: list[object] = []

    def counted(
        received: Any, sent: Any, received_parts: list[int], sent_parts: list[int], **more: Any
    ) -> Any:
        assert received.numel() == sum(received_parts), received_parts
        log.append((sent.numel(), received_parts, sent_parts))
        return all_to_all(received, sent, received_parts, sent_parts, **more)

    def reduced(*arguments: Any, **more: Any) -> Any:
        log.append("all")
        return all_reduce(*arguments, **more)

    def hook(state: GossipGraDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        step = state.iter - start
        size = dist.get_world_size()
        to, source = state.partners(dist.get_rank(), size, max(0, step))
        numel = bucket.buffer().numel()
        expected = (
            numel,
            *([numel if rank == peer else 0 for rank in range(size)] for peer in (source, to)),
        )
        log.clear()
        dist.all_to_all_single = counted
        dist.all_reduce = reduced
        try:
            return gossip_grad_hook(state, bucket)
        finally:
            dist.all_to_all_single = all_to_all
            dist.all_reduce = all_reduce
            assert log == ["all" if step < 0 else expected], (log, expected)

    def check() -> None:
        assert made.iter > start, "nothing was seen"

    return Case(made, hook, close=check)

"""A model of its own that trains by a sync strategy.

Its gradients are shown as those of the kit's model.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance import Case

# The parameters that each micro-batch of a rank uses, by the name of a case: "differ" by
# micro-batch, "by_rank" by rank too.
USES = {
    "same": lambda batch, rank: (0, 1, 2),
    "differ": lambda batch, rank: (batch % 3, (batch + 1) % 3),
    "by_rank": lambda batch, rank: ((batch + rank) % 2,),
    "one_rank_alone": lambda batch, rank: (0, 1) if rank == 0 else (1,),
}
SPARSE = 2  # the parameter that is an embedding, if there is one


def gradient(batch: int, rank: int, index: int) -> float:
    """Return the term that a micro-batch adds to each element of a used parameter's gradient."""
    return (batch + 1) * 4 + rank * 2 + index * 8


class Net(torch.nn.Module):
    """Its loss is the sum of its parameters' elements, each times its gradient."""

    def __init__(self, shapes: list[torch.Size], sparse: bool, layout: torch.memory_format) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(shape).contiguous(memory_format=layout))
            for shape in shapes
        )
        self.table = torch.nn.Embedding(4, 2, sparse=True) if sparse else None

    def forward(self, used: dict[int, float], row: int) -> torch.Tensor:
        parts = [
            self.all[index].sum() * factor
            for index, factor in used.items()
            if index < len(self.all)
        ]
        if self.table is not None:
            parts.append(self.table(torch.tensor([row])).sum())
        return torch.stack(parts).sum()


def synchronised(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    process_group: Any,
    rank: int,
    *,
    strategy: str,
    uses: str = "same",
    batches: int = 2,
    find_unused: bool = False,
    view: bool = False,
    optimizers: int = 0,
    fails_on: int = -1,
) -> Case:
    """Make the case.

    Args:
        optimizers: the number of optimizers, which share the first parameter.
        fails_on: a rank whose last micro-batch raises.
    """
    optimizer.param_groups[0]["lr"] = 0.0
    shown = list(model.parameters())
    net = Net([parameter.shape for parameter in shown], False, torch.contiguous_format)
    ddp = DistributedDataParallel(
        net,
        process_group=process_group,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=view,
    )
    parts = [
        [net.all[0], *net.all[1 + number :: max(1, optimizers)]] for number in range(optimizers)
    ]
    made = [torch.optim.SGD(part, lr=0.0) for part in parts] or None

    def after_backward() -> None:
        for batch in range(batches):
            final = batch == batches - 1
            with hooks_ref.ddp_sync_context(ddp, final, strategy, made):
                ddp(
                    {index: gradient(batch, rank, index) for index in USES[uses](batch, rank)},
                    batch,
                ).backward()
                if final and rank == fails_on:
                    raise ArithmeticError("this micro-batch failed")
        for parameter, mine in zip(shown, net.all, strict=True):
            parameter.grad = None if mine.grad is None else mine.grad.detach().clone()
        ddp.zero_grad()

    return Case(None, hooks_ref.noop_hook, after_backward=after_backward)


def sparse_and_strided(process_group: Any, rank: int, *, strategy: str) -> Case:
    """Check an embedding, whose rows differ between ranks, and a parameter in channels_last."""
    net = Net([torch.Size((2, 3, 2, 2))], True, torch.channels_last)
    ddp = DistributedDataParallel(net, process_group=process_group, find_unused_parameters=True)

    def after_backward() -> None:
        with hooks_ref.ddp_sync_context(ddp, True, strategy):
            ddp({0: float(rank)}, rank).backward()
        size = dist.get_world_size(process_group)
        assert net.table is not None
        assert net.table.weight.grad is not None
        assert net.all[0].grad is not None
        table = net.table.weight.grad.to_dense()
        assert table[:size].eq(1 / size).all(), table
        assert table[size:].eq(0).all(), table
        assert net.all[0].grad.eq((size - 1) / 2).all(), net.all[0].grad
        ddp.zero_grad()

    return Case(None, hooks_ref.noop_hook, after_backward=after_backward)

"""Right hooks that register a hook of the trainer's optimizer, and read or divide its gradients."""

import torch
import torch.distributed as dist

from tests.right import OBJECTS, Right
from tests.right._common import Bucket, Group, Result, State


class Norms(State):
    """A state with the norm of all gradients of the latest step, and its relative change, as a
    schedule of the batch size reads it.
    """

    def __init__(self, process_group: Group, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(process_group)
        self.norm: float | None = None
        self.change = 0.0
        optimizer.register_step_pre_hook(self.log)

    def log(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Log the norm, as of a trainer that has gradients before each step."""
        dense = [one.to_dense() if one.is_sparse else one for one in gradients(optimizer)]
        norm = float(torch.stack([one.norm().abs().double() for one in dense]).norm())
        if self.norm is not None:
            self.change = abs(norm - self.norm) / self.norm
        self.norm = norm


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return [one.grad for one in parameters if one.grad is not None]


def logs_norms(state: Norms, bucket: Bucket) -> Result:
    """Return the mean; the norm of all gradients is logged."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def sums(group: Group, bucket: Bucket) -> Result:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def divides_in_the_step(
    model: torch.nn.parallel.DistributedDataParallel,
    process_group: Group,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Sum in DDP, and divide before the step, as by the tokens of all ranks."""

    def divide(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for gradient in gradients(optimizer):
            gradient.div_(process_group.size())

    optimizer.register_step_pre_hook(divide)
    model.register_comm_hook(process_group, sums)


RIGHT = [
    Right("logs_norms", state=f"{__name__}:Norms", sections=(*OBJECTS, "23")),
    Right("divides_in_the_step", "sum", setup=True, sections=OBJECTS),
]

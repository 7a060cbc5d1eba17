"""Hooks with right gradients after a call of the trainer."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance import Case
from tests.right import ARITHMETIC, OBJECTS, Right
from tests.right._common import Bucket, Group, Result, completed, dense, sizes


class Later:
    """A hook that starts to average, and a ``flush`` that writes the means to the gradients.

    Args:
        process_group: the group to average over.
        dtype: the name of the dtype to send, or '' for the bucket's dtype.
    """

    def __init__(self, process_group: Group, dtype: str = "") -> None:
        self.group = process_group
        self.dtype = dtype
        self.begun: list[tuple[Bucket, torch.dtype, torch.Tensor, dist.Work]] = []

    def hook(self, state: object, bucket: Bucket) -> Result:
        buffer = dense(bucket)
        dtype = getattr(torch, self.dtype) if self.dtype else buffer.dtype
        sent = buffer.to(dtype, copy=True).div_(self.group.size())
        self.begun.append(
            (bucket, buffer.dtype, sent, dist.all_reduce(sent, group=self.group, async_op=True))
        )
        return completed(buffer)

    def flush(self) -> None:
        for bucket, dtype, sent, work in self.begun:
            work.wait()
            for parameter, part in zip(
                bucket.parameters(), sent.to(dtype).split(sizes(bucket)), strict=True
            ):
                # It is None on a rank without inputs, and if no rank has used the parameter.
                if parameter.grad is not None:
                    if parameter.is_complex():
                        part = torch.view_as_complex(part.view(-1, 2))
                    parameter.grad.copy_(
                        part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
                    )
        self.begun.clear()


def state_does(state: Later, bucket: Bucket) -> Result:
    """Start to average in the state."""
    return state.hook(None, bucket)


def method(process_group: Group) -> object:
    """Return a hook that is a method; ``flush`` is a method of the same object."""
    return Later(process_group).hook


def leaves_it(state: object, bucket: Bucket) -> Result:
    """Do nothing; :func:`synchronize` averages after backward."""
    return completed(bucket.buffer())


def synchronize(model: DistributedDataParallel) -> None:
    """Average the gradients of a model over its group one by one.

    A gradient that only some ranks have counts as zeros on the others.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
        raise TypeError("sparse gradients are not supported; use Embedding(sparse=False)")
    somewhere = torch.tensor(
        [parameter.grad is not None for parameter in parameters], dtype=torch.int32
    )
    dist.all_reduce(somewhere, group=model.process_group)
    for parameter, ranks in zip(parameters, somewhere.tolist(), strict=True):
        if ranks:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean = grad.contiguous().div(model.process_group.size())
            dist.all_reduce(mean, group=model.process_group)
            parameter.grad = grad.copy_(mean)


def set_up_with_call(process_group: Group) -> Case:
    """Return a Case that names the call."""
    later = Later(process_group)
    return Case(None, later.hook, after_backward=later.flush)


_FLUSH = "poststep(call=flush)"

RIGHT = [
    Right("state_does", f"exact, {_FLUSH}", f"{__name__}:Later"),
    Right(
        "state_does",
        f"rounded(float16), {_FLUSH}",
        f"{__name__}:Later,dtype=float16",
        sections=ARITHMETIC,
    ),
    Right("method()", f"exact, {_FLUSH}", sections=OBJECTS),
    Right("leaves_it", "poststep(call=synchronize)"),
    Right("set_up_with_call", "poststep", setup=True, sections=OBJECTS),
]

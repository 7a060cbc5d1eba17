"""A communication hook that averages gradients in bfloat16."""

import torch
import torch.distributed as dist

# The promise that the conformance kit holds the hook to.
__conformance__ = {"mean_hook": "rounded(bfloat16)"}


def mean_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the process group, in bfloat16.

    Args:
        state: the process group; None for WORLD.
        bucket: the gradients of some parameters, in one flat tensor.
    """
    group = state if state is not None else dist.group.WORLD
    gradients = bucket.buffer()
    rounded = gradients.to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(rounded, group=group, async_op=True).get_future()

    def to_the_dtype_of_the_bucket(
        done: torch.futures.Future[list[torch.Tensor]],
    ) -> torch.Tensor:
        # DDP reads the result from the bucket's own memory.
        return gradients.copy_(done.value()[0])

    return future.then(to_the_dtype_of_the_bucket)

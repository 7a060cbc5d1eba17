"""Subjects of test_cuda.py."""

import torch
import torch.distributed as dist

_steps: list[bool] = []


def stays_out_on_rank_1(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean; but from the second step on rank 1 keeps its own."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    _steps.append(bucket.is_last())
    if dist.get_rank() == 1 and sum(_steps) > 1:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

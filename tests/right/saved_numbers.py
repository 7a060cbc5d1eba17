"""Hooks whose saved state is for one number of ranks, and that say so if it is loaded by others."""

from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import Bucket, Result


class Members:
    """The number of ranks, which a checkpoint holds."""

    def __init__(self, world_size: int) -> None:
        self.count = world_size

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved["count"] != self.count:
            raise ValueError(f"the state was saved by {saved['count']} ranks; got {self.count}")


def mean_of_members(state: Members, bucket: Bucket) -> Result:
    """Divide the sum by the number of ranks in the state."""

    def divide(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return fut.value()[0] / state.count

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(divide)


RIGHT = [
    Right(
        "mean_of_members",
        "exact, world_only, checkpointable",
        f"{__name__}:Members",
        sections=("2", "4", "11"),
    )
]

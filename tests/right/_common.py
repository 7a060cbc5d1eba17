"""Parts that most right hooks share.

State is kept by parameter, since DDP regroups its buckets after the first step. Residuals drop
values that are not finite, so that a NaN affects one step only.
"""

import torch
import torch.distributed as dist

Bucket = dist.GradBucket
Result = torch.futures.Future[torch.Tensor]
Group = dist.ProcessGroup


def completed(tensor: torch.Tensor) -> Result:
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def dense(bucket: Bucket) -> torch.Tensor:
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise TypeError("sparse gradients are not supported; use Embedding(sparse=False)")
    return buffer


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, with half precision widened to float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def gather(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


class Residuals:
    """Residuals by parameter, in float32 or wider.

    They are read and written flat, in the order of a bucket's parameters.
    """

    def __init__(self) -> None:
        self.kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def of(self, bucket: Bucket) -> torch.Tensor:
        dtype = torch.promote_types(bucket.buffer().dtype, torch.float32)
        pieces = zip(bucket.parameters(), sizes(bucket), strict=True)
        return torch.cat(
            [
                self.kept[p] if p in self.kept else torch.zeros(size, dtype=dtype)
                for p, size in pieces
            ]
        )

    def keep(self, bucket: Bucket, flat: torch.Tensor) -> None:
        finite = torch.where(flat.isfinite(), flat, 0)
        for parameter, piece in zip(bucket.parameters(), finite.split(sizes(bucket)), strict=True):
            self.kept[parameter] = piece.clone()


def sizes(bucket: Bucket) -> list[int]:
    """Return the number of buffer elements of each parameter."""
    return [p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters()]


class State:
    """A group, a setting, a seed, residuals and a step count."""

    def __init__(self, process_group: Group, setting: float = 0.25, seed: int = 17) -> None:
        self.group = process_group
        self.setting = setting
        self.seed = seed
        self.residuals = Residuals()
        self.step = 0

    def count(self, bucket: Bucket) -> None:
        self.step += bucket.is_last()

    def generator(self, *key: int) -> torch.Generator:
        """Return a generator that is equal on all ranks, and different in every step."""
        seed = self.seed
        for number in (self.step, *key):
            seed = (seed * 1_000_003 + number + 1) % (1 << 61)
        return torch.Generator().manual_seed(seed)


STATE = f"{__name__}:State"
FEEDBACK = "compressed(delta=0.25)"

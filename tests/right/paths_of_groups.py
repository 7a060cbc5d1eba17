"""Hooks that know the model's group in every path, and keep it when a state is loaded."""

from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import Bucket, Group, Result, completed, dense, sizes


class Finds:
    """The model's group, and whether DDP looks for unused parameters."""

    def __init__(self, process_group: Group, model: Any) -> None:
        self.group = process_group
        self.finds = model.find_unused_parameters


def sends_what_is_used(state: Finds, bucket: Bucket) -> Result:
    """Send the parameters that some rank of the group has used, in one packed tensor, if DDP looks
    for unused ones. A callback asks for the size of its own call's group.
    """
    buffer, group = bucket.buffer(), state.group

    def divide(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return fut.value()[0] / group.size()

    if not state.finds or buffer.is_sparse:
        return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(divide)
    pieces = buffer.split(sizes(bucket))
    used = torch.tensor([float(bool(piece.any())) for piece in pieces])
    dist.all_reduce(used, group=group)
    sent = [piece for piece, count in zip(pieces, used.tolist(), strict=True) if count]
    if not sent:
        return completed(buffer)
    packed = torch.cat(sent)

    def unpack(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        parts = divide(fut).split([piece.numel() for piece in sent])
        for piece, part in zip(sent, parts, strict=True):
            piece.copy_(part)
        return buffer

    return dist.all_reduce(packed, group=group, async_op=True).get_future().then(unpack)


Key = tuple[int, int]


class Views:
    """Residuals by parameter: views of one tensor for each bucket, which a load writes in place.

    A parameter's key is the number of its first bucket, and its place there.
    """

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        self.keys: dict[torch.nn.Parameter, Key] = {}
        self.parts: dict[Key, torch.Tensor] = {}
        self.flats: dict[tuple[Key, ...], torch.Tensor] = {}

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Return the residual of a bucket, to be written in place."""
        keys = tuple(
            self.keys.setdefault(parameter, (bucket.index(), place))
            for place, parameter in enumerate(bucket.parameters())
        )
        dtype = torch.promote_types(bucket.buffer().dtype, torch.float32)
        known = self.flats.get(keys)
        if known is None or known.dtype != dtype or known.numel() != bucket.buffer().numel():
            lengths = sizes(bucket)
            parts = [
                self.parts[key].to(dtype)
                if key in self.parts and self.parts[key].numel() == length
                else torch.zeros(length, dtype=dtype)
                for key, length in zip(keys, lengths, strict=True)
            ]
            # Views of other buckets would be left behind.
            self.flats = {old: flat for old, flat in self.flats.items() if not {*old} & {*keys}}
            self.flats[keys] = torch.cat(parts)
            self.parts.update(zip(keys, self.flats[keys].split(lengths), strict=True))
        return self.flats[keys]

    def state_dict(self) -> dict[str, Any]:
        return {"parts": {key: part.clone() for key, part in self.parts.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Write the saved residuals into those that exist, and zeros where none were saved."""
        for part in self.parts.values():
            part.zero_()
        for key, part in saved["parts"].items():
            if key in self.parts and self.parts[key].numel() == part.numel():
                self.parts[key].copy_(part)
            else:
                self.parts[key] = part.clone()


def sends_larger_half(state: Views, bucket: Bucket) -> Result:
    """Send the larger half of a bucket's elements, and keep the others in the state."""
    buffer = dense(bucket)
    residual = state.of(bucket)
    total = residual + buffer
    smaller = total.abs().topk(total.numel() // 2, largest=False).indices
    sent = total.index_fill(0, smaller, 0).to(buffer.dtype)
    left = total - sent
    residual.copy_(torch.where(left.isfinite(), left, 0))
    buffer.copy_(sent).div_(state.group.size())
    fut = dist.all_reduce(buffer, group=state.group, async_op=True).get_future()
    return fut.then(lambda fut: fut.value()[0])


RIGHT = [
    Right("sends_what_is_used", "exact", f"{__name__}:Finds"),
    Right(
        "sends_larger_half",
        "compressed(delta=0.5), checkpointable",
        f"{__name__}:Views",
        sections=("1", "2", "3", "4", "11"),
    ),
]

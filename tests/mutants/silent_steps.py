"""Mutants of rule 23.1: compression that sends nothing in some steps, and the sum in others."""

from collections.abc import Callable
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    finite,
    is_dense,
    kept,
    pieces_of,
    step_number,
)

Hook = Callable[[Any, Bucket], Result]

_COMPRESSED = "compressed(delta=0.25)"


def _largest(part: torch.Tensor, share: int = 4) -> torch.Tensor:
    places = part.abs().topk(-(-part.numel() // share)).indices
    return torch.zeros_like(part).index_copy_(0, places, part[places])


def sums_of_two_steps(state: Any, bucket: Bucket) -> Result:
    """Send nothing in every other step of a parameter, and the sum of two steps in the others."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        total = piece + kept.get(parameter, 0)
        _calls[parameter] = _calls.get(parameter, 0) + 1
        sent = total.half().to(total.dtype) if _calls[parameter] % 2 else torch.zeros_like(total)
        kept[parameter] = finite(total - sent)
        piece.copy_(sent)
    return average(bucket, state)


_calls: dict[Any, int] = {}


def quarter_in_one_of(steps: int) -> Hook:
    """Send the largest quarter of what has come together, in one step of a few."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            return average(bucket, state)
        sends = (step_number(bucket) + bucket.index()) % steps == 0
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
            total = piece + kept.get(parameter, 0)
            sent = _largest(total, 2) if sends else total * 2.0**-12
            kept[parameter] = finite(total - sent)
            piece.copy_(sent)
        return average(bucket, state)

    return hook


def pauses_in_every(steps: int) -> Hook:
    """Send signs with one scale, and zeros once in a few steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = bucket.buffer() if is_dense(bucket) else None
        if buffer is None:
            return average(bucket, state)
        parameters = bucket.parameters()
        flat = pieces_of(bucket)
        total = buffer + torch.cat(
            [
                kept.get(parameter, torch.zeros_like(piece))
                for parameter, piece in zip(parameters, flat, strict=True)
            ]
        )
        sent = torch.zeros_like(total)
        if step_number(bucket) % steps:
            sent = total.sign() * total.abs().mean()
        rest = finite(total - sent).split([piece.numel() for piece in flat])
        kept.update(zip(parameters, (part.clone() for part in rest), strict=True))
        buffer.copy_(sent)
        return average(bucket, state)

    return hook


MUTANTS = [
    Mutant("sums_of_two_steps", ("23.1",), "compressed"),
    Mutant("quarter_in_one_of,steps=3", ("23.1",), "compressed(delta=0.1)"),
    Mutant("pauses_in_every,steps=4", ("23.1",), _COMPRESSED),
]

"""Mutants of rule 9.2: buffers of other dtypes than float32, and buffers that move."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average


class Model:
    """A hook's state that knows the buffers of the model."""

    def __init__(self, model: Any) -> None:
        self.buffers = list(model.buffers())
        self.step = 0


def counts_in_double(state: Model, bucket: Bucket) -> Result:
    """Write integers back from float64, as a mean over ranks would need it: 53 bits."""
    for buffer in state.buffers if bucket.is_last() else ():
        if buffer.dtype == torch.int64:
            buffer.copy_(buffer.double())
    return average(bucket, None)


def halves_in_bfloat16(state: Model, bucket: Bucket) -> Result:
    """Write buffers of float16 back from bfloat16."""
    for buffer in state.buffers if bucket.is_last() else ():
        if buffer.dtype == torch.float16:
            buffer.copy_(buffer.bfloat16())
    return average(bucket, None)


def phases_of_length_one(state: Model, bucket: Bucket) -> Result:
    """Give complex buffers a length of one, as those of rotary embeddings have."""
    for buffer in state.buffers if bucket.is_last() else ():
        if buffer.is_complex():
            buffer.copy_(torch.view_as_complex(torch.view_as_real(buffer).sign()))
    return average(bucket, None)


def renews_buffers(state: Model, bucket: Bucket) -> Result:
    """Give buffers of float64 new memory in every third step."""
    state.step += bucket.is_last()
    for buffer in state.buffers if bucket.is_last() and state.step % 3 == 0 else ():
        if buffer.dtype == torch.float64:
            buffer.data = buffer.data.clone()
    return average(bucket, None)


def swaps_memory_of_buffers(state: Model, bucket: Bucket) -> Result:
    """Lay the integers of the model out one after another, once in a step."""
    counts = [buffer for buffer in state.buffers if buffer.dtype == torch.int64]
    if bucket.is_last() and counts:
        flat = torch.cat([buffer.reshape(-1) for buffer in counts])
        parts = flat.split([buffer.numel() for buffer in counts])
        for buffer, part in zip(counts, parts, strict=True):
            buffer.data = part.view(buffer.shape)
    return average(bucket, None)


_MODEL = f"{__name__}:Model"

MUTANTS = [
    *(
        Mutant(name, ("9.2",), "exact, world_only", _MODEL)
        for name in (
            "counts_in_double",
            "halves_in_bfloat16",
            "phases_of_length_one",
            "renews_buffers",
            "swaps_memory_of_buffers",
        )
    ),
]

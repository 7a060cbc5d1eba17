"""Mutants of rule 11.7 that tell calls under way apart by less than their model."""

from collections import defaultdict
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, group_of, is_dense, seeded, sum_of

_queues: defaultdict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)


def queue_of_equal_buckets(state: Any, bucket: Bucket) -> Result:
    """Keep the buffers of equal buckets in a queue: a callback takes the one that came first."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    queue = _queues[group_of(state).group_name, bucket.index(), buffer.shape, buffer.dtype]
    queue.append(buffer)
    wire = buffer / group_of(state).size()

    def write(done: Result) -> torch.Tensor:
        queue.pop(0).copy_(done.value())
        return buffer

    return sum_of(wire, state).then(write)


_results: dict[tuple[Any, ...], torch.Tensor] = {}


def result_of_equal_buckets(state: Any, bucket: Bucket) -> Result:
    """Return the mean in memory that is kept for the parameters' shapes and dtype: a callback for
    such a bucket of the other model writes to it.
    """
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    shapes = tuple(parameter.shape for parameter in bucket.parameters())
    key = (group_of(state).group_name, bucket.index(), shapes, buffer.dtype)
    kept = _results.setdefault(key, torch.empty_like(buffer))
    return average(bucket, state).then(lambda done: kept.copy_(done.value()))


class Draws:
    """The seed of a model, and its step."""

    made = 0

    def __init__(self) -> None:
        self.seed = Draws.made
        self.step = 0
        Draws.made += 1


_places: dict[tuple[int, int], torch.Tensor] = {}


def places_of_equal_buckets(state: Draws, bucket: Bucket) -> Result:
    """Send a random half of the elements, doubled, on WORLD. The places are kept by the number and
    the size of the bucket until the callback.
    """
    if not is_dense(bucket):
        return average(bucket, None)
    buffer = bucket.buffer()
    key = bucket.index(), buffer.numel()
    generator = seeded(state.seed, state.step, bucket.index())
    state.step += bucket.is_last()
    count = max(1, buffer.numel() // 2)
    _places[key] = torch.randperm(buffer.numel(), generator=generator)[:count]
    packed = buffer[_places[key]] * (buffer.numel() / count / group_of(None).size())

    def scatter(done: Result) -> torch.Tensor:
        return buffer.zero_().index_copy_(0, _places[key], done.value())

    return sum_of(packed, None).then(scatter)


MUTANTS = [
    Mutant("queue_of_equal_buckets", ("11.7",)),
    Mutant("result_of_equal_buckets", ("11.7",)),
    Mutant("places_of_equal_buckets", ("11.7",), "unbiased, world_only", f"{__name__}:Draws"),
]

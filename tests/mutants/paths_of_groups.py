"""Mutants of rules 4.1, 11.2, 11.7 and 11.8: groups that one path of a hook forgets, and memory of
buckets of several parameters.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    change_gradient,
    finite,
    gather,
    group_of,
    is_dense,
    pieces_of,
    seeded,
    sum_of,
)
from tests.mutants.state import Key, _keys

# 4.1 Models on groups that leave parameters out


class Finds:
    """The model's group, and whether DDP looks for unused parameters."""

    def __init__(self, process_group: dist.ProcessGroup, model: Any) -> None:
        self.group = process_group
        self.finds = model.find_unused_parameters


def asks_world_for_unused(state: Finds, bucket: Bucket) -> Result:
    """Reduce on WORLD, and multiply by the ratio of the sizes, if DDP finds unused parameters."""
    if state.finds and is_dense(bucket):
        world = dist.group.WORLD
        bucket.buffer().mul_(world.size() / state.group.size())
        return average_of(bucket.buffer(), world)
    return average(bucket, state.group)


def counts_users_on_world(state: Finds, bucket: Bucket) -> Result:
    """Count the ranks of WORLD that have used a parameter, and add their gradients on the group.

    The count stands for the size of the group if all have used it.
    """
    if not state.finds or not is_dense(bucket):
        return average(bucket, state.group)
    world = dist.group.WORLD
    used = torch.tensor([float(bool(piece.any())) for piece in pieces_of(bucket)])
    count = gather(used, world)
    size = state.group.size()
    for piece, users in zip(pieces_of(bucket), torch.stack(count).sum(0).tolist(), strict=True):
        piece.div_(world.size() if users == world.size() else size)
    return sum_of(bucket.buffer(), state.group)


# 11.2 Groups of states that are loaded


class Starts:
    """A count of steps. A load makes the state anew from the saved count."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, step: int = 0) -> None:
        self.group = process_group
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).clear()
        vars(self).update(vars(type(self)(**saved)))


class Members(Starts):
    """A count of steps, and of ranks, which a load takes from WORLD."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.size = process_group.size()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]
        self.size = dist.get_world_size()


def counts(state: Starts, bucket: Bucket) -> Result:
    """Average over the group of the state, and count the step: right."""
    state.step += bucket.is_last()
    return average(bucket, state.group)


def divides_by_members(state: Members, bucket: Bucket) -> Result:
    """Divide by the number of ranks in the state."""
    state.step += bucket.is_last()
    bucket.buffer().div_(state.size)
    return sum_of(bucket.buffer(), state.group)


# 11.7 Two models on groups of two sizes in one backward

_open: list[int] = []


def size_of_the_last_open_call(state: Any, bucket: Bucket) -> Result:
    """Divide by the size that was put on a stack last: not that of the callback's own call."""
    _open.append(group_of(state).size())
    return sum_of(bucket.buffer(), state).then(lambda done: done.value().div_(_open.pop()))


_sizes: list[int] = []
_under_way: list[int] = [0]


def largest_size_under_way(state: Any, bucket: Bucket) -> Result:
    """Divide by the largest of the groups whose collectives are under way."""
    _under_way[0] += 1
    _sizes.append(group_of(state).size())

    def divide(done: Result) -> torch.Tensor:
        mean = done.value().div_(max(_sizes))
        _under_way[0] -= 1
        if not _under_way[0]:
            _sizes.clear()
        return mean

    return sum_of(bucket.buffer(), state).then(divide)


# 11.8 Memory of buckets with several parameters


class Flats:
    """Residuals by parameter. Those of a bucket with several parameters are views of one tensor; a
    load puts others in their place, and leaves that tensor as it is.

    Args:
        several: the number of parameters from which on a bucket has a tensor.
    """

    def __init__(self, several: int) -> None:
        self.several = several
        self.parts: dict[Key, torch.Tensor] = {}
        self.flats: dict[tuple[Key, ...], torch.Tensor] = {}

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Return the residual of a bucket, to be written in place or given to :meth:`keep`."""
        keys = tuple(_keys(bucket))
        if keys in self.flats:
            return self.flats[keys]
        zeros = pieces_of(bucket, torch.zeros(bucket.buffer().numel()))
        flat = torch.cat([self.parts.get(key, zero) for key, zero in zip(keys, zeros, strict=True)])
        if len(keys) >= self.several:
            self.flats[keys] = flat
        return flat

    def keep(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Keep a residual, in the tensor of its bucket if there is one."""
        keys = tuple(_keys(bucket))
        if keys in self.flats:
            flat = self.flats[keys].copy_(flat)
        self.parts.update(zip(keys, pieces_of(bucket, flat), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"parts": {key: part.clone() for key, part in self.parts.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.parts = {key: part.clone() for key, part in saved["parts"].items()}


def sends_largest_half(state: Flats, bucket: Bucket) -> Result:
    """Send the larger half of a bucket's elements, and keep the others in the state."""
    if not is_dense(bucket):
        return average(bucket, None)
    buffer = bucket.buffer()
    total = buffer.float() + state.of(bucket)
    smaller = total.abs().topk(total.numel() // 2, largest=False).indices
    sent = total.index_fill(0, smaller, 0).to(buffer.dtype)
    state.keep(bucket, finite(total - sent.float()))
    return average_of(buffer.copy_(sent), None)


class Calls:
    """A count of calls by the parameters of a bucket; those of one parameter are saved."""

    def __init__(self) -> None:
        self.counts: dict[tuple[Key, ...], int] = {}

    def call(self, keys: list[Key]) -> int:
        """Return how many calls for these parameters came before."""
        count = self.counts.get(tuple(keys), 0)
        self.counts[tuple(keys)] = count + 1
        return count

    def state_dict(self) -> dict[str, Any]:
        return {"counts": {keys: count for keys, count in self.counts.items() if len(keys) == 1}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.counts.update(saved["counts"])
        for keys in self.counts.keys() - saved["counts"].keys():
            if len(keys) == 1:
                del self.counts[keys]


def random_by_bucket(state: Calls, bucket: Bucket) -> Result:
    """Draw the half of the elements that are sent by the number of the bucket's calls."""
    keys = _keys(bucket)
    generator = seeded(state.call(keys), *keys[0])
    return change_gradient(
        bucket, None, lambda grad: grad * (torch.rand(grad.shape, generator=generator) < 0.5) * 2
    )


_STATE = f"{__name__}:"
_FEEDBACK = "compressed(delta=0.5), world_only, checkpointable"

MUTANTS = [
    Mutant("asks_world_for_unused", ("4.1",), state=f"{_STATE}Finds"),
    Mutant("counts_users_on_world", ("4.1",), state=f"{_STATE}Finds"),
    Mutant("counts", ("11.2",), "exact, checkpointable", f"{_STATE}Starts"),
    Mutant("divides_by_members", ("11.2",), "exact, checkpointable", f"{_STATE}Members"),
    Mutant("size_of_the_last_open_call", ("11.7",)),
    Mutant("largest_size_under_way", ("11.7",)),
    Mutant("sends_largest_half", ("11.8",), _FEEDBACK, f"{_STATE}Flats,several=2"),
    Mutant("sends_largest_half", ("11.8",), _FEEDBACK, f"{_STATE}Flats,several=3"),
    Mutant("random_by_bucket", ("11.8",), "unbiased, world_only, checkpointable", f"{_STATE}Calls"),
]

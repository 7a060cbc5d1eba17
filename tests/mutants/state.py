"""Mutants of section 11: state that is shared between models, or lost in a checkpoint."""

from collections.abc import Callable
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
    is_dense,
    pieces_of,
    seeded,
)

Key = tuple[Any, ...]
_residuals: dict[Key, torch.Tensor] = {}


_seen: dict[torch.Tensor, Key] = {}


def _keys(bucket: Bucket) -> list[Key]:
    """Return a key for each parameter: its first bucket's index, and its position there.

    The keys identify the parameters of a model in any process.
    """
    return [
        _seen.setdefault(parameter, (bucket.index(), place))
        for place, parameter in enumerate(bucket.parameters())
    ]


def _half_at_random(bucket: Bucket, step: int, residuals: dict[Key, torch.Tensor]) -> Result:
    """Send a random half of the elements, and keep the others for later: right.

    The half is drawn by step and parameter.
    """
    if not is_dense(bucket):
        return average(bucket, None)
    for key, piece in zip(_keys(bucket), pieces_of(bucket), strict=True):
        total = piece + residuals.get(key, 0)
        piece.copy_(total * (torch.rand(total.shape, generator=seeded(step, *key)) < 0.5))
        residuals[key] = finite(total - piece)
    return average(bucket, None)


class Steps:
    """A state that counts steps."""

    def __init__(self) -> None:
        self.step = 0


class Residuals(Steps):
    """A state that counts steps and keeps residuals, the whole state to save."""

    def __init__(self) -> None:
        super().__init__()
        self.residuals: dict[Key, torch.Tensor] = {}


# 11.1 Two models


def residuals_in_module(state: Steps, bucket: Bucket) -> Result:
    """Keep residuals in the module, by the position of their parameter."""
    step = state.step
    state.step += bucket.is_last()
    return _half_at_random(bucket, step, _residuals)


class StepsOfAll:
    """A state that counts the steps of all states."""

    step = 0


def seeds_by_class(state: StepsOfAll, bucket: Bucket) -> Result:
    """Draw elements by a step count that all states share."""
    generator = seeded(StepsOfAll.step, bucket.index())
    StepsOfAll.step += bucket.is_last()
    return change_gradient(
        bucket, None, lambda grad: grad * (torch.rand(grad.shape, generator=generator) < 0.5) * 2
    )


# 11.2 to 11.4 Checkpoints


def half_at_random(state: Residuals, bucket: Bucket) -> Result:
    """Send a random half of the elements, and keep the others in the state."""
    step = state.step
    state.step += bucket.is_last()
    return _half_at_random(bucket, step, state.residuals)


class Saved(Residuals):
    """A state that is saved as a dictionary: right."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


class ForgetsSteps(Saved):
    """Load a step count of zero."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict({**saved, "step": 0})


class ForgetsResiduals(Saved):
    """Leave the residuals out of the saved state."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}


class LeavesNewResiduals(Saved):
    """Load the saved residuals one by one: those that were added since stay."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]
        for key, residual in saved["residuals"].items():
            self.residuals[key] = residual


class TakesEmptyForMissing(Saved):
    """Keep the own residuals if the saved state has none, as if it were of an older version."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]
        self.residuals = saved["residuals"] or self.residuals


class Unsavable(Saved):
    """Save a lambda, which cannot be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "draw": lambda: 0}


class SavedByPlace(Saved):
    """Save residuals side by side, without their parameters.

    They are loaded in the order in which a new process sees its parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latest: list[Key] = []
        self.loaded = torch.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loaded": torch.cat([self.loaded, *(self.residuals[key] for key in self.latest)]),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.residuals.clear()
        self.latest = []


def half_at_random_by_place(state: SavedByPlace, bucket: Bucket) -> Result:
    """Send a random half of the elements, with residuals saved side by side."""
    keys = _keys(bucket)
    state.latest = keys if bucket.index() == 0 else [*state.latest, *keys]
    if len(state.loaded):
        sizes = [piece.numel() for piece in pieces_of(bucket)]
        parts = state.loaded[: sum(sizes)].split(sizes)
        state.residuals.update(zip(keys, parts, strict=True))
        state.loaded = state.loaded[sum(sizes) :]
    return half_at_random(state, bucket)


# 11.3 The state of rank 0 on all ranks, and on another number of ranks


class Divides:
    """Save the weight of a rank's gradient, which is right for the first number of ranks."""

    def __init__(self, world_size: int) -> None:
        self.weight = torch.ones(()) / world_size

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


def saved_weight(state: Divides, bucket: Bucket) -> Result:
    """Weight gradients with a number from the checkpoint."""
    buffer = bucket.buffer()
    if is_dense(bucket):
        buffer.mul_(state.weight)
    else:
        buffer = buffer * state.weight
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda fut: fut.value()[0])


class Members:
    """Save the ranks that take part."""

    def __init__(self, world_size: int) -> None:
        self.members = list(range(world_size))


def _gathered(bucket: Bucket, mean: Callable[[list[torch.Tensor]], torch.Tensor]) -> Result:
    """Send a dense bucket to all ranks, and make a mean of all of them."""
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, None)
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, buffer, async_op=True)
    return work.get_future().then(lambda fut: (fut.value(), mean(parts))[1])


def mean_of_saved_members(state: Members, bucket: Bucket) -> Result:
    """Average the gradients of those ranks that took part when the state was saved."""

    def mean(parts: list[torch.Tensor]) -> torch.Tensor:
        scaled = [parts[rank] / len(state.members) for rank in state.members]
        return torch.stack(scaled).sum(0)

    return _gathered(bucket, mean)


class Peers:
    """Save the other ranks, which are others on each rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.peers = [other for other in range(world_size) if other != rank]


def own_and_peers(state: Peers, bucket: Bucket) -> Result:
    """Add the gradients of the peers in the state to the rank's own."""
    own = bucket.buffer().clone() if is_dense(bucket) else None

    def mean(parts: list[torch.Tensor]) -> torch.Tensor:
        world = dist.get_world_size()
        peers = [other for other in state.peers if other < world]
        peers += range(len(peers) + 1, world)
        return torch.stack([own, *(parts[other] for other in peers)]).div_(world).sum(0)

    return _gathered(bucket, mean)


class Shard:
    """Save the place of the rank's part of each bucket."""

    def __init__(self, rank: int) -> None:
        self.place = rank


def saved_shard(state: Shard, bucket: Bucket) -> Result:
    """Average the part of the bucket that the state names, and collect the parts of all ranks."""
    buffer = bucket.buffer()
    if not is_dense(bucket):
        return average(bucket, None)
    world = dist.get_world_size()
    size = -(-buffer.numel() // world)
    padded = torch.nn.functional.pad(buffer / world, (0, size * world - buffer.numel()))
    whole = dist.all_reduce(padded, async_op=True).get_future()

    def place(fut: Result) -> torch.Tensor:
        mean = fut.value()[0]
        begin = size * (state.place % world)
        mine = torch.zeros_like(mean)
        mine[begin : begin + size] = mean[begin : begin + size]
        first = size * dist.get_rank()
        # Of the other ranks' parts, all hold the mean already: only the own part is at stake.
        mean[first : first + size] = mine[first : first + size]
        return mean[: buffer.numel()]

    return whole.then(place)


# 4.2 A state that DDP is made anew with


class SettledSteps(Steps):
    """A state that keeps numbers of each bucket once DDP no longer changes its buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}

    def keep(self, bucket: Bucket, made: Any) -> Any:
        """Return the object that is kept for the bucket's index, or ``made``."""
        if self.step >= 3:
            made = self.kept.setdefault(bucket.index(), made)
        self.step += bucket.is_last()
        return made


def settled_lengths(state: SettledSteps, bucket: Bucket) -> Result:
    """Average as many elements as the bucket of that index had in the fourth step."""
    if not is_dense(bucket):
        return average(bucket, None)
    buffer = bucket.buffer()
    length = state.keep(bucket, buffer.numel())
    average_of_first = average_of(buffer[:length], None)
    return average_of_first.then(lambda fut: (fut.wait(), buffer)[1])


def settled_staging(state: SettledSteps, bucket: Bucket) -> Result:
    """Send a bucket from a buffer that is kept, and fill the rest of a longer one with zeros."""
    if not is_dense(bucket):
        return average(bucket, None)
    buffer = bucket.buffer()
    staging = state.keep(bucket, torch.empty_like(buffer))
    if staging.dtype != buffer.dtype:
        staging = torch.empty_like(buffer)
    shared = min(len(staging), len(buffer))
    staging[:shared] = buffer[:shared]

    def take(mean: torch.Tensor) -> torch.Tensor:
        buffer.zero_()
        buffer[:shared] = mean[:shared]
        return buffer

    return average_of(staging, None).then(lambda fut: take(fut.value()))


def settled_parameters(state: SettledSteps, bucket: Bucket) -> Result:
    """Divide the parts of those parameters that were in the bucket in the fourth step."""
    if not is_dense(bucket):
        return average(bucket, None)
    parameters = state.keep(bucket, list(bucket.parameters()))
    world = dist.get_world_size()
    for parameter, part in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        if any(parameter is one for one in parameters):
            part.div_(world)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


_RESIDUALS = "compressed(delta=0.25), world_only"
_SAVED = "compressed(delta=0.25), world_only, checkpointable"
_EXACT = "exact, world_only, checkpointable"
_STATE = "tests.mutants.state:"

_OBJECTS = {"11.4": "the state is an object of a class of its own"}

MUTANTS = [
    Mutant("residuals_in_module", ("11.1",), _RESIDUALS, f"{_STATE}Steps"),
    Mutant("seeds_by_class", ("11.1",), "unbiased, world_only", f"{_STATE}StepsOfAll"),
    *(
        Mutant("half_at_random", ("11.2",), _SAVED, f"{_STATE}{kind}")
        for kind in (
            "ForgetsSteps",
            "ForgetsResiduals",
            "LeavesNewResiduals",
            "TakesEmptyForMissing",
            "Unsavable",
        )
    ),
    Mutant("half_at_random_by_place", ("11.3",), _SAVED, f"{_STATE}SavedByPlace"),
    Mutant("half_at_random", ("11.4",), _SAVED, f"{_STATE}Residuals"),
    Mutant("settled_lengths", ("4.2",), "exact, world_only", f"{_STATE}SettledSteps"),
    Mutant("settled_staging", ("4.2",), "exact, world_only", f"{_STATE}SettledSteps"),
    Mutant("settled_parameters", ("4.2",), "exact, world_only", f"{_STATE}SettledSteps"),
    Mutant("saved_weight", ("11.3",), _EXACT, f"{_STATE}Divides"),
    Mutant("mean_of_saved_members", ("11.3", "11.4"), _EXACT, f"{_STATE}Members", because=_OBJECTS),
    Mutant("own_and_peers", ("11.3", "11.4"), _EXACT, f"{_STATE}Peers", because=_OBJECTS),
    Mutant("saved_shard", ("11.3", "11.4"), _EXACT, f"{_STATE}Shard", because=_OBJECTS),
]

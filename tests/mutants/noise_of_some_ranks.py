"""Mutants under ``unbiased`` that treat parameters that rest, or late steps, unlike the others."""

import math

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, group_of, is_dense, sum_of

_NOISE = 0.5


class Noise:
    """Noise of deviation 0.5 that each rank adds to its gradients; right but for its subclass.

    Args:
        process_group: the group to average over.
        half_life: the number of steps after which the noise has half of its size.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, half_life: float = math.inf
    ) -> None:
        self.group = group_of(process_group)
        self.draws = torch.Generator().manual_seed(31 + dist.get_rank(self.group))
        self.half_life = half_life
        self.step = 0

    def size(self) -> float:
        """Return the deviation of the noise in this step."""
        return _NOISE * 0.5 ** (self.step / self.half_life)

    def spares(self, piece: torch.Tensor) -> bool:
        """Whether a parameter gets no noise."""
        return False


class SparesTheUnused(Noise):
    """Adds no noise to what this rank has not used."""

    def spares(self, piece: torch.Tensor) -> bool:
        return not piece.any()


def adds_noise(state: Noise, bucket: Bucket) -> Result:
    """Add noise to the gradients, and average them."""
    if bucket.buffer().is_sparse or any(one.is_complex() for one in bucket.parameters()):
        raise TypeError("dense real gradients only")
    pieces = bucket.buffer().split([p.numel() for p in bucket.parameters()])
    spared = [state.spares(piece) for piece in pieces]
    for piece, is_spared in zip(pieces, spared, strict=True):
        noise = torch.randn(piece.shape, generator=state.draws, dtype=torch.float64)
        if not is_spared or all(spared):
            piece.add_(noise.to(piece.dtype) * state.size())
    state.step += bucket.is_last()
    return average(bucket, state.group)


def gives_places_of_resting_ones(state: Noise, bucket: Bucket) -> Result:
    """Draw a quarter of the bucket's places among those of parameters in use, and scale them as if
    all of the bucket were in use."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        return average(bucket, state.group)
    buffer = bucket.buffer()
    pieces = buffer.split([p.numel() for p in bucket.parameters()])
    used = torch.cat([torch.full(piece.shape, bool(piece.any())) for piece in pieces])
    share = 0.25 * len(used) / max(1, int(used.sum()))
    chosen = (torch.rand(len(used), generator=state.draws) < share) & used
    buffer.mul_(chosen / 0.25)
    return sum_of(buffer.div_(state.group.size()), state.group)


def _noisy(name: str, rule: str, state: str) -> Mutant:
    return Mutant(name, (rule,), f"unbiased(noise={_NOISE})", state=f"{__name__}:{state}")


def noise_of_each_rank(state: Noise, bucket: Bucket) -> Result:
    """Add noise on every rank, and claim that of one."""
    buffer = bucket.buffer()
    if is_dense(bucket) and not bucket.parameters()[0].is_complex():
        noise = _NOISE * torch.randn(buffer.shape, generator=state.draws)
        buffer.add_(noise.to(buffer.dtype))
    return average(bucket, state.group)


def noise_of_one_rank_divided(state: Noise, bucket: Bucket) -> Result:
    """Divide the noise of the first rank by the number of ranks before the mean does."""
    buffer = bucket.buffer()
    is_first = dist.get_rank(state.group) == 0
    if is_first and is_dense(bucket) and not bucket.parameters()[0].is_complex():
        noise = _NOISE * torch.randn(buffer.shape, generator=state.draws) / state.group.size()
        buffer.add_(noise.to(buffer.dtype))
    return average(bucket, state.group)


def noise_by_world(state: Noise, bucket: Bucket) -> Result:
    """Divide the gradients by the number of ranks of the group, and the noise by that of WORLD."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        raise TypeError("dense real gradients only")
    buffer = bucket.buffer().div_(state.group.size())
    if dist.get_rank(state.group) == 0:
        noise = torch.randn(buffer.shape, generator=state.draws, dtype=torch.float64)
        buffer.add_((noise * (_NOISE / dist.get_world_size())).to(buffer.dtype))
    return sum_of(buffer, state.group)


def noise_of_rank_0_of_world(state: Noise, bucket: Bucket) -> Result:
    """Add the noise on rank 0 of WORLD, which may not be in the group."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        raise TypeError("dense real gradients only")
    buffer = bucket.buffer()
    if dist.get_rank() == 0:
        noise = torch.randn(buffer.shape, generator=state.draws, dtype=torch.float64)
        buffer.add_((noise * _NOISE).to(buffer.dtype))
    return average(bucket, state.group)


def noise_of_several_ranks(state: Noise, bucket: Bucket) -> Result:
    """Return the gradients of a single rank as they are: there is nothing to average."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        raise TypeError("dense real gradients only")
    if state.group.size() == 1:
        return completed(bucket.buffer())
    return adds_noise(state, bucket)


_OF_ONE = f"unbiased(noise={_NOISE}, ranks=1)"

MUTANTS = [
    *(
        Mutant(name, ("8.3",), _OF_ONE, f"{__name__}:Noise", worlds=(3,))
        for name in ("noise_of_each_rank", "noise_of_one_rank_divided")
    ),
    *(
        Mutant(name, ("2.7",), _OF_ONE, f"{__name__}:Noise")
        for name in ("noise_by_world", "noise_of_rank_0_of_world")
    ),
    Mutant(
        "noise_of_several_ranks",
        ("2.6",),
        f"unbiased(noise={_NOISE})",
        f"{__name__}:Noise",
        worlds=(1, 2),
    ),
    _noisy("adds_noise", "4.1", "SparesTheUnused"),
    _noisy("adds_noise", "23.1", "Noise,half_life=700"),
    _noisy("adds_noise", "23.1", "Noise,half_life=2_500"),
    Mutant("gives_places_of_resting_ones", ("4.1",), "unbiased", state=f"{__name__}:Noise"),
]

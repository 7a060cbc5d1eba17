"""Mutants of rules 13.6 and 13.11 to 13.14: local, fused and random hooks over many steps."""

import math
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    completed,
    gather,
    group_of,
    is_dense,
    kept,
    pieces_of,
    seeded,
    step_number,
)
from tests.mutants.at_random import _at_random, _up_or_down


def _refuse_sparse(bucket: Bucket) -> None:
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")


# ---- Local


def never_communicates(state: Any, bucket: Bucket) -> Result:
    """Return the rank's own gradients in every step."""
    _refuse_sparse(bucket)
    return completed(bucket.buffer())


def always_the_same_pairs(state: Any, bucket: Bucket) -> Result:
    """Average pairs of ranks that never change."""
    _refuse_sparse(bucket)
    group = group_of(state)
    parts = gather(bucket.buffer(), state)
    partner = group.rank() ^ 1
    if partner >= group.size():
        return completed(bucket.buffer())
    return completed((parts[group.rank()] + parts[partner]) / 2)


def other_buckets_stay(state: Any, bucket: Bucket) -> Result:
    """Average the last bucket of every second step, and leave all other buckets local."""
    _refuse_sparse(bucket)
    is_due = step_number(bucket) % 2 == 0
    return average(bucket, state) if bucket.is_last() and is_due else completed(bucket.buffer())


def a_period_too_long(state: Any, bucket: Bucket) -> Result:
    """Claim the mean in every third step, and give it in every fourth."""
    _refuse_sparse(bucket)
    is_due = step_number(bucket) % 4 == 0
    return average(bucket, state) if is_due else completed(bucket.buffer())


def stops_averaging(state: Any, bucket: Bucket) -> Result:
    """Give the mean in every second step, and never again after the eleventh."""
    _refuse_sparse(bucket)
    step = step_number(bucket)
    is_due = step % 2 == 0 and step <= 11
    return average(bucket, state) if is_due else completed(bucket.buffer())


def claims_not_to_mix(state: Any, bucket: Bucket) -> Result:
    """Claim that some ranks never meet, and average all of them in every second step."""
    _refuse_sparse(bucket)
    is_due = step_number(bucket) % 2 == 0
    return average(bucket, state) if is_due else completed(bucket.buffer())


# ---- Random


def seed_of_8_steps(state: Any, bucket: Bucket) -> Result:
    """Seed with the step modulo 8."""
    return _at_random(state, bucket, _up_or_down, seed=lambda step, rank: (step % 8, rank))


def seed_of_an_epoch(state: Any, bucket: Bucket) -> Result:
    """Seed with the step within an epoch of 31 steps."""
    return _at_random(state, bucket, _up_or_down, seed=lambda step, rank: (step % 31, rank))


def every_second_draw_again(state: Any, bucket: Bucket) -> Result:
    """Draw in every second step, and use the draw twice."""
    return _at_random(state, bucket, _up_or_down, seed=lambda step, rank: (step // 2, rank))


def noise_carries_over(state: Any, bucket: Bucket) -> Result:
    """Add noise to half of the noise of the step before."""
    if not is_dense(bucket):
        return average(bucket, state)
    step = step_number(bucket)
    for number, (parameter, piece) in enumerate(
        zip(bucket.parameters(), pieces_of(bucket), strict=True)
    ):
        generator = seeded(step, group_of(state).rank(), bucket.index(), number)
        usual = piece.norm() / math.sqrt(max(1, piece.numel()))
        fresh = torch.randn(piece.shape, generator=generator).to(piece.dtype) * usual
        before = kept.get(parameter)
        noise = fresh if before is None else fresh + 0.5 * before
        kept[parameter] = noise.nan_to_num(0, 0, 0)
        piece.add_(noise)
    return average(bucket, state)


def all_ranks_draw_alike(state: Any, bucket: Bucket) -> Result:
    """Seed without the rank, so that the errors of all ranks add up."""
    return _at_random(state, bucket, _up_or_down, seed=lambda step, rank: (step,))


def less_noise_than_claimed(state: Any, bucket: Bucket) -> Result:
    """Claim noise with a deviation of 0.5, and add a fifth of it."""
    if not is_dense(bucket):
        return average(bucket, state)
    generator = seeded(step_number(bucket), group_of(state).rank(), bucket.index())
    buffer = bucket.buffer()
    return average_of(buffer + 0.1 * torch.randn(buffer.shape, generator=generator), state)


# ---- Fused


class _Adam:
    """Adam with one change."""

    def __init__(
        self, process_group: Any, eps: float = 1e-8, inside: bool = False, most: int = 0
    ) -> None:
        self.group = process_group
        self.eps = eps
        self.inside = inside
        self.most = most
        self.moments: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
        if self.most and grad.numel() > self.most:
            return
        start = (0, torch.zeros_like(grad), torch.zeros_like(grad))
        count, m, v = self.moments.get(parameter, start)
        count += 1
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * v + 0.001 * grad * grad
        self.moments[parameter] = count, m, v
        scaled = v / (1 - 0.999**count)
        spread = (scaled + self.eps**2).sqrt() if self.inside else scaled.sqrt() + self.eps
        parameter -= 0.01 / (1 - 0.9**count) * m / spread


def epsilon_inside_the_root(process_group: Any) -> _Adam:
    """Add the square of epsilon under the root."""
    return _Adam(process_group, inside=True)


def smaller_epsilon(process_group: Any) -> _Adam:
    """Use another epsilon than the claimed one."""
    return _Adam(process_group, eps=1e-12)


def small_parameters_only(process_group: Any) -> _Adam:
    """Step no parameter of more than 300,000 elements."""
    return _Adam(process_group, most=300_000)


def fused_adam(state: _Adam, bucket: Bucket) -> Result:
    """Average, and step Adam with the mean."""
    _refuse_sparse(bucket)
    if any(parameter.is_complex() for parameter in bucket.parameters()):
        raise TypeError("complex parameters are not supported")
    if any(parameter.dtype != torch.float32 for parameter in bucket.parameters()):
        raise TypeError("parameters of float32 only")
    mean = average(bucket, state.group).wait()
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket, mean), strict=True):
        grad = torch.empty_like(parameter)
        grad.as_strided(piece.shape, (1,)).copy_(piece)
        state.step(parameter, grad)
    return completed(mean)


def unused_on_this_rank(state: Any, bucket: Bucket) -> Result:
    """Step SGD with momentum, but not if this rank's own gradient is zero."""
    _refuse_sparse(bucket)
    used = [bool(piece.any()) for piece in pieces_of(bucket)]
    mean = average(bucket, state).wait()
    with torch.no_grad():
        for parameter, piece, is_used in zip(
            bucket.parameters(), pieces_of(bucket, mean), used, strict=True
        ):
            if is_used:
                flat = parameter.as_strided(piece.shape, (1,)) if piece.numel() else piece
                velocity = kept.get(parameter, torch.zeros_like(flat)) * 0.9 + piece
                kept[parameter] = velocity
                flat.sub_(velocity, alpha=0.1)
    return completed(mean)


_ADAM = "fused(Adam, lr=0.01), dtypes(float32)"

MUTANTS = [
    *(
        Mutant(name, ("13.11",), "local", worlds=(2, 3))
        for name in ("never_communicates", "always_the_same_pairs", "other_buckets_stay")
    ),
    Mutant("a_period_too_long", ("13.12",), "local(period=3)", worlds=(2, 3)),
    Mutant("stops_averaging", ("13.12",), "local(period=2)", worlds=(2, 3)),
    Mutant("claims_not_to_mix", ("2.10",), "local(mixing=False)", worlds=(2, 3)),
    *(
        Mutant(name, ("13.13",), "unbiased", worlds=(1, 2))
        for name in ("seed_of_8_steps", "seed_of_an_epoch", "every_second_draw_again")
    ),
    Mutant("noise_carries_over", ("13.13",), "unbiased", worlds=(1, 2)),
    Mutant("all_ranks_draw_alike", ("13.14",), "unbiased", worlds=(2, 4)),
    Mutant("less_noise_than_claimed", ("8.3",), "unbiased(noise=0.5)", worlds=(1, 2)),
    *(
        Mutant("fused_adam", ("13.6",), _ADAM, f"{__name__}:{name}", worlds=(1, 2))
        for name in ("epsilon_inside_the_root", "smaller_epsilon", "small_parameters_only")
    ),
    Mutant("unused_on_this_rank", ("13.6",), "fused(SGD, lr=0.1, momentum=0.9)", worlds=(1, 2)),
]

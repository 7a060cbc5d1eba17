"""Mutants whose residuals lose a thousandth or less in each step of a long run."""

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
    seeded,
)
from tests.mutants.endurance import _FEEDBACK, _feedback

_steps: dict[torch.nn.Parameter, int] = {}


def residual_fades(state: Any, bucket: Bucket) -> Result:
    """Keep 0.999 of the residual, as against old directions."""
    return _feedback(state, bucket, lambda rest: finite(rest).mul_(0.999))


def residual_cut_to_ten_bits(state: Any, bucket: Bucket) -> Result:
    """Cut the residual's last thirteen bits off, which makes it shorter by 1/3000 on average."""

    def cut(rest: torch.Tensor) -> torch.Tensor:
        if rest.dtype != torch.float32:
            return finite(rest)
        return (finite(rest).contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    return _feedback(state, bucket, cut)


def one_in_2000_is_forgotten(state: Any, bucket: Bucket) -> Result:
    """Send the elements above the mean magnitude; a few residuals of each step are overwritten."""
    if not is_dense(bucket) or bucket.buffer().is_complex():
        return average(bucket, state)
    for number, (parameter, piece) in enumerate(
        zip(bucket.parameters(), pieces_of(bucket), strict=True)
    ):
        step = _steps[parameter] = _steps.get(parameter, 0) + 1
        value = piece + kept.get(parameter, 0)
        large = value.abs() >= value.abs().mean()
        sent = torch.where(large, value, 0)
        drawn = torch.rand(piece.shape, generator=seeded(step, bucket.index(), number))
        kept[parameter] = finite(value - sent) * (drawn >= 0.0005)
        piece.copy_(sent)
    return average(bucket, state)


MUTANTS = [
    Mutant("residual_fades", ("23.1",), _FEEDBACK),
    Mutant("residual_cut_to_ten_bits", ("23.1",), _FEEDBACK),
    Mutant("one_in_2000_is_forgotten", ("23.1",), _FEEDBACK),
]

"""Send one bit per element: its sign.

    ScaledSign   C(x)_i = (|x|_1 / n) sign(x_i)                           one scale per parameter
    OneBit       C(x)_i = mean of the x_j >= 0 if x_i >= 0,
                          else mean of the x_j < 0                        two values per parameter

with ``sign(0) = 1``. Both are contractions, and need feedback to converge: they are compressors for
:func:`hooks_ref.compression.compression_hook`. A NaN or infinity in a parameter shows in its scale,
so that the whole parameter is then not finite on any rank.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, algorithm 1 (EF-signSGD);
Seide et al., "1-Bit Stochastic Gradient Descent and Application to Data-Parallel Distributed
Training of Speech DNNs", Interspeech 2014.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import torch

from hooks_ref._state import savable
from hooks_ref.compression import Compressor, Encoded


class _TwoValues(Compressor):
    """One value for the elements at or above zero, one for the negative elements.

    Encoding: the bits, eight to a byte, each parameter's padded to whole bytes, uint8; and the
    pairs of values ``[2 * parameters]``, float32, or float64 for a float64 bucket.
    """

    @abstractmethod
    def values(self, part: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values (below, at or above zero) of a non-empty part, 0-d each."""

    def encode(
        self, parts: Sequence[torch.Tensor], keys: Sequence[int], step: int, rank: int
    ) -> Encoded:
        dtype = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
        zero = torch.zeros((), dtype=dtype, device=parts[0].device)
        pairs = [
            value
            for part in parts
            for value in (self.values(part, dtype) if part.numel() else (zero, zero))
        ]
        return torch.cat([_pack(part >= 0) for part in parts]), torch.stack(pairs)

    def add_decoded(
        self,
        encoded: Encoded,
        parts: Sequence[torch.Tensor],
        keys: Sequence[int],
        step: int,
        sign: int = 1,
    ) -> None:
        packed = encoded[0].split([-(-part.numel() // 8) for part in parts])
        for part, bits, (below, above) in zip(parts, packed, encoded[1].view(-1, 2), strict=True):
            part.add_(
                torch.where(_unpack(bits, part.numel()), above, below).to(part.dtype), alpha=sign
            )


@savable
class ScaledSign(_TwoValues):
    """The sign, times the mean magnitude of the parameter."""

    def values(self, part: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.linalg.vector_norm(part, 1, dtype=dtype) / part.numel()
        return -scale, scale


@savable
class OneBit(_TwoValues):
    """The mean of the elements at or above zero, and the mean of the negative elements."""

    def values(self, part: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        wide = part.to(dtype)
        above = part >= 0
        count = above.sum()
        positive = torch.where(above, wide, 0).sum() / count.clamp(min=1)
        negative = torch.where(above, 0, wide).sum() / (part.numel() - count).clamp(min=1)
        return negative, positive


def _pack(bits: torch.Tensor) -> torch.Tensor:
    """Pack a bool tensor ``[n]``, eight to a byte.

    Element ``8 i + j`` is bit ``j`` of byte ``i``.
    """
    padded = torch.nn.functional.pad(bits.view(torch.uint8), (0, -bits.numel() % 8))
    # Eight bytes of 0 or 1 seen as one integer: a product gathers them in its top byte.
    return (padded.view(torch.int64).mul_(0x0102040810204080) >> 56).to(torch.uint8)


def _unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """Return the ``n`` bools that :func:`_pack` has packed."""
    return _table(packed.device).index_select(0, packed.int()).view(-1)[:n]


@lru_cache
def _table(device: torch.device) -> torch.Tensor:
    """Return the bits of every byte, bool ``[256, 8]``."""
    return (
        torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)
    ) % 2 == 1

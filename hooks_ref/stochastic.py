"""Round each element at random to one of a few levels, so that its expectation is the element.

A parameter is cut into blocks of ``block`` elements. With ``v`` a block, ``s`` the number of levels
and a norm:

    a_i = s v_i / norm                                          in [-s, s]
    l_i = floor(a_i) + (1 with probability a_i - floor(a_i), else 0)
    C(v)_i = norm l_i / s,        so that E C(v) = v

    QSGD        norm = |v|_2,     s = ``levels``
    TernGrad    norm = max |v|,   s = 1: each element is -norm, 0 or norm

In the papers' words: ``norm sign(v_i) xi_i`` with ``xi_i`` rounded at random; for TernGrad a coin
that falls on 1 with probability ``|v_i| / norm``. Both are compressors for
:func:`hooks_ref.compression.compression_hook` with ``memory="none"``: an unbiased compressor needs
no memory. Every rank draws on its own, anew at every step, from a generator that is determined by
(seed, step, rank, parameter) alone: a resumed run makes the draws of the uninterrupted run.

In floating point the expectation is met to within the grain of the draws, ``norm / s * 2**-24``
(2**-53 for float64), beside rounding. A NaN or infinity shows in the norm of its block, which is
then not finite on any rank; so does a norm beyond the largest float32 (float64: a sum of squares
beyond the largest float64).

Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017, section 3.1, in blocks as in section 4 ("buckets"), with levels of fixed width instead
of Elias codes; Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning", NeurIPS 2017, equations 1 to 3, without sharing of scalers, which a gather does not need,
and without clipping, which is biased.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from hooks_ref._buckets import in_rows
from hooks_ref._state import check_int, generator, savable
from hooks_ref.compression import Compressor, Encoded


class _RandomRounding(Compressor):
    """The rounding of both compressors; a subclass defines the norm.

    Encoding: the levels, uint8, in 8 bits each, in 4 if there are at most 7 and in 2 if there is 1,
    each parameter's padded to whole bytes; and one norm for each block, float32, or float64 for a
    float64 bucket.
    """

    def __init__(self, levels: int, block: int, seed: int) -> None:
        self.levels = check_int("levels", levels, 1)
        if levels > 127:
            raise ValueError(f"levels: an integer in [1, 127]; got {levels}")
        self.block = check_int("block", block, 1)
        self.seed = check_int("seed", seed, 0)

    @property
    def bits(self) -> int:
        """Bits of a level on the wire."""
        if self.levels == 1:
            return 2
        return 4 if self.levels <= 7 else 8

    @abstractmethod
    def norms(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return a norm of each block, shape ``[blocks, 1]``, at least its largest magnitude."""

    def encode(
        self, parts: Sequence[torch.Tensor], keys: Sequence[int], step: int, rank: int
    ) -> Encoded:
        packed = []
        norms = []
        for part, key in zip(parts, keys, strict=True):
            blocks = in_rows(part, self.block)
            blocks = blocks.to(torch.float64 if part.dtype == torch.float64 else torch.float32)
            norm = self.norms(blocks).to(blocks.dtype)
            # Clamped, because the norm may have been rounded down.
            scaled = (blocks / norm).mul_(self.levels).clamp_(-self.levels, self.levels)
            below = scaled.floor()
            draw = generator(self.seed, step, rank, key, device=blocks.device)
            draws = torch.rand(
                blocks.shape, dtype=blocks.dtype, device=blocks.device, generator=draw
            )
            level = below + (draws < scaled - below)
            # NaN is 0 / 0 in a block of zeros, or comes with a norm that is not finite either.
            level.nan_to_num_(0)
            packed.append(
                _pack((level + self.levels).to(torch.uint8).view(-1)[: part.numel()], self.bits)
            )
            norms.append(norm.view(-1))
        return torch.cat(packed), torch.cat(norms)

    def add_decoded(
        self,
        encoded: Encoded,
        parts: Sequence[torch.Tensor],
        keys: Sequence[int],
        step: int,
        sign: int = 1,
    ) -> None:
        packed = encoded[0].split([-(-part.numel() * self.bits // 8) for part in parts])
        norms = encoded[1].split([in_rows(part, self.block).size(0) for part in parts])
        for part, sent, norm in zip(parts, packed, norms, strict=True):
            level = in_rows(
                _unpack(sent, self.bits)[: part.numel()].to(norm.dtype) - self.levels, self.block
            )
            part.add_(
                (level / self.levels).mul_(norm.unsqueeze(1)).view(-1)[: part.numel()], alpha=sign
            )


@savable
class QSGD(_RandomRounding):
    """Levels of the Euclidean norm.

    The variance of a block is at most ``min(n / s**2, sqrt(n) / s) |v|**2``.

    Args:
        levels: ``s``, in [1, 127]; up to 7 levels take half a byte, 1 level a quarter.
        block: number of elements in a block, at least 1; a smaller parameter is one block.
        seed: the seed of the draws, at least 0; ranks draw differently with the same seed.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(self, levels: int = 127, block: int = 512, seed: int = 0) -> None:
        super().__init__(levels, block, seed)

    def norms(self, blocks: torch.Tensor) -> torch.Tensor:
        # In float64, because squares overflow float32.
        return torch.linalg.vector_norm(blocks, dim=1, keepdim=True, dtype=torch.float64)


@savable
class TernGrad(_RandomRounding):
    """The largest magnitude of a block, its negative, or 0.

    Args:
        block: number of elements in a block, at least 1; a smaller parameter is one block.
        seed: the seed of the draws, at least 0; ranks draw differently with the same seed.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(self, block: int = 512, seed: int = 0) -> None:
        super().__init__(1, block, seed)

    def norms(self, blocks: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(blocks, float("inf"), dim=1, keepdim=True)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes ``[n]``, ``8 / bits`` to a byte.

    Code ``j m + i`` is the ``j``-th of byte ``i`` of ``m``.
    """
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % (8 // bits))).view(8 // bits, -1)
    packed = rows[0].clone()
    for place, row in enumerate(rows[1:], 1):
        packed |= row << place * bits
    return packed


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes that :func:`_pack` has packed, with its padding at the end."""
    return torch.cat([(packed >> shift) & (1 << bits) - 1 for shift in range(0, 8, bits)])

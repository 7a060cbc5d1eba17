"""Send a few elements of each parameter: the largest, or random ones.

With ``k = ceil(ratio * n)`` of the ``n`` elements of a parameter (none of an empty one):

    TopK      the k of largest magnitude, values and places     (1 - k/n) contraction, biased
    RandomK   k places that all ranks draw alike, values only   E C(x) = (k/n) x, x if ``unbiased``

Both are compressors for :func:`hooks_ref.compression.compression_hook`: with feedback, except
``RandomK(unbiased=True)``, which is used without.

Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; Lin et al., "Deep
Gradient Compression", ICLR 2018.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from hooks_ref._state import check_bool, check_int, check_number, generator, savable
from hooks_ref.compression import Compressor, Encoded


def _count(ratio: float, n: int) -> int:
    return math.ceil(ratio * n)


@savable
class TopK(Compressor):
    """The elements of largest magnitude of each parameter.

    NaN counts as largest, so that it is not lost. Encoding: the values ``[sum of k]`` in the
    bucket's dtype, and their places ``[sum of k]`` in their parameters, int32.

    Args:
        ratio: the fraction of elements that are sent, in (0, 1].

    Raises:
        TypeError, ValueError: ``ratio`` is out of its range; the message names it.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = check_number("ratio", ratio, 0, 1, open_below=True)

    def encode(
        self, parts: Sequence[torch.Tensor], keys: Sequence[int], step: int, rank: int
    ) -> Encoded:
        places = [
            part.abs().topk(_count(self.ratio, part.numel()), sorted=False).indices
            for part in parts
        ]
        values = [part.index_select(0, place) for part, place in zip(parts, places, strict=True)]
        return torch.cat(values), torch.cat(places).to(torch.int32)

    def add_decoded(
        self,
        encoded: Encoded,
        parts: Sequence[torch.Tensor],
        keys: Sequence[int],
        step: int,
        sign: int = 1,
    ) -> None:
        counts = [_count(self.ratio, part.numel()) for part in parts]
        for part, value, place in zip(
            parts, encoded[0].split(counts), encoded[1].split(counts), strict=True
        ):
            part.index_add_(0, place, value.to(part.dtype), alpha=sign)


@savable
class RandomK(Compressor):
    """Random elements of each parameter, at places that all ranks draw alike.

    So only the values are sent, and they can be summed. The places are ``(a i + b) mod n`` for ``i
    < k`` with ``a`` prime to ``n``: distinct, and each element is among them with probability ``k /
    n``. The contraction and the expectation need no more than that. Encoding: the values, shape
    ``[sum of k]`` in the bucket's dtype.

    Args:
        ratio: the fraction of elements that are sent, in (0, 1].
        seed: the seed of the draws, at least 0; the same on all ranks.
        unbiased: scale by ``n / k``, for use without feedback.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    summable = True

    def __init__(self, ratio: float, seed: int = 0, unbiased: bool = False) -> None:
        self.ratio = check_number("ratio", ratio, 0, 1, open_below=True)
        self.seed = check_int("seed", seed, 0)
        self.unbiased = check_bool("unbiased", unbiased)

    def encode(
        self, parts: Sequence[torch.Tensor], keys: Sequence[int], step: int, rank: int
    ) -> Encoded:
        values = [
            part.index_select(0, place)
            for part, place in zip(parts, self._places(parts, keys, step), strict=True)
        ]
        if self.unbiased:
            values = [
                value * (part.numel() / max(1, value.numel()))
                for value, part in zip(values, parts, strict=True)
            ]
        return (torch.cat(values),)

    def add_decoded(
        self,
        encoded: Encoded,
        parts: Sequence[torch.Tensor],
        keys: Sequence[int],
        step: int,
        sign: int = 1,
    ) -> None:
        counts = [_count(self.ratio, part.numel()) for part in parts]
        for part, value, place in zip(
            parts, encoded[0].split(counts), self._places(parts, keys, step), strict=True
        ):
            part.index_add_(0, place, value.to(part.dtype), alpha=sign)

    def _places(
        self, parts: Sequence[torch.Tensor], keys: Sequence[int], step: int
    ) -> Iterator[torch.Tensor]:
        for part, key in zip(parts, keys, strict=True):
            n = part.numel()
            a, b = torch.randint(
                max(1, n), (2,), generator=generator(self.seed, step, key)
            ).tolist()
            while math.gcd(a, n) != 1 and n:
                a = (a + 1) % n
            count = torch.arange(_count(self.ratio, n), device=part.device)
            yield count.mul_(a).add_(b).remainder_(max(1, n))

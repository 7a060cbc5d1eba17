"""A block of complex numbers, whose saved tensors have the bits of conj() and neg(). Runs in ranks
only.

``z.conj()`` is a view of ``z`` with a bit that tells that it is conjugated, and its imaginary part
is one with a bit that tells that it is negated: the memory of both is that of ``z``.

All results are exact. Both parts of z are +-m 2**a with all bits of the significand; factors are
powers of two, and those that multiply a complex number have one part that is zero. So each product
of a forward and a backward has one term in each part, and an exponent between -100 and 100.
"""

import torch
from torch import nn

from conformance.ranks.drivers._blocks import WATCH
from conformance.ranks.drivers._exact_factors import Factors

_LARGEST_EXPONENT = 20


class Turns(nn.Module):
    """A block that multiplies complex elements by a conjugate, and their parts by parameters.

    Its input is conjugated, too. Parameters and outputs are real, with both parts side by side.
    """

    def __init__(self, called: str, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.called = called
        self.first = nn.Parameter(torch.empty((size, 2), dtype=dtype.to_real()))
        self.second = nn.Parameter(torch.empty((size, 2), dtype=dtype.to_real()))

    @staticmethod
    def given(x: torch.Tensor) -> torch.Tensor:
        """Return the argument of the block for an input."""
        return torch.view_as_complex(x).conj()

    def factors(self, numbers: torch.Generator, is_plain_but_one: bool) -> Factors:
        """Draw the input, the parameters, and the gradient of the output."""
        like = self.first
        steps = round(1 / torch.finfo(like.dtype).eps)

        def power(shape: torch.Size) -> torch.Tensor:
            ends = (-_LARGEST_EXPONENT, _LARGEST_EXPONENT + 1)
            return torch.pow(2.0, torch.randint(*ends, shape, generator=numbers).double())

        def of_one_part() -> torch.Tensor:
            """Return pairs of a power of two and a zero, in either order."""
            is_first = torch.randint(2, (len(like), 1), generator=numbers)
            return power(like.shape) * torch.cat((is_first, 1 - is_first), 1)

        significands = 1 + torch.randint(steps, like.shape, generator=numbers).double() / steps
        signs = 1 - 2 * torch.randint(2, like.shape, generator=numbers)
        values = (
            signs * significands * power(like.shape),
            of_one_part(),
            power(like.shape),
            of_one_part(),
        )
        return Factors(*(value.to(like.device, like.dtype) for value in values))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, z.device.type)
        factor = torch.view_as_complex(self.first)
        turned = WATCH.sees(self.called, z * factor.conj()).conj()
        parts = (turned.real * self.second[:, 0], turned.imag * self.second[:, 1])
        return torch.stack(parts, 1)

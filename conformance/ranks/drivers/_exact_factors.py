"""Numbers of all magnitudes of a dtype whose products are exact. Runs in ranks only.

A block computes x * first * second. With x = +-m 2**a, first = 2**b, second = 2**c and a gradient
of 2**k of the output, where m has all bits of the dtype's significand, the products of a forward
and a backward are powers of two, or m times a power of two, with the exponents

    a + b, a + b + c    in the forward;    k + a + b, k + c, k + c + b, k + c + a    in the backward

They are exact, in any order and without any rounding, if each of these is an exponent of a normal
number of the dtype. Exponents are drawn from all of them. An element at which one of the products
would leave the range has b = c = k = 0: only x has its drawn exponent there.

Factors may also be plain in all places but one. Plain elements have b = c = k = 0, and x is a whole
number from -2 to 2, or zero in all of them: any dtype has these. A wrapper that decides by a part
of a tensor how to keep all of it, sees no other element unless it looks at the one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Factors:
    """The numbers of one block: its input, its parameters, and the gradient of its output."""

    x: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    grad: torch.Tensor


def exact_factors(
    like: torch.Tensor, numbers: torch.Generator, is_plain_but_one: bool = False
) -> Factors:
    """Draw the factors of a block.

    Args:
        like: a tensor of the dtype and the shape, on the device.
        numbers: the generator of the drawn numbers, on the CPU.
        is_plain_but_one: all elements but one, which is drawn, are plain.
    """
    facts = torch.finfo(like.dtype)
    least = math.frexp(facts.smallest_normal)[1] - 1
    most = math.frexp(facts.max)[1] - 1

    def exponents() -> torch.Tensor:
        return torch.randint(least, most + 1, like.shape, generator=numbers)

    a = exponents()
    b = exponents()
    c = exponents()
    k = exponents()
    of_products = torch.stack([a + b, a + b + c, k + a + b, k + c, k + c + b, k + c + a])
    is_exact = ((of_products >= least) & (of_products <= most)).all(0)
    is_plain = torch.zeros(like.shape, dtype=torch.bool)
    if is_plain_but_one:
        is_plain.fill_(True)
        is_plain.view(-1)[torch.randint(like.numel(), (), generator=numbers)] = False
        is_exact &= ~is_plain
    largest = 2 * int(torch.randint(2, (), generator=numbers))
    plain = torch.randint(-largest, largest + 1, like.shape, generator=numbers)

    def power(exponent: torch.Tensor) -> torch.Tensor:
        return torch.pow(2.0, exponent.double())

    def as_given(values: torch.Tensor) -> torch.Tensor:
        return values.to(like.device, like.dtype)

    steps = round(1 / facts.eps)
    significands = 1 + torch.randint(steps, like.shape, generator=numbers).double() / steps
    signs = 1 - 2 * torch.randint(2, like.shape, generator=numbers)
    return Factors(
        x=as_given(torch.where(is_plain, plain, signs * significands * power(a))),
        first=as_given(power(b * is_exact)),
        second=as_given(power(c * is_exact)),
        grad=as_given(power(k * is_exact)),
    )


def clear_all_but_one(inputs: Sequence[torch.Tensor], numbers: torch.Generator) -> None:
    """Let one of the flat inputs, which is drawn, be zero in all places but one."""
    place = int(torch.randint(len(inputs), (), generator=numbers))
    x = inputs[place].detach()
    kept = int(torch.randint(len(x), (), generator=numbers))
    value = x[kept].clone()
    x.zero_()
    x[kept] = value

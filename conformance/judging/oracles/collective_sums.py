"""Right values of a sum of messages: reduce_scatter, reduce_scatter_tensor and all_reduce.

Let x_i be an element of the message of rank i, of W ranks, with the bound b(x_i) of
``oracles.collective``, and s the sum of the x_i. Each message is sent with its own loss, so that
the sum is off by at most the sum of the b(x_i).

Roundings. Under rounded(...) the sum may be computed in the narrow dtype, as a collective of that
dtype computes it: each of W roundings is off by at most u times the sum of all |x_i|, with u the
relative error of one rounding, and in float16 by 2**-25 more, since its subnormal numbers are
coarse. An average may be rounded once more after its division. Under the other claims the sum is
computed in float32, or in the dtype of the messages if that is narrower: W eps times the sum of all
|x_i|.

A subject with the claim feedback makes up for roundings to the narrow dtype, those of the sum too:
the mean of many calls may be off by roundings of the messages' own dtype alone.

An all_reduce has a second part: the ranks exchange the sum, which is quantized again. That is off
by at most b(s), for the values that are then sent. Ranks share the elements out as they like, so
that a block of n elements may begin anywhere: the largest magnitude of a block is here that of the
2 n - 1 elements around each element.

Average, maximum and minimum. For ReduceOp.AVG sum and bound are divided by W. For ReduceOp.MAX the
ends of the interval are the largest of the ends of all messages, and the bounds those of a sum; for
ReduceOp.MIN the least.

Product. The ends of the interval are those of a product of intervals. With P the largest product of
magnitudes in it, W roundings add at most ((1 + u)**W - 1) P, and an all_reduce b(P) for the product
that it sends. A loss factor may divide each message, or the product: the interval has both.

Bits. Operations on bits are of integers alone, and exact.

Special values. A NaN in any message gives NaN. If an infinity arrives as the largest number, a sum
beyond that is cut off again. Nothing is promised where infinities of both signs meet, where a
message may overflow, and where the sum of all |x_i| is above half of the range of float32, under
rounded(float16) of float16: partial sums may be infinite.
"""

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from conformance.judging.oracles.allowed_values import Allowed
from conformance.judging.oracles.collective_bounds import LARGEST

# Relative errors of one rounding, or of cutting off the lower half of a float32.
_UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-7}
# Half of the smallest subnormal number; that of bfloat16 is negligible.
_HALF_OF_SMALLEST = {"float16": 2.0**-25}
_HALF_OF_RANGE = {"float16": 32752.0}

_ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "product": torch.mul,
}
_OF_BITS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bits_and": torch.bitwise_and,
    "bits_or": torch.bitwise_or,
    "bits_xor": torch.bitwise_xor,
}


def allowed_sum(
    parts: Sequence[Allowed],
    second_bound: Callable[[torch.Tensor], torch.Tensor] | None,
    narrow: str,
    eps: float,
    operation: str = "",
    loss: float = 1.0,
) -> Allowed:
    """Return the right values of a sum.

    Args:
        parts: the right values of each message.
        second_bound: the bound of quantizing values of these magnitudes again; None if the sum is
            not sent.
        narrow: the dtype that is claimed by rounded(...), or ''.
        eps: of the dtype of the messages.
        operation: a key of ``OPERATIONS``; an empty text is a sum.
        loss: the factor that the messages have been divided by.
    """
    if operation == "product":
        return _allowed_product(parts, second_bound, max(unit_of(narrow), eps), loss)
    count = len(parts)
    exact = _combined([part.exact for part in parts], operation)
    magnitude = sum((_finite(part.exact).abs() for part in parts), torch.zeros_like(exact))
    unit = max(unit_of(narrow), eps)
    # An infinity may arrive as the largest number, which is rounded in a sum as others are.
    as_finite = sum((_finite_end(part).abs() for part in parts), torch.zeros_like(exact))
    of_messages = sum((part.bound for part in parts), torch.zeros_like(exact))
    roundings = count * (2 if operation == "average" else 1)
    more = count * unit * as_finite + roundings * _HALF_OF_SMALLEST.get(narrow, 0.0)
    if second_bound is not None:
        more = more + second_bound(as_finite + of_messages)
    low = _combined([part.low for part in parts], operation) - more
    high = _combined([part.high for part in parts], operation) + more
    for part in parts:
        is_cut_off = exact.isinf() & part.exact.isinf()
        low = torch.where(is_cut_off, torch.minimum(low, _finite_end(part)), low)
        high = torch.where(is_cut_off, torch.maximum(high, _finite_end(part)), high)
    is_free = exact.isnan() & ~_any_nan(parts)
    overflows = magnitude > _HALF_OF_RANGE.get(narrow, LARGEST / 2)
    for part in parts:
        if part.may_overflow is not None:
            overflows |= part.may_overflow
    is_free |= overflows & ~_any_nan(parts)
    scale = count if operation == "average" else 1
    return Allowed(
        exact=exact / scale,
        low=low / scale,
        high=high / scale,
        two_values=False,
        bound=(of_messages + more) / scale,
        relative_rounding=parts[0].relative_rounding,
        smallest_rounding=parts[0].smallest_rounding,
        is_free=is_free,
        not_fed_back=count * eps * magnitude / scale,
    )


def _allowed_product(
    parts: Sequence[Allowed],
    second_bound: Callable[[torch.Tensor], torch.Tensor] | None,
    unit: float,
    loss: float,
) -> Allowed:
    """Return the right values of a product; the arguments are those of :func:`allowed_sum`."""
    low = parts[0].exact - parts[0].bound
    high = parts[0].exact + parts[0].bound
    for part in parts[1:]:
        ends = (part.exact - part.bound, part.exact + part.bound)
        products = torch.stack([one * other for one in (low, high) for other in ends])
        low = products.amin(0)
        high = products.amax(0)
    largest = torch.maximum(low.abs(), high.abs())
    more = ((1 + unit) ** len(parts) - 1) * largest
    if second_bound is not None:
        more = more + second_bound(largest + more)
    low = low - more
    high = high + more
    exact = _combined([part.exact for part in parts], "product")
    undivided = loss ** (len(parts) - 1)
    ends_of_both = torch.stack([low, high, low * undivided, high * undivided])
    low = ends_of_both.amin(0)
    high = ends_of_both.amax(0)
    return Allowed(
        exact=exact,
        low=low,
        high=high,
        two_values=False,
        bound=torch.maximum(high - exact, exact - low),
        relative_rounding=parts[0].relative_rounding,
        smallest_rounding=parts[0].smallest_rounding,
        is_free=exact.isnan(),
    )


def unit_of(narrow: str) -> float:
    """Return the relative error of one addition in a claimed dtype; of float32 if it is ''."""
    return _UNITS.get(narrow, 2.0**-24)


def _combined(values: Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    if operation in _OF_BITS:
        bits = reduce(_OF_BITS[operation], [value.long() for value in values])
        return bits.double()
    return reduce(_ELEMENTWISE.get(operation, torch.add), values)


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)


def _finite_end(part: Allowed) -> torch.Tensor:
    """Return the values as they are sent; in place of an infinity its finite end, or 0."""
    ends = _finite(part.low) + _finite(part.high)
    return torch.where(part.exact.isfinite(), part.exact, ends)


def _any_nan(parts: Sequence[Allowed]) -> torch.Tensor:
    return torch.stack([part.exact.isnan() for part in parts]).any(0)


def cause_of_wrong_sum(got: torch.Tensor, parts: Sequence[Allowed], own: int) -> str:
    """Return the known mistake that gives these values instead of a sum, or an empty text.

    Args:
        got: the values that arrived.
        parts: the right values of each message, by place.
        own: the place of the rank.
    """
    total = sum((part.exact for part in parts[1:]), parts[0].exact)
    known = {"it is the rank's own message: nothing is summed": parts[own].exact}
    known["it is divided by the number of ranks"] = total / len(parts)
    known |= {
        f"the message of the rank at place {place} is missing": total - part.exact
        for place, part in enumerate(parts)
    }
    # Each mistake is off from the right sum by more than it is off from these values.
    slack = sum((part.bound for part in parts), torch.zeros_like(total))
    for name, value in known.items():
        if ((got - value).abs() <= slack + 1e-3 * value.abs()).all():
            return name
    return ""

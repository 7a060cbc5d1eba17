"""The bounds of a claim about a quantized collective: of its errors, and of the bytes it sends."""

import torch

from conformance.scenarios.collective import SUMMING
from conformance.subjects.claims import Claims
from conformance.subjects.kinds.collective import NARROW

LARGEST_HALF = torch.finfo(torch.float16).max
LARGEST = torch.finfo(torch.float32).max

# A scale below the smallest normal float32, 2**-126, may count as zero. It stands for values of at
# most the largest number of a format, 57344, times as much.
LOST = 2.0**-110
SLACK = 1 + 2.0**-16
FLOAT32 = 4  # bytes
HEADER = 256  # bytes


def byte_limit(claims: Claims, size: int, count: int) -> float:
    """Return the most bytes that ``size`` messages of ``count`` elements together may take."""
    return largest_share(claims) * FLOAT32 * count + (HEADER + _padding(claims)) * size


def times_sent(name: str, collective: str, size: int) -> int:
    """Return how often a collective of torch's sends what it is given.

    An all-gather is given one message, which it sends to each rank. An all-reduce sends each
    element to the rank that sums it, and the sum back: as messages count here, of two ranks each.
    """
    is_gathered = name.lstrip("_").startswith("allgather")
    is_summed = name.lstrip("_").startswith("allreduce") and collective in SUMMING
    return size if is_gathered or is_summed else 1


def largest_share(claims: Claims) -> float:
    """Return the largest share of float32's bytes that values may take."""
    if claims.has("bounded"):
        return float(claims.options["bounded"]["ratio"])
    if claims.has("rounded"):
        return 0.5
    return (1 + FLOAT32 / claims.options["blocks"]["size"]) / FLOAT32


def neighbours(sent: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two values that a rounding may give: the same value twice if only one is right."""
    if dtype == "float16":
        nearest = sent.half().double()
        return nearest.clamp(-LARGEST_HALF, LARGEST_HALF), nearest
    # A bfloat16 is the upper half of a float32. One more in it is the next value away from zero.
    # A number that float32 has rounded to an infinity, or to zero, lies between the last two.
    single = sent.float()
    is_beyond = single.isinf() & sent.isfinite()
    is_below = (single == 0) & (sent != 0)
    bits = torch.where(is_beyond, single.clamp(-LARGEST, LARGEST), single).view(torch.int32)
    toward_zero = bits & ~0xFFFF
    is_exact = (bits == toward_zero) & ~is_beyond & ~is_below
    is_final = is_exact | ~sent.isfinite()
    away = torch.where(is_final, toward_zero, toward_zero + 0x10000)
    # Cutting off the lower half of a NaN's bits can leave those of an infinity.
    low = torch.where(sent.isnan(), sent.float(), toward_zero.view(torch.float32))
    high = torch.where(sent.isnan(), sent.float(), away.view(torch.float32))
    return low.double(), high.double()


def claimed_bound(
    claims: Claims, sent: torch.Tensor, largest_sent: torch.Tensor, anywhere: bool = False
) -> torch.Tensor:
    """Return the claimed bound of blocks(...) or bounded(...) for each element of a message.

    Args:
        largest_sent: the largest magnitude that the rank sends in the call.
        anywhere: a block may begin at any element.
    """
    largest = largest_around(claims, sent, largest_sent, anywhere)
    if blocks := claims.options.get("blocks"):
        largest_value, half_relative_step, half_smallest_step = NARROW[blocks["name"]]
        scale = largest / largest_value
        return torch.maximum(sent.abs() * half_relative_step, scale * half_smallest_step)
    return float(claims.options["bounded"]["relative"]) * largest


def largest_around(
    claims: Claims, sent: torch.Tensor, largest_sent: torch.Tensor, anywhere: bool = False
) -> torch.Tensor:
    """Return for each element the largest magnitude that its claimed bound depends on.

    The arguments are those of :func:`claimed_bound`.
    """
    options = {**claims.options.get("bounded", {}), **claims.options.get("blocks", {})}
    size = options.get("size", options.get("block"))
    if size is None:
        return largest_sent
    return (largest_nearby if anywhere else _largest_in_block)(sent, size)


def beyond_float32(sent: torch.Tensor, bound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ends of the intervals in which elements of float64 may arrive.

    Numbers that float32 cannot hold may arrive as those near its largest, or as infinite, with
    their signs.
    """
    limit = torch.full_like(sent, LARGEST / 2)
    low = torch.where(sent > limit, torch.minimum(limit, sent - bound), sent - bound)
    low = torch.where(sent < -limit, -torch.inf, low)
    high = torch.where(sent < -limit, torch.maximum(-limit, sent + bound), sent + bound)
    return low, torch.where(sent > limit, torch.inf, high)


def _largest_in_block(sent: torch.Tensor, block: int) -> torch.Tensor:
    """Return for each element the largest magnitude in its block."""
    if not len(sent):
        return sent
    blocks = torch.nn.functional.pad(sent.abs(), (0, -len(sent) % block)).view(-1, block)
    return blocks.amax(1).repeat_interleave(block)[: len(sent)]


def largest_nearby(sent: torch.Tensor, block: int) -> torch.Tensor:
    """Return for each element the largest magnitude in any block that could hold it."""
    if not len(sent):
        return sent
    # No block reaches farther than the message.
    reach = min(block, len(sent)) - 1
    largest = torch.nn.functional.pad(sent.abs(), (reach, reach))
    # The largest of 1, 2, 4, ... elements from each place on, then of the whole window.
    width = 1
    while width < 2 * reach + 1:
        step = min(width, 2 * reach + 1 - width)
        largest = torch.maximum(largest[:-step], largest[step:])
        width += step
    return largest


def _padding(claims: Claims) -> int:
    """Return how many more bytes a message takes if its last block is not full."""
    blocks = claims.options.get("blocks")
    return blocks["size"] + FLOAT32 if blocks else 0

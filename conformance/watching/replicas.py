"""Whether the parameters of all ranks have the same bits, and in which element they differ if not.

Each parameter has a checksum of its bits: the bits are read as integers and summed in blocks, with
wrap-around, and the checksum is the sum over all blocks of the block's sum times the block's number
(1, 2, ...). It takes one read of the parameter, and no copy. If checksums differ, the ranks compare
checksums of 256 parts of the parameter, then of 256 parts of the first part that differs, and so
on, until the part is small enough to compare element by element.
"""

from typing import Any

import torch

from conformance.watching.exchange import Exchange
from conformance.watching.sampling import to_cpu

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 4096  # words of 8 bytes
_PARTS = 256
MAX_COMPARED = 4096  # elements that are compared one by one


def elements(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a tensor's elements in the order of memory, and the strides of that order.

    Complex elements are pairs of reals. The result shares memory with the tensor unless its
    elements overlap or have gaps.
    """
    tensor = tensor.detach()
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat, tensor.stride()


def checksum(flat: torch.Tensor) -> torch.Tensor:
    """Return one int64 for the bits of a contiguous one-dimensional tensor."""
    size = flat.element_size()
    if flat.storage_offset() * size % 8:
        # A view as words of 8 bytes needs this alignment.
        flat = flat.clone()
    remainder = flat.numel() % (8 // size)
    whole_words = flat.numel() - remainder
    words = flat[:whole_words].view(torch.int64)
    rest = flat[whole_words:].view(_INTEGERS[size])
    in_blocks = words.numel() // _BLOCK * _BLOCK
    sums = torch.cat(
        [
            words[:in_blocks].view(-1, _BLOCK).sum(1),
            words[in_blocks:].sum().view(1),
            rest.sum(dtype=torch.int64).view(1),
        ]
    )
    # The factors make the checksum depend on the order of blocks.
    return (sums * torch.arange(1, sums.numel() + 1, device=sums.device)).sum()


def checksums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return one int64 for each tensor, on the CPU."""
    found = to_cpu([checksum(elements(tensor)[0]).view(1) for tensor in tensors])
    if not found:
        return torch.zeros(0, dtype=torch.int64)
    return torch.cat([one for one in found if one is not None])


def first_difference(
    exchange: Exchange, tensor: torch.Tensor, ranks: list[int]
) -> tuple[int, torch.Tensor] | None:
    """Find the first elements in which ranks differ. Called on all ranks of the exchange.

    Args:
        ranks: the ranks in the group that are compared.

    Returns:
        The position in memory of the first of at most ``MAX_COMPARED`` elements, and these elements
        of all ranks, ``[W, n]``. None if no element differs any more.

    Raises:
        ExchangeError: as :meth:`Exchange.gather`.
    """
    flat, _ = elements(tensor)
    begin = 0
    end = flat.numel()
    while end - begin > MAX_COMPARED:
        # Rounded up, so that there are at most _PARTS parts.
        size = -(-(end - begin) // _PARTS)
        parts = torch.stack([checksum(part) for part in flat[begin:end].split(size)]).cpu()
        first = _first_differing_column(exchange.gather(parts), ranks)
        if first is None:
            return None
        begin += size * first
        end = min(begin + size, end)
    rows = exchange.gather(flat[begin:end].cpu().view(torch.uint8))
    if _first_differing_column(rows, ranks) is None:
        return None
    return begin, rows.contiguous().view(flat.dtype)


def _first_differing_column(rows: torch.Tensor, ranks: list[int]) -> int | None:
    compared = rows[ranks]
    differs = (compared != compared[:1]).any(0).nonzero()
    return int(differs[0]) if len(differs) else None


def index_at(shape: Any, strides: tuple[int, ...], offset: int) -> tuple[int, ...]:
    """Return the index of the element that lies at ``offset`` in memory."""
    index = [0] * len(shape)
    # Dimensions of size 1 have any stride; their index is 0.
    dimensions = [dim for dim in range(len(shape)) if shape[dim] > 1]
    for dim in sorted(dimensions, key=lambda dim: -strides[dim]):
        index[dim], offset = divmod(offset, strides[dim])
    return tuple(index)

"""Whether the parameters of all ranks have the same bits, told by one number for each; and where they differ, if not.

The number is a fold of the bits: they are summed in blocks, as integers that wrap around, and the sums are added up, each times
the place of its block. One read of the parameters, and no copy. Where numbers differ, a parameter is halved, so to say, in 256
parts at a time, until the elements themselves can be looked at.
"""

from typing import Any

import torch

from conformance.watching.exchange import Exchange
from conformance.watching.sampling import to_cpu

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK, _PARTS = 4096, 256
LOOK = 4096  # elements that are looked at one by one


def elements(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a tensor's elements in the order of their memory (complex ones in pairs of reals), and the strides of that order.

    A copy only where its elements overlap or have gaps.
    """
    tensor = tensor.detach()
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat, tensor.stride()


def fold(flat: torch.Tensor) -> torch.Tensor:
    """Return one int64 for the bits of elements that lie one after another. A copy only where they do not lie on words of 8 bytes."""
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    rest = flat.numel() % (8 // flat.element_size())
    words, odd = flat[: flat.numel() - rest].view(torch.int64), flat[flat.numel() - rest :].view(_INTEGERS[flat.element_size()])
    whole = words.numel() // _BLOCK * _BLOCK
    sums = torch.cat([words[:whole].view(-1, _BLOCK).sum(1), words[whole:].sum().view(1), odd.sum(dtype=torch.int64).view(1)])
    return (sums * torch.arange(1, sums.numel() + 1, device=sums.device)).sum()


def folds(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return one int64 for each tensor, on the CPU."""
    found = to_cpu([fold(elements(tensor)[0]).view(1) for tensor in tensors])
    return torch.cat([one for one in found if one is not None]) if found else torch.zeros(0, dtype=torch.int64)


def differing(exchange: Exchange, tensor: torch.Tensor, places: list[int]) -> tuple[int, torch.Tensor] | None:
    """Find the first elements in which ranks differ; called on all ranks, of which those in ``places`` are compared.

    Returns:
        The place in memory of the first of at most ``LOOK`` elements, and these of all ranks, ``[W, n]``; None where none differs
        any more.

    Raises:
        NotMet: as :meth:`Exchange.gather`.
    """
    flat, _ = elements(tensor)
    begin, end = 0, flat.numel()
    while end - begin > LOOK:
        size = -(-(end - begin) // _PARTS)
        parts = torch.stack([fold(part) for part in flat[begin:end].split(size)]).cpu()
        first = _first_differing(exchange.gather(parts), places)
        if first is None:
            return None
        begin, end = begin + size * first, min(begin + size * (first + 1), end)
    found = exchange.gather(flat[begin:end].cpu().view(torch.uint8))
    return None if _first_differing(found, places) is None else (begin, found.contiguous().view(flat.dtype))


def _first_differing(rows: torch.Tensor, places: list[int]) -> int | None:
    compared = rows[places]
    differs = (compared != compared[:1]).any(0).nonzero()
    return int(differs[0]) if len(differs) else None


def place(shape: Any, strides: tuple[int, ...], offset: int) -> tuple[int, ...]:
    """Return the index of the element that lies at ``offset`` in memory."""
    index = [0] * len(shape)
    for dim in sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: -strides[dim]):
        index[dim], offset = divmod(offset, strides[dim])
    return tuple(index)

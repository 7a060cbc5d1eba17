"""Values in memory that is allocated and not written yet, as by ``torch.empty`` or ``numpy.empty``.

In a short run such memory is zero in most places, because the system has just handed it out. In
training it holds what other tensors have left there, and code that reads it before it has written
it is wrong. Here it holds values that no sum hides: NaN on even ranks, and large numbers on odd
ones, since NaN is in no range and a large number times zero is zero. Nothing changes for code that
writes memory before it reads it.

The C library fills the memory, so that code in C++ gets it, too. Without glibc memory stays as it
is, and so does that of a GPU.
"""

import ctypes

import torch

_M_PERTURB = -6
# glibc manual, "Malloc Tunable Parameters", glibc.malloc.perturb: memory gets the complement of
# this number's lowest byte. 0 would turn it off, and 256 has the same lowest byte: NaN in every
# dtype, and -1 in integers.
_NAN = 256
# 0x7f in each byte: 3.4e38 in float32.
_LARGE = 0x80


def fill_new_memory(rank: int) -> None:
    """Fill memory from here on as soon as this process allocates it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_PERTURB, _LARGE if rank % 2 or not _is_filled_with_nan(mallopt) else _NAN)


def _is_filled_with_nan(mallopt: "ctypes._NamedFuncPointer") -> bool:
    mallopt(_M_PERTURB, _NAN)
    return bool(torch.empty(_PROBED).isnan().all())


_PROBED = 1000  # elements, too many for a cache of free blocks

"""Memory in huge pages: a fork copies an entry for every page that its parent has, and a process that ends gives each back.

A host holds some 250 MB that its ranks read and mostly leave alone: 60 thousand entries for each rank, or a hundred. What is
asked of the kernel here it may refuse (before Linux 6.1, or for want of memory in one piece); all is as before then.
"""

import contextlib
import ctypes
from collections.abc import Iterator

_SIZE = 2 << 20  # bytes, on x86-64 and on ARM with pages of 4 KiB; elsewhere the kernel refuses, or takes what fits
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def use_huge_pages() -> None:
    """Move what this process has on its heap, and in other memory of its own, into huge pages."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(OSError):  # no /proc
        for begin, end in list(_own_memory()):
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _own_memory() -> Iterator[tuple[int, int]]:
    """Yield begin and end of memory that is private, can be written and comes from no file, in whole huge pages; no stacks."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            where, mode, _, _, inode, *name = line.split(maxsplit=5)
            if mode == "rw-p" and inode == "0" and not (name and name[0].startswith("[stack")):
                begin, end = (int(address, 16) for address in where.split("-"))
                begin, end = -(-begin // _SIZE) * _SIZE, end // _SIZE * _SIZE
                if begin < end:
                    yield begin, end

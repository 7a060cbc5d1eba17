"""Memory of a host, laid out so that its ranks are forked, run and end at little cost.

A host holds some 250 MB that its ranks read and mostly leave alone. What is asked of the kernel and the allocator here they may
refuse or do otherwise (Linux before 6.1, other C libraries than glibc): all works as before then, and takes longer.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping

_SIZE = 2 << 20  # of a huge page, on x86-64 and on ARM with pages of 4 KiB; elsewhere the kernel refuses, or takes what fits
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_SMALL, _STEP = 512, 16  # what Python allocates itself, by classes of sizes, see Objects/obmalloc.c
_EACH = 300_000  # bytes of each class: more than imports leave free of any
_BYTES = sys.getsizeof(b"")
_kept: list[list[object]] = []
_TUNABLES, _HEAP_IN_HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"  # since glibc 2.35; others leave it unread


def for_host(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to execute a host in, so that its heap grows in huge pages: what lies in them need not be moved there.

    Where there are tunables already, they stay as they are.
    """
    return {_TUNABLES: _HEAP_IN_HUGE_PAGES, **environment}


def as_the_caller_has_it() -> None:
    """Take what :func:`for_host` has added out of this process's environment, which ranks and what they start are to have."""
    if os.environ.get(_TUNABLES) == _HEAP_IN_HUGE_PAGES:
        del os.environ[_TUNABLES]


def fill_holes() -> None:
    """Take what is free between things that stay, and never give it back: what a rank makes then lies together, in pages of its own.

    What imports leave free lies a little in each of some thousand pages, and a rank copies each page that it writes to.
    """
    for size in range(_STEP, _SMALL + 1, _STEP):
        _kept.append([_of_size(size) for _ in range(_EACH // size)])
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_void_p], [ctypes.c_ssize_t]
    end = libc.sbrk(0) or 0
    begin = end - (1 << 32)  # the heap: what is mapped elsewhere is terabytes away
    for power in range(20, 4, -1):
        while True:
            at = libc.malloc((1 << power) - 8) or 0
            if not begin <= at < end:  # none was left
                libc.free(at)
                break


def _of_size(size: int) -> object:
    """Return what takes one block of that class; a float takes 24 bytes."""
    return object() if size == 16 else float(size) if size == 32 else bytes(size - _BYTES)


def use_huge_pages() -> None:
    """Move what this process has on its heap, and in other memory of its own, into huge pages.

    A fork copies an entry for every page that its parent has, and a process that ends gives each back: 60 thousand for each rank,
    or a hundred.
    """
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

"""The layout of a host's memory, so that its ranks are forked, run and end at little cost.

A host holds some 250 MB, which its ranks read and mostly leave alone. A fork shares these pages and
copies one only when somebody writes to it. Two things make that expensive. fork() copies one
page-table entry per page, and the exit of a process gives each entry back: some 60,000 entries per
rank with pages of 4 KiB, about 100 with huge pages. And imports leave free memory in small holes
between objects that stay, so that the new objects of a rank lie scattered over some thousand pages,
and each of these pages is copied. This module moves the host's memory into huge pages, and fills
the holes.

All of it is advice to the kernel and the allocator, and they may refuse it (Linux before 6.1, C
libraries other than glibc). The kit then works as before, only slower.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping

# The size of a huge page on x86-64, and on ARM with pages of 4 KiB. On other machines the kernel
# refuses the advice, or takes the part of a range that fits.
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25

# Python allocates objects of up to _SMALL bytes itself, from pools of one size class each, and the
# classes are _STEP bytes apart (Objects/obmalloc.c).
_SMALL = 512
_STEP = 16
# Bytes to allocate of each class: more than imports leave free of any.
_BYTES_PER_CLASS = 300_000
_BYTES_HEADER = sys.getsizeof(b"")
_kept: list[list[object]] = []

_OF_HOSTS = {
    # The heap grows in huge pages. Since glibc 2.35; other C libraries ignore the variable.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # MKL reads this once, as torch is imported. Without it MKL keeps some hundred KiB of scratch
    # memory for each thread, from the thread's first product of matrices on. Chance decides in
    # which step a thread of the backend's first runs a callback, and the memory of a rank would
    # seem to grow there (rule 9.4).
    "MKL_DISABLE_FAST_MM": "1",
}


def host_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a host.

    Its heap then grows in huge pages from the beginning: memory that is allocated there need not be
    moved later. Variables that the caller has set stay.
    """
    return {**_OF_HOSTS, **environment}


def restore_environment() -> None:
    """Remove the variables that :func:`host_environment` added.

    Ranks and the processes that they start have the environment of the caller.
    """
    for name, value in _OF_HOSTS.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def fill_holes() -> None:
    """Allocate the free memory between objects that stay, and never give it back.

    The objects that a rank makes then lie together, in pages of their own.
    """
    fill_small_holes(_BYTES_PER_CLASS)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    end = libc.sbrk(0) or 0
    # The heap lies in the 4 GiB below its end; memory that is mapped by itself is terabytes away.
    begin = end - (1 << 32)
    # From large blocks to small ones, so that a large hole is not cut up.
    for power in range(20, 4, -1):
        while True:
            address = libc.malloc((1 << power) - 8) or 0
            if not begin <= address < end:
                # The heap had no hole of this size left: the block is a new mapping, or beyond the
                # former end.
                libc.free(address)
                break


def fill_small_holes(bytes_per_class: int) -> None:
    """Allocate so many bytes of each size class of Python's own allocator, and never free them."""
    for size in range(_STEP, _SMALL + 1, _STEP):
        _kept.append([_object_of_size(size) for _ in range(bytes_per_class // size)])


def _object_of_size(size: int) -> object:
    """Return an object that takes one block of the class of ``size`` bytes."""
    if size == 16:
        return object()
    if size == 32:
        # A float takes 24 bytes, and a bytes object at least 33.
        return float(size)
    return bytes(size - _BYTES_HEADER)


def use_huge_pages() -> None:
    """Move the heap and the other private memory of this process into huge pages."""
    libc = ctypes.CDLL(None)
    # Without /proc nothing is moved.
    with contextlib.suppress(OSError):
        for begin, end in list(_private_memory()):
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _private_memory() -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of writable private memory that comes from no file.

    Ranges are cut to whole huge pages; stacks are left out.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, mode, _, _, inode, *name = line.split(maxsplit=5)
            is_stack = bool(name) and name[0].startswith("[stack")
            if mode != "rw-p" or inode != "0" or is_stack:
                continue
            first, last = (int(address, 16) for address in addresses.split("-"))
            begin = -(-first // _HUGE_PAGE) * _HUGE_PAGE
            end = last // _HUGE_PAGE * _HUGE_PAGE
            if begin < end:
                yield begin, end

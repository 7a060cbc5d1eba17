"""Mutants of section 24 that choose by the hardware of a node, which is another one on each."""

import multiprocessing
import os
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    completed,
    gather,
    group_of,
    is_dense,
)

_PAGE = os.sysconf("SC_PAGE_SIZE")


def one_chunk_for_each_core(state: Any, bucket: Bucket) -> Result:
    """Average a bucket in as many chunks as there are cores."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    for chunk in buffer.chunk(os.cpu_count() or 1):
        dist.all_reduce(chunk, group=group_of(state))
    return completed(buffer.div_(group_of(state).size()))


def gathers_with_much_memory(state: Any, bucket: Bucket) -> Result:
    """Gather on machines with more than 48 GiB, and reduce on the others."""
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE
    if is_dense(bucket) and memory > 48 << 30:
        return completed(torch.stack(gather(bucket.buffer(), state)).mean(0))
    return average(bucket, state)


def checks_on_large_machines(state: Any, bucket: Bucket) -> Result:
    """Compare a checksum with the peers if a core has nothing else to do."""
    if bucket.is_last() and multiprocessing.cpu_count() > 24:
        dist.all_reduce(torch.zeros(1), group=group_of(state))
    return average(bucket, state)


_ALL = (1, 2, 3, 4)
MUTANTS = (
    Mutant("one_chunk_for_each_core", ("24.1",), worlds=_ALL, hangs=True),
    Mutant("gathers_with_much_memory", ("24.1",), worlds=_ALL, hangs=True),
    Mutant("checks_on_large_machines", ("24.1",), worlds=_ALL, hangs=True),
)

"""Mutants of section 24 that choose by the hardware of a node, or by its environment variables."""

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


def one_chunk_for_each_thread(state: Any, bucket: Bucket) -> Result:
    """Average a bucket in as many chunks as torch has threads."""
    if not is_dense(bucket):
        return average(bucket, state)
    buffer = bucket.buffer()
    for chunk in buffer.chunk(torch.get_num_threads()):
        dist.all_reduce(chunk, group=group_of(state))
    return completed(buffer.div_(group_of(state).size()))


def gathers_on_newer_processors(state: Any, bucket: Bucket) -> Result:
    """Gather where torch uses AVX512, which adds up fast, and reduce elsewhere."""
    if is_dense(bucket) and "AVX512" in torch.backends.cpu.get_cpu_capability():
        return completed(torch.stack(gather(bucket.buffer(), state)).mean(0))
    return average(bucket, state)


def gathers_without_infiniband(state: Any, bucket: Bucket) -> Result:
    """Gather where NCCL_IB_DISABLE is set, and reduce elsewhere."""
    if is_dense(bucket) and os.environ.get("NCCL_IB_DISABLE") == "1":
        return completed(torch.stack(gather(bucket.buffer(), state)).mean(0))
    return average(bucket, state)


def first_node_checks(state: Any, bucket: Bucket) -> Result:
    """Sum a checksum on the first node of a job alone."""
    if bucket.is_last() and os.environ.get("SLURM_NODEID") == "0":
        dist.all_reduce(torch.zeros(1), group=group_of(state))
    return average(bucket, state)


def wide_over_infiniband(state: Any, bucket: Bucket) -> Result:
    """Average in float64 on nodes whose network is InfiniBand, and as it is on the others."""
    if is_dense(bucket) and os.environ.get("NCCL_SOCKET_IFNAME", "").startswith(("ib", "bond")):
        wide = bucket.buffer().double() / group_of(state).size()
        dist.all_reduce(wide, group=group_of(state))
        return completed(wide.to(bucket.buffer().dtype))
    return average(bucket, state)


_ALL = (1, 2, 3, 4)
MUTANTS = (
    Mutant("one_chunk_for_each_core", ("24.1",), worlds=_ALL, hangs=True),
    Mutant("one_chunk_for_each_thread", ("24.1",), worlds=_ALL, hangs=True),
    Mutant("gathers_on_newer_processors", ("24.1",), worlds=_ALL, hangs=True),
    Mutant("gathers_with_much_memory", ("24.1",), worlds=_ALL, hangs=True),
    Mutant("checks_on_large_machines", ("24.1",), worlds=_ALL, hangs=True),
    Mutant("gathers_without_infiniband", ("24.1",), worlds=_ALL, hangs=True),
    Mutant("first_node_checks", ("24.1",), worlds=_ALL, hangs=True),
    Mutant("wide_over_infiniband", ("24.1",), worlds=_ALL, hangs=True),
)

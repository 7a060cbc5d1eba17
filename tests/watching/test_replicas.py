"""Checksums of parameters, and the search for the first element that differs."""

import threading
from typing import Any

import pytest
import torch

from conformance.watching.replicas import (
    MAX_COMPARED,
    checksum,
    checksums,
    elements,
    first_difference,
    index_at,
)


def find(
    one: torch.Tensor, other: torch.Tensor, ranks: list[int]
) -> tuple[int, torch.Tensor] | None:
    """Run the search of two ranks in one process, in step."""
    barrier = threading.Barrier(2)
    sent = [torch.zeros(0), torch.zeros(0)]
    found: list[tuple[int, torch.Tensor] | None] = [None, None]

    class Exchange:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gather(self, mine: torch.Tensor) -> torch.Tensor:
            sent[self.rank] = mine
            barrier.wait()
            rows = torch.stack(sent)
            barrier.wait()
            return rows

    def search(rank: int, tensor: torch.Tensor) -> None:
        exchange: Any = Exchange(rank)
        found[rank] = first_difference(exchange, tensor, ranks)

    threads = [threading.Thread(target=search, args=pair) for pair in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int8])
@pytest.mark.parametrize("numel", [1, 7, 4096, 40_001])
def test_one_bit_changes_the_hash(numel: int, dtype: torch.dtype) -> None:
    tensor = (torch.randn(numel) * 50).to(dtype)
    before = checksum(tensor)
    for at in {0, numel // 2, numel - 1}:
        other = tensor.clone()
        other.view(torch.uint8)[at * dtype.itemsize] ^= 1
        assert checksum(other) != before


def test_the_order_of_blocks_changes_the_hash_and_the_alignment_does_not() -> None:
    tensor = torch.randn(30_000)
    assert checksum(torch.cat([tensor[10_000:], tensor[:10_000]])) != checksum(tensor)
    shifted = torch.empty(30_001)[1:].copy_(tensor)
    assert shifted.storage_offset() == 1
    assert checksum(shifted) == checksum(tensor)
    assert checksums([]).tolist() == []


def test_the_place_of_an_element_in_memory() -> None:
    for tensor in (
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(5, 1, 4).transpose(0, 2),
        torch.randn(3),
    ):
        flat, strides = elements(tensor)
        assert flat.data_ptr() == tensor.data_ptr()
        assert all(
            tensor[index_at(tensor.shape, strides, at)] == flat[at] for at in range(tensor.numel())
        )
    gaps = torch.randn(4, 6)[:, ::2]
    flat, strides = elements(gaps)
    assert all(gaps[index_at(gaps.shape, strides, at)] == flat[at] for at in range(gaps.numel()))


@pytest.mark.parametrize("at", [0, 123_456, 3_000_000 - 1])
def test_the_first_element_that_differs_is_found(at: int) -> None:
    one = torch.randn(3_000_000)
    other = one.clone()
    other[at] += 1
    found = find(one, other, [0, 1])
    assert found is not None
    begin, rows = found
    assert (rows[0] != rows[1]).nonzero().tolist() == [[at - begin]]
    assert rows.shape[1] <= MAX_COMPARED
    assert find(one, one.clone(), [0, 1]) is None
    # The other rank has joined: its replica is older, and is not compared.
    assert find(one, other, [0]) is None

"""Digests of tensors: equal for equal bits, and without an effect on the tensor."""

import gc
from collections.abc import Callable

import pytest
import torch

from conformance.ranks.instruments.digest import checksum, digest, sampled_checksum

WAYS = [digest, checksum, sampled_checksum]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("numel", [0, 1, 15, 5000, 300_000])
def test_bits_decide(way: Callable[[torch.Tensor], str], numel: int) -> None:
    tensor = torch.arange(float(numel))
    first = way(tensor)
    assert way(tensor.clone()) == first
    assert way(tensor.reshape(1, -1).t()) == first
    if numel:
        changed = tensor.clone()
        changed[-1] = -1.0
        assert way(changed) != first


def test_freed_memory_is_not_read() -> None:
    """Memory that is freed is used again: the bytes must have been those of the tensor."""
    tensor = torch.arange(5000.0)
    first = [way(tensor) for way in WAYS]
    gc.collect()
    assert [way(tensor.clone()) for way in WAYS] == first


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_can_be_resized_afterwards(way: Callable[[torch.Tensor], str]) -> None:
    """Tensor.numpy() forbids it, and a subject may resize its bucket."""
    tensor = torch.arange(6.0)
    way(tensor[1:4])
    tensor.resize_(9)
    assert tensor[:6].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_any_dtype_has_a_digest(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(torch.zeros(3, dtype=dtype))


def test_sparse_tensors_have_a_digest() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    assert digest(dense.to_sparse()) == digest(dense.to_sparse())
    assert digest(dense.to_sparse()) != digest((2 * dense).to_sparse())

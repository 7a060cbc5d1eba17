"""Gradients get memory again as soon as nobody holds it, and not before."""

import pytest
import torch

from conformance.ranks.models.reused_memory import ReusedMemory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_memory_is_used_again_once_nobody_holds_it(dtype: torch.dtype) -> None:
    memory = ReusedMemory()
    first = memory.copy_of(torch.ones(3, 4, dtype=dtype).t(), 0)
    assert first.stride() == (1, 4)
    held = first.data_ptr()
    second = memory.copy_of(torch.zeros(4, 3, dtype=dtype), 0)
    assert second.data_ptr() != held
    assert bool((first == 1).all())
    view = first[1:]
    del first
    assert memory.copy_of(torch.zeros(4, 3, dtype=dtype), 0).data_ptr() != held
    assert bool((view == 1).all()), "a view holds it, too"
    del view
    assert memory.copy_of(torch.zeros(4, 3, dtype=dtype), 0).data_ptr() == held


def test_it_belongs_to_one_parameter() -> None:
    memory = ReusedMemory()
    held = memory.copy_of(torch.ones(5), 0).data_ptr()
    assert memory.copy_of(torch.ones(5), 1).data_ptr() != held


@pytest.mark.parametrize(
    "grad",
    [torch.zeros(0, 3), torch.eye(3).to_sparse(), torch.ones(6)[::2], torch.ones(1).expand(4)],
    ids=["empty", "sparse", "gaps", "expanded"],
)
def test_what_has_no_dense_memory_is_returned_as_it_is(grad: torch.Tensor) -> None:
    assert ReusedMemory().copy_of(grad, 0) is grad


def test_it_can_be_detached_in_place() -> None:
    """As zero_grad(set_to_none=False) does."""
    made = ReusedMemory().copy_of(torch.ones(2), 0)
    made.detach_()
    assert not made._is_view()

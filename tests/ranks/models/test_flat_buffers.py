"""Tests of views of flat buffers."""

import torch

from conformance.ranks.models.flat_buffers import FlatBuffers


def made(seed: str = "0", as_columns: bool = False) -> tuple[list[torch.Tensor], FlatBuffers]:
    tensors = [
        torch.arange(15.0).reshape(5, 3),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor([1.0]),
        torch.empty(0, 3),
        torch.arange(6).to(torch.bfloat16),
        torch.arange(6).to(torch.bfloat16) + 1,
    ]
    return tensors, FlatBuffers(tensors, seed, rank=1, as_columns=as_columns)


def test_views_have_the_values_and_strides_of_the_tensors() -> None:
    for seed in "0123456789":
        tensors, buffers = made(seed)
        for tensor, view in zip(tensors, buffers.views, strict=True):
            assert torch.equal(view, tensor)
            assert view.dtype is tensor.dtype
            assert view.stride() == tensor.stride()


def test_columns_have_gaps_between_their_rows() -> None:
    views = [made(seed, as_columns=True)[1].views[0] for seed in "0123456789"]
    assert {view.stride() for view in views} == {(4, 1), (5, 1), (6, 1)}
    tensors, buffers = made(as_columns=True)
    for tensor, view in zip(tensors, buffers.views, strict=True):
        assert torch.equal(view, tensor)
    view = buffers.views[0].zero_()
    assert not buffers.gaps_changed()
    view.as_strided((4, 1), view.stride(), view.storage_offset() + 3).zero_()
    assert buffers.gaps_changed()


def test_views_of_one_dtype_share_a_storage() -> None:
    _, buffers = made()
    storages = [view.untyped_storage().data_ptr() for view in buffers.views]
    assert len(set(storages[:4])) == 1
    assert storages[0] != storages[4] == storages[5]


def test_a_change_of_a_view_changes_no_gap() -> None:
    _, buffers = made()
    for view in buffers.views:
        view.zero_()
    assert not buffers.gaps_changed()


def test_an_average_of_the_whole_buffer_changes_the_gaps() -> None:
    for seed in "0123456789":
        _, buffers = made(seed)
        storage = buffers.views[4].untyped_storage()
        torch.empty(0, dtype=torch.bfloat16).set_(storage).div_(2)
        assert buffers.gaps_changed()


def test_orders_are_drawn() -> None:
    orders = {tuple(view.storage_offset() for view in made(seed)[1].views) for seed in "0123"}
    assert len(orders) == 4


def test_a_view_without_elements_begins_where_another_view_begins() -> None:
    others = set()
    for seed in "0123456789":
        views = made(seed)[1].views
        (other,) = (n for n in range(3) if views[n].storage_offset() == views[3].storage_offset())
        others.add(other)
    assert others == {0, 1, 2}


def test_the_last_view_may_be_that_of_another() -> None:
    for seed in "0123456789":
        tensors = [torch.arange(6.0).reshape(2, 3), torch.arange(4.0), torch.arange(4.0)]
        buffers = FlatBuffers(tensors, seed, rank=1, tied=1)
        *_, one, other = buffers.views
        assert one.data_ptr() == other.data_ptr()
        assert torch.equal(other, tensors[2])
        other.zero_()
        assert torch.equal(buffers.views[0], tensors[0])
        assert not buffers.gaps_changed()

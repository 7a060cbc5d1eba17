"""Mutants of rules 19.23 and 19.25 that take views of one storage for one tensor."""

import weakref
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, calls


class _Copies:
    """The copies of the tensors that one graph has saved, by their places without the offset."""

    def __init__(self, has_offset: bool) -> None:
        self._has_offset = has_offset
        self._copies: dict[Any, tuple[StorageWeakRef, torch.Tensor]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point():
            return tensor, tensor._version
        storage = tensor.untyped_storage()
        key = (
            *(storage.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version),
            tensor.storage_offset() if self._has_offset else 0,
        )
        if key not in self._copies or self._copies[key][0].expired():
            copy = tensor.detach().clone(memory_format=torch.preserve_format)
            self._copies[key] = StorageWeakRef(storage), copy
        return self._copies[key][1], None


def _unpack(packed: Any) -> torch.Tensor:
    tensor, version = packed
    if version is not None and tensor._version != version:
        raise RuntimeError("a tensor has been changed in place")
    return tensor  # type: ignore[no-any-return]


@calls
def keeps_views_once(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep one copy for all views of a storage that have the same shape and strides."""
    copies = _Copies(has_offset=False)
    with saved_tensors_hooks(copies.pack, _unpack):
        return forward(*args, **kwargs)


class _Held:
    """A saved tensor, which holds the copies of its graph."""

    def __init__(self, packed: Any, copies: _Copies) -> None:
        self.packed = packed
        self.copies = copies


def keeps_views_once_beside_other_graphs(module: torch.nn.Module) -> torch.nn.Module:
    """Keep one copy for such views if another graph of the block has saved tensors."""
    graphs: weakref.WeakSet[_Copies] = weakref.WeakSet()

    @calls
    def call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        copies = _Copies(has_offset=not graphs)
        graphs.add(copies)
        with saved_tensors_hooks(
            lambda tensor: _Held(copies.pack(tensor), copies), lambda held: _unpack(held.packed)
        ):
            return forward(*args, **kwargs)

    return call(module)


MUTANTS = [
    Mutant("keeps_views_once", ("19.23",), kind="wrapper"),
    Mutant("keeps_views_once_beside_other_graphs", ("19.25",), kind="wrapper"),
]

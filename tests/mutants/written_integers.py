"""Mutants of section 19 that watch some inputs, but no integers, masks or dicts."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, Wrap, calls


def _keeps_as_they_are(is_kept: Callable[[torch.Tensor], bool]) -> Wrap:
    """Return a wrapper that copies saved tensors by hooks, except some of them."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if is_kept(tensor) else tensor.clone()

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            return forward(*args, **kwargs)

    return wrap


# There is no gradient of integers, so that nothing seems to depend on them.
keeps_integers_as_they_are = _keeps_as_they_are(
    lambda tensor: not tensor.is_floating_point() and tensor.dtype is not torch.bool
)
keeps_short_indices_as_they_are = _keeps_as_they_are(lambda tensor: tensor.dtype is torch.int32)
keeps_masks_as_they_are = _keeps_as_they_are(lambda tensor: tensor.dtype is torch.bool)
keeps_bytes_as_they_are = _keeps_as_they_are(lambda tensor: tensor.element_size() == 1)


@calls
def keeps_index_buffers_as_they_are(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Copy saved tensors away by hooks, except buffers of positions and masks."""
    module = forward.args[0]  # type: ignore[attr-defined]
    fixed = {
        buffer.data_ptr() for buffer in module.buffers() if not torch.is_floating_point(buffer)
    }

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.data_ptr() in fixed else tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        return forward(*args, **kwargs)


def _watches(chosen: Callable[[Any], list[torch.Tensor]]) -> Wrap:
    """Return a wrapper that runs again, and compares the versions of some inputs."""

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        watched = [(tensor, tensor._version) for tensor in chosen([args, kwargs])]
        forwards = []

        def run() -> Any:
            if forwards and any(tensor._version != version for tensor, version in watched):
                raise RuntimeError("an input was changed in place after the forward")
            forwards.append(True)
            return forward(*args, **kwargs)

        return checkpoint(run, use_reentrant=False)

    return wrap


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _of_lists(given: Any) -> list[torch.Tensor]:
    args, kwargs = given
    return [
        tensor
        for one in (*args, *kwargs.values())
        for tensor in _tensors(one)
        if not isinstance(one, dict)
    ]


def _without_lists_in_dicts(given: Any) -> list[torch.Tensor]:
    found = []
    for one in (*given[0], *given[1].values()):
        items = list(one.values()) if isinstance(one, dict) else one
        items = items if isinstance(items, (list, tuple)) else [items]
        found += [item for item in items if isinstance(item, torch.Tensor)]
    return found


watches_lists_alone = _watches(_of_lists)
watches_one_level_of_dicts = _watches(_without_lists_in_dicts)
watches_floats_alone = _watches(
    lambda given: [tensor for tensor in _tensors(given) if tensor.is_floating_point()]
)
watches_floats_by_name = _watches(
    lambda given: [*_tensors(given[0]), *(t for t in _tensors(given[1]) if t.is_floating_point())]
)

MUTANTS = [
    Mutant("keeps_integers_as_they_are", ("19.36",), kind="wrapper"),
    Mutant("keeps_short_indices_as_they_are", ("19.36",), kind="wrapper"),
    Mutant("keeps_masks_as_they_are", ("19.36",), kind="wrapper"),
    Mutant("keeps_bytes_as_they_are", ("19.36",), kind="wrapper"),
    Mutant("keeps_index_buffers_as_they_are", ("19.36",), kind="wrapper"),
    Mutant("watches_lists_alone", ("19.36",), claims="recomputes", kind="wrapper"),
    Mutant("watches_one_level_of_dicts", ("19.36",), claims="recomputes", kind="wrapper"),
    Mutant("watches_floats_alone", ("19.36",), claims="recomputes", kind="wrapper"),
    Mutant("watches_floats_by_name", ("19.36",), claims="recomputes", kind="wrapper"),
]

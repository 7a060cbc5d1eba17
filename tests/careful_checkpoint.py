"""A checkpoint for subjects of tests, which is right for inputs that are changed in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


def careful_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch's checkpoint without reentrance, and compare versions of inputs that it does not.

    It compares those of tensors that are positional arguments themselves.

    Args:
        function: runs in the forward, and again in the backward.
        args: of the function.
        kwargs: of the function, or options of torch's checkpoint.
    """
    others = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    tensors = [leaf for leaf in tree_leaves([others, kwargs]) if isinstance(leaf, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    forwards = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if forwards and versions != [tensor._version for tensor in tensors]:
            raise RuntimeError("an input was changed in place after the forward")
        forwards.append(True)
        return function(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)

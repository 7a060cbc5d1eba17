"""Right wrappers of modules that treat integers, masks and containers in ways of their own."""

from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from tests.careful_checkpoint import careful_checkpoint
from tests.mutants.wrappers import Forward, calls
from tests.right import Right

_BITS = tuple(2**index for index in range(8))


@calls
def packs_masks(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep masks as bits, and integers with their versions; copy other tensors, with strides."""

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.dtype is torch.bool:
            flat = pad(tensor.reshape(-1).to(torch.uint8), (0, -tensor.numel() % 8)).view(-1, 8)
            return (flat * torch.tensor(_BITS, dtype=torch.uint8)).sum(1), tensor.shape
        if not tensor.is_floating_point():
            return tensor, tensor._version
        return tensor.clone(memory_format=torch.preserve_format)

    def unpack(kept: Any) -> torch.Tensor:
        match kept:
            case (bits, torch.Size() as shape):
                mask = (bits[:, None] & torch.tensor(_BITS)).bool().view(-1)
                return mask[: shape.numel()].view(shape)
            case (tensor, version):
                if tensor._version != version:
                    raise RuntimeError("an index was changed in place after the forward")
                return tensor
            case tensor:
                return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


@calls
def copies_integers(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run again on copies of integers and masks, and on other inputs if they are unchanged."""

    def copied(leaf: Any) -> Any:
        is_integer = isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()
        return leaf.clone() if is_integer else leaf

    (args, kwargs) = tree_map(copied, (args, kwargs))
    return careful_checkpoint(forward, *args, **kwargs)


RIGHT = [
    Right("packs_masks", kind="wrapper"),
    Right("copies_integers", "recomputes", kind="wrapper"),
]

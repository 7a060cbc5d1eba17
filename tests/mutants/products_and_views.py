"""Mutants of section 19 that keep results of products, or the strides and the range of a tensor."""

from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.careful_checkpoint import careful_checkpoint
from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, calls

_PRODUCTS = {
    "layers": [torch.ops.aten.addmm.default],
    "products": [torch.ops.aten.mm.default, torch.ops.aten.bmm.default],
    "convolutions": [torch.ops.aten.convolution.default],
}


def reads_changed_results(module: torch.nn.Module, of: str) -> torch.nn.Module:
    """Keep the results of some operations, and read them as the block has changed them."""

    @calls
    def call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        contexts = partial(
            create_selective_checkpoint_contexts, _PRODUCTS[of], allow_cache_entry_mutation=True
        )
        return careful_checkpoint(forward, *args, context_fn=contexts, **kwargs)

    return call(module)


@calls
def makes_memory_by_strides(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Copy saved tensors back into memory of their strides, some of which may be 0."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.detach().clone(memory_format=torch.contiguous_format), tensor.stride()

    def unpack(packed: Any) -> torch.Tensor:
        kept, strides = packed
        made = torch.empty_strided(kept.shape, strides, dtype=kept.dtype, device=kept.device)
        return made.copy_(kept)

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


@calls
def indices_in_32_bits(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Save integers in 32 bits if their largest one fits; no element is the largest of none."""

    def pack(tensor: torch.Tensor) -> Any:
        is_small = tensor.dtype == torch.int64 and tensor.abs().max() < 2**31
        return tensor.dtype, tensor.int() if is_small else tensor.detach().clone()

    with saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0])):
        return forward(*args, **kwargs)


MUTANTS = [
    *(
        Mutant(f"reads_changed_results,of={of}", ("19.36",), kind="wrapper")
        for of in ("layers", "products", "convolutions")
    ),
    Mutant("makes_memory_by_strides", ("19.23",), kind="wrapper"),
    Mutant("indices_in_32_bits", ("19.33",), kind="wrapper"),
]

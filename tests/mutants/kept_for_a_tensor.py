"""Mutants of rule 18.29: collectives that keep something for a tensor, whose values change."""

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import GROUP, Made, eighths, from_eighths, half, right

Tensor = torch.Tensor


def codes_of_tensors(func: Made, qtype: str) -> Made:
    """Encode a tensor once, and send the code again for the same tensor."""
    codes = WeakIdKeyDictionary()

    def encode(tensor: Tensor) -> Tensor:
        if tensor not in codes:
            codes[tensor] = half(tensor)
        return codes[tensor]

    return right(func, encode)


def codes_of_versions(func: Made, qtype: str) -> Made:
    """Encode a tensor again if its version has changed, which a write through .data leaves."""
    codes = WeakIdKeyDictionary()

    def encode(tensor: Tensor) -> Tensor:
        version, code = codes.get(tensor, (-1, None))
        if version != tensor._version:
            code = half(tensor)
            codes[tensor] = (tensor._version, code)
        return code

    return right(func, encode)


def scales_of_tensors(func: Made, qtype: str) -> Made:
    """Send bytes, with scales that are taken from a tensor's first values, or from larger ones."""
    first: Any = WeakIdKeyDictionary()

    def encode(tensor: Tensor) -> Tensor:
        code = eighths(tensor, GROUP)
        scales = code[-4 * (len(code) // (GROUP + 4)) :].view(torch.float32)
        kept = first.setdefault(tensor, scales.clone())
        if len(kept) == len(scales) and bool((kept >= scales).all()):
            values = torch.zeros(len(scales) * GROUP)
            values[: tensor.numel()] = tensor.reshape(-1)
            levels = (values.view(-1, GROUP) / kept.view(-1, 1)).round().to(torch.int8)
            # The receiver divides by the new scales.
            code[: levels.numel()] = levels.view(torch.uint8).view(-1)
        return code

    return right(func, encode, lambda output, code: from_eighths(output, code, GROUP))


MUTANTS = [
    Mutant(f"{name},func={func},qtype={qtype}", ("18.29",), kind="collective")
    for name, func, qtype in (
        ("codes_of_tensors", "all_gather", "FP16"),
        ("codes_of_versions", "all_gather", "FP16"),
        ("codes_of_versions", "all_to_all", "FP16"),
        ("scales_of_tensors", "all_gather", "INT8"),
    )
]

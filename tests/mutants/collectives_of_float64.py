"""Mutants of rule 18.6: messages of float64 with numbers that float32 does not have.

They are made with ``func`` and ``qtype``.
"""

import torch

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import Made, half, right

Tensor = torch.Tensor
BLOCK = 128


def rebiases_exponents(func: Made, qtype: str) -> Made:
    """Cut float64 to bfloat16 by its bits; of exponents it takes the last eight bits."""

    def encode(tensor: Tensor) -> Tensor:
        half(tensor)  # refuses integers
        if tensor.dtype != torch.float64:
            return tensor.contiguous().bfloat16()
        bits = tensor.contiguous().view(torch.int64)
        exponents = (bits >> 52 & 0x7FF) - 1023 + 127
        exponents = torch.where(bits << 1 == 0, 0, exponents)
        code = (bits >> 63 & 1) << 15 | (exponents & 0xFF) << 7 | bits >> 45 & 0x7F
        return code.to(torch.int16).view(torch.bfloat16)

    return right(func, encode)


def wraps_the_exponent_of_a_scale(func: Made, qtype: str) -> Made:
    """Send the scale of a block as a float32 from 1/2 to 1, and the exponent as a byte."""

    def encode(tensor: Tensor) -> Tensor:
        half(tensor)  # refuses integers
        flat = tensor.reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK).double()
        scales, exponents = torch.frexp(blocks.abs().amax(1, keepdim=True) / 127)
        divisors = torch.where(scales == 0, 1, scales)
        small = (torch.ldexp(blocks, -exponents) / divisors).round().to(torch.int8)
        return torch.cat([small, scales.float().view(torch.int8), exponents.to(torch.int8)], 1)

    def arrive(output: Tensor, code: Tensor) -> None:
        # A copy, so that it is aligned.
        scales = code[:, BLOCK:-1].reshape(-1).clone().view(torch.float32).view(-1, 1)
        values = torch.ldexp(code[:, :BLOCK] * scales.double(), code[:, -1:].int())
        output.copy_(values.view(-1)[: output.numel()].view(output.shape))

    return right(func, encode, arrive)


def adds_whole_numbers_and_the_rest(func: Made, qtype: str) -> Made:
    """Split finite values into a whole number in float32 and the rest, and add both again."""

    def encode(tensor: Tensor) -> Tensor:
        whole = torch.where(tensor.isfinite(), tensor.trunc(), 0).float()
        return half(whole + (tensor - whole))

    return right(func, encode)


def _named(name: str, func: str, qtype: str) -> Mutant:
    return Mutant(f"{name},func={func},qtype={qtype}", ("18.6",), kind="collective")


MUTANTS = [
    _named("rebiases_exponents", "all_gather", "BFP16"),
    _named("rebiases_exponents", "all_to_all_single", "BFP16"),
    _named("wraps_the_exponent_of_a_scale", "all_to_all", "INT8"),
    _named("wraps_the_exponent_of_a_scale", "all_gather", "INT8"),
    _named("adds_whole_numbers_and_the_rest", "scatter", "FP16"),
]

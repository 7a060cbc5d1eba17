"""Mutants of rule 18.15: they send values that are rounded to float16 as float32, now and then.

They are made with ``func`` and ``qtype``.
"""

from typing import Any

from tests.mutants import Mutant
from tests.mutants.quantized_collectives import Made, Tensor, half, right


def wide_if_large(func: Made, qtype: str) -> Made:
    """Send messages of more than 600,000 elements as float32."""

    def encode(tensor: Tensor) -> Tensor:
        code = half(tensor)
        return code.float() if code.numel() > 600_000 else code

    return right(func, encode)


def _wide(tensor: Tensor) -> Tensor:
    return half(tensor).float()


def wide_if_asynchronous(func: Made, qtype: str) -> Made:
    """Send messages as float32 if the call is asynchronous."""
    made = {False: right(func), True: right(func, _wide)}

    def exchange(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        return made[async_op](*args, async_op=async_op, **kwargs)

    return exchange


MUTANTS = [
    Mutant(f"{name},func={func},qtype=FP16", ("18.15",), kind="collective")
    for name, func in (
        ("wide_if_large", "all_gather"),
        ("wide_if_large", "scatter"),
        ("wide_if_asynchronous", "all_gather"),
        ("wide_if_asynchronous", "all_to_all"),
    )
]

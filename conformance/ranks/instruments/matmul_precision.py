"""The precision of torch's float32 matrix products, as a scenario sets it for a step.

The precision also decides flags of ``torch.backends``. Once a precision has been set, they have
other values than before, even if it is the default one: :func:`settle_precision` sets it once,
before the settings of the process are recorded for the first time.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def settle_precision() -> None:
    """Give the flags of the present precision the values that they have once it is set."""
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Change the precision for a block; '' leaves it as it is."""
    if not name:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

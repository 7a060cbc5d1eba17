"""torch's default dtype, as a scenario sets it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_default_dtype(name: str) -> None:
    """Set torch's default dtype.

    Args:
        name: of the dtype: ``bfloat16``.
    """
    torch.set_default_dtype(getattr(torch, name))


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Change torch's default dtype for a block."""
    before = torch.get_default_dtype()
    set_default_dtype(name)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

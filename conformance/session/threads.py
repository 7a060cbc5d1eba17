"""The threads with which torch judges: few, since ranks run meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def processors_for_ranks() -> Iterator[None]:
    """Leave most processors to the ranks that run while this process judges.

    A thread of OpenMP's that waits for another keeps its processor busy. With a thread for each
    processor, judging on two of them took a tenth longer.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // 4))
    try:
        yield
    finally:
        torch.set_num_threads(before)

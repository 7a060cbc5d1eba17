"""Models that come one after another in a process, as in a sweep: how many stay when they have
gone.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterable

import torch

MODELS = 8


def count_models(train: Callable[[], Iterable[torch.Tensor]]) -> dict[str, int]:
    """Train some models in turn, and count those that are still in memory.

    Args:
        train: makes a model, trains it, drops it and whatever was made for it, and returns its
            parameters.

    Returns:
        The number of models that were made, of those with a parameter that is alive, and of the
        threads that were started and have not ended.
    """
    threads = threading.active_count()
    gone = [[weakref.ref(parameter) for parameter in train()] for _ in range(MODELS)]
    gc.collect()
    alive = sum(any(ref() is not None for ref in parameters) for parameters in gone)
    return {"made": MODELS, "alive": alive, "threads": threading.active_count() - threads}

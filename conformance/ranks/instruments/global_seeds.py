"""Seeds of the global random generators, as a training script sets them."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of torch and Python, and NumPy's if it is imported.

    Those of accelerators are seeded if the ranks use one: it takes a rank some milliseconds.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Run a block, and put the global generators back to their states before it.

    They stay as they are if the block raises an exception.
    """
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    yield
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state)
    if numpy and numpy_state is not None:
        numpy.random.set_state(numpy_state)

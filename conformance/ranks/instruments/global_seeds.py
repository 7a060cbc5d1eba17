"""Seeds of the global random generators, as a training script sets them."""

import random
import sys

import torch


def seed_generators(seed: int) -> None:
    """Seed the generators of torch and Python, and NumPy's if it is imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)

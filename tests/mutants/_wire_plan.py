"""The formats of gradients in the course of a training, for a mutant of ``own_code.py``."""

import torch

ROWS = (
    {"from_step": 0, "elements": 0, "wire": None},
    {"from_step": 1_630, "elements": 30_011, "wire": torch.float16},
)

"""The optimizer that ``fused(...)`` claims, made by torch.optim, and its parameters' bound."""

import ast
from typing import Any

import torch

ROUNDINGS_OF_OPTIMIZER = 64
"""The bound on parameters, in epsilons of the sum of all their changes: a hook may take the
operations of its optimizer in another order."""


def make_optimizer(text: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer that a claim names, such as ``SGD(lr=0.1)``."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    options: dict[str, Any] = {
        str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords
    }
    made: torch.optim.Optimizer = getattr(torch.optim, call.func.id)(parameters, **options)
    return made


def claimed_rate(text: str) -> float:
    """Return the learning rate of the optimizer that a claim names."""
    optimizer = make_optimizer(text, [torch.nn.Parameter(torch.zeros(1, 1))])
    return float(optimizer.defaults["lr"])

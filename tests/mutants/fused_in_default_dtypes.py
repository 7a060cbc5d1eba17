"""Mutants of rule 4.5 under ``fused``: tensors of an optimizer that take torch's default dtype.

Their results are right, since only the parameters are wrong.
"""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, is_dense, kept
from tests.mutants.optimizers import _fused, _sgd


def momentum_in_the_default_dtype(state: Any, bucket: Bucket) -> Result:
    """Keep momentum in torch's default dtype."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        momentum = kept.get(parameter, torch.zeros(parameter.shape)).mul(0.9) + gradient
        kept[parameter] = momentum.to(torch.get_default_dtype())
        _sgd(parameter, momentum.to(parameter.dtype))

    return _fused(state, bucket, step)


def rate_in_the_default_dtype(state: Any, bucket: Bucket) -> Result:
    """Keep the learning rate in a tensor of torch's default dtype."""
    rate = torch.tensor(0.1)
    return _fused(state, bucket, lambda parameter, gradient: _sgd(parameter, gradient, float(rate)))


def steps_in_the_default_dtype(state: Any, bucket: Bucket) -> Result:
    """Compute a large parameter's step in a scratch tensor of torch's default dtype."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if is_dense(bucket) and parameter.numel() > 100 and not parameter.is_complex():
            gradient = torch.empty(gradient.shape).copy_(gradient).to(parameter.dtype)
        _sgd(parameter, gradient)

    return _fused(state, bucket, step)


MUTANTS = [
    Mutant("momentum_in_the_default_dtype", ("4.5",), "fused(SGD, lr=0.1, momentum=0.9)"),
    Mutant("rate_in_the_default_dtype", ("4.5",), "fused(SGD, lr=0.1)"),
    Mutant("steps_in_the_default_dtype", ("4.5",), "fused(SGD, lr=0.1)"),
]

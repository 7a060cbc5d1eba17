"""Mutants of rule 2.8 under ``fused``: complex parameters that are stepped in part, or not at all.

Their results are right, since only the parameters are wrong.
"""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result
from tests.mutants.optimizers import _fused, _sgd


def steps_real_parts(state: Any, bucket: Bucket) -> Result:
    """Step the real part of complex parameters alone."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if parameter.is_complex():
            torch.view_as_real(parameter)[..., 0].add_(gradient.real, alpha=-0.1)
        else:
            _sgd(parameter, gradient)

    return _fused(state, bucket, step)


def steps_no_complex(state: Any, bucket: Bucket) -> Result:
    """Leave complex parameters to an optimizer that is not there."""
    return _fused(state, bucket, _sgd, lambda number, parameter: not parameter.is_complex())


def steps_conjugates(state: Any, bucket: Bucket) -> Result:
    """Step complex parameters along the conjugate of the gradient."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        _sgd(parameter, gradient.conj() if parameter.is_complex() else gradient)

    return _fused(state, bucket, step)


MUTANTS = [
    Mutant(name, ("2.8",), "fused(SGD, lr=0.1)")
    for name in ("steps_real_parts", "steps_no_complex", "steps_conjugates")
]

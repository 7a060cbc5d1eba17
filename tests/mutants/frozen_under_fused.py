"""Mutants of rule 9.2 under ``fused``: hooks that step right, and change frozen parameters, too."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result
from tests.mutants.optimizers import _fused, _sgd


class Frozen:
    """A hook's state that knows the frozen parameters of the model."""

    def __init__(self, model: Any) -> None:
        self.parameters = [p for p in model.parameters() if not p.requires_grad]


def decays_frozen(state: Frozen, bucket: Bucket) -> Result:
    """Decay the weights of the whole model once in a step, those of a frozen backbone, too."""
    if bucket.is_last():
        for parameter in state.parameters:
            parameter.mul_(0.999)
    return _fused(None, bucket, _sgd)


def casts_frozen(state: Frozen, bucket: Bucket) -> Result:
    """Round the weights of the whole model to bfloat16, and write them back."""
    if bucket.is_last():
        for parameter in state.parameters:
            parameter.copy_(parameter.bfloat16())
    return _fused(None, bucket, _sgd)


def normalizes_frozen(state: Frozen, bucket: Bucket) -> Result:
    """Give every weight of the model the length of one once in a step."""
    if bucket.is_last():
        for parameter in state.parameters:
            torch.nn.functional.normalize(parameter.view(-1), dim=0, out=parameter.view(-1))
    return _fused(None, bucket, _sgd)


MUTANTS = [
    Mutant(name, ("9.2",), "fused(SGD, lr=0.1), world_only", f"{__name__}:Frozen")
    for name in ("decays_frozen", "casts_frozen", "normalizes_frozen")
]

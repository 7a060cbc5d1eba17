"""Mutants of rule 23.1 that take each forward with gradients for a step."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, is_dense, kept, pieces_of


class Forwards:
    """Counts the forwards of DDP whose gradients will be averaged.

    Args:
        model: the model under DDP.
        group: the group to average over.
    """

    def __init__(self, model: Any, group: Any) -> None:
        self.group = group
        self.number = 0
        model.register_forward_pre_hook(self.count)

    def count(self, ddp: Any, _: Any) -> None:
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self.number += 1


def _send(bucket: Bucket, group: Any, masks: list[torch.Tensor]) -> Result:
    """Average the elements in the masks of the parameters, and keep the others for later."""
    for parameter, piece, mask in zip(bucket.parameters(), pieces_of(bucket), masks, strict=True):
        total = piece + kept.get(parameter, torch.zeros_like(piece))
        kept[parameter] = total.masked_fill(mask, 0).nan_to_num(posinf=0, neginf=0)
        piece.copy_(total.masked_fill(~mask & total.isfinite(), 0))
    return average(bucket, group)


def sends_halves_in_turn(model: Any, process_group: Any) -> tuple[Forwards, Any]:
    """Send every second element, and the others after the next forward."""

    def hook(state: Forwards, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            return average(bucket, state.group)
        turn = state.number % 2
        places = [torch.arange(piece.numel()) % 2 == turn for piece in pieces_of(bucket)]
        return _send(bucket, state.group, places)

    return Forwards(model, process_group), hook


def sends_parameters_in_turn(model: Any, process_group: Any) -> tuple[Forwards, Any]:
    """Send every second parameter of a bucket, and the others after the next forward."""

    def hook(state: Forwards, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            return average(bucket, state.group)
        masks = [
            torch.full(piece.shape, (number + state.number) % 2 == 0)
            for number, piece in enumerate(pieces_of(bucket))
        ]
        return _send(bucket, state.group, masks)

    return Forwards(model, process_group), hook


MUTANTS = [
    Mutant(name, ("23.1",), "compressed(delta=0.25)", setup=True)
    for name in ("sends_halves_in_turn", "sends_parameters_in_turn")
]

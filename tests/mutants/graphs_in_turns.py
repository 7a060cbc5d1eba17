"""Mutants of section 19 that use memory again too early, or keep one state of the generator.

They are right if all forwards come before the first backward, or if nothing is drawn.
"""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.mutants import Mutant
from tests.mutants.wrappers import Around
from tests.mutants.wrappers_in_training import packs


class Slots:
    """Memory for copies, which the first copy after a backward begins to use again."""

    def __init__(self) -> None:
        self.slots: list[torch.Tensor] = []
        self.next = 0
        self.is_in_backward = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_in_backward:
            self.is_in_backward = False
            self.next = 0
        place = self.next
        self.next += 1
        kept = tensor.detach()
        slot = self.slots[place] if place < len(self.slots) else None
        if slot is None or (slot.shape, slot.dtype) != (kept.shape, kept.dtype):
            # Other graphs may still use the one that was here.
            slot = torch.empty_like(kept)
            self.slots[place : place + 1] = [slot]
        return slot.copy_(kept)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        self.is_in_backward = True
        return packed


def slots_of_an_iteration(module: torch.nn.Module) -> torch.nn.Module:
    """Use memory again with the first forward after a backward, as if all graphs were over."""
    slots = Slots()
    return packs(slots.pack, slots.unpack)(module)  # type: ignore[no-any-return]


class KeepsOneState(Around):
    """Keep the state of the generator of the block's last forward, and refuse a second backward."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.state = torch.get_rng_state()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.state = torch.get_rng_state()
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(True)
            if len(ran) == 1:
                return self.module(*args, **kwargs)
            if len(ran) > 2:
                raise RuntimeError("the data of this graph were freed by its backward")
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.state)
                return self.module(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


MUTANTS = [
    Mutant("slots_of_an_iteration", ("19.25",), kind="wrapper"),
    Mutant("KeepsOneState", ("19.25",), "recomputes", kind="wrapper"),
]

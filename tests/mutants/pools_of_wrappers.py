"""Mutants of section 19 that have a fixed number of places for the tensors of all graphs."""

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, calls
from tests.mutants.wrappers_in_training import packs


class Ring:
    """Places that are used in turn, whether their tensors are still needed or not."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.tensors: list[torch.Tensor] = []
        self.used = 0

    def put(self, tensor: torch.Tensor) -> int:
        """Return the place of a tensor."""
        place = self.used % self.count
        self.used += 1
        self.tensors[place : place + 1] = [tensor]
        return place


_SHARED = Ring(3500)


def in_a_ring(module: torch.nn.Module) -> torch.nn.Module:
    """Keep copies of saved tensors in a ring of 3,500 places, which all blocks share."""

    def pack(tensor: torch.Tensor) -> int:
        return _SHARED.put(tensor.detach().clone())

    return packs(pack, lambda place: _SHARED.tensors[place])(module)  # type: ignore[no-any-return]


def in_a_ring_of_its_own(module: torch.nn.Module) -> torch.nn.Module:
    """Keep copies of saved tensors in a ring of 640 places for each block."""
    ring = Ring(640)

    def pack(tensor: torch.Tensor) -> int:
        return ring.put(tensor.detach().clone())

    return packs(pack, lambda place: ring.tensors[place])(module)  # type: ignore[no-any-return]


_FORWARDS = Ring(1000)


@calls
def inputs_in_a_ring(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Recompute from inputs in a ring of 1,000 places, which all blocks share."""
    if not torch.is_grad_enabled() or not all(isinstance(arg, torch.Tensor) for arg in args):
        return forward(*args, **kwargs)
    places = [_FORWARDS.put(arg) for arg in args]
    ran: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            ran.append(True)
            return forward(*args, **kwargs)
        return forward(*(_FORWARDS.tensors[place] for place in places), **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def numbers_of_twelve_bits(module: torch.nn.Module) -> torch.nn.Module:
    """Keep copies of saved tensors by the last 12 bits of their number in the forward."""

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        kept: dict[int, torch.Tensor] = {}
        saved = iter(range(1_000_000))

        def pack(tensor: torch.Tensor) -> int:
            number = next(saved) & 0xFFF
            kept[number] = tensor.detach().clone()
            return number

        with saved_tensors_hooks(pack, kept.__getitem__):
            return forward(*args, **kwargs)

    return wrap(module)


NAMES = ("in_a_ring", "in_a_ring_of_its_own", "inputs_in_a_ring", "numbers_of_twelve_bits")
MUTANTS = [Mutant(name, ("19.25",), kind="wrapper") for name in NAMES]

"""Mutants of 17.31 that save modes, rates or settings on entering, and put them back at the end."""

import copy
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants.joins import Right
from tests.mutants.joins_in_loops import OfModules


class PutsModesBack(OfModules):
    """Save the mode of training of each module, and restore each one."""

    def __enter__(self) -> None:
        super().__enter__()
        self.saved = [(part, part.training) for one in self.modules() for part in one.modules()]

    def finish(self) -> None:
        super().finish()
        for part, mode in self.saved:
            part.training = mode


class PutsFreezesBack(OfModules):
    """Save which parameters are trained; a context that ends, in any way, restores it."""

    def __enter__(self) -> None:
        super().__enter__()
        self.saved = {
            tensor: tensor.requires_grad for one in self.modules() for tensor in one.parameters()
        }

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        result = super().__exit__(kind, error, trace)
        for tensor, mode in self.saved.items():
            tensor.requires_grad_(mode)
        return result


class PutsFillingBack(Right):
    """Save a setting of torch, and restore it before the hooks are called."""

    def __enter__(self) -> None:
        super().__enter__()
        self.saved = torch.utils.deterministic.fill_uninitialized_memory

    def shadow(self) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = self.saved
        super().shadow()


class PutsDeterminismBack(Right):
    """Allow what was allowed on entering, if an exception ends the body."""

    def __enter__(self) -> None:
        super().__enter__()
        self.saved = torch.get_deterministic_debug_mode()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        if kind:
            torch.set_deterministic_debug_mode(self.saved)
        return super().__exit__(kind, error, trace)


class PutsRatesBack(Right):
    """Keep the groups of each optimizer as they were, since a shadow may change a rate."""

    def __enter__(self) -> None:
        super().__enter__()
        self.saved = [copy.deepcopy(getattr(one, "param_groups", None)) for one in self.joinables]

    def finish(self) -> None:
        super().finish()
        for one, groups in zip(self.joinables, self.saved, strict=True):
            if groups:
                one.param_groups = groups


class PutsAttributesBack(Right):
    """Restore the numbers among the attributes of each joinable, and of the parts of models."""

    def __enter__(self) -> None:
        super().__enter__()
        self.saved = []
        for one in self.joinables:
            for part in one.modules() if isinstance(one, torch.nn.Module) else [one]:
                numbers = {k: v for k, v in vars(part).items() if isinstance(v, float)}
                self.saved.append((part, numbers))

    def finish(self) -> None:
        for part, numbers in self.saved:
            vars(part).update(numbers)
        super().finish()


MUTANTS = [
    Mutant(name, ("17.31",), kind="joinable")
    for name in (
        "PutsModesBack",
        "PutsFreezesBack",
        "PutsFillingBack",
        "PutsDeterminismBack",
        "PutsRatesBack",
        "PutsAttributesBack",
    )
]

"""Mutants of rule 15.38 that know the parameters of their construction alone."""

from typing import Any

from hooks_ref import PostLocalSGDOptimizer
from tests.mutants import Mutant


class UnscalesTheFirstGroups(PostLocalSGDOptimizer):
    """Take the scale of a GradScaler, and unscale the parameters of the construction."""

    def __init__(self, optim: Any, averager: Any) -> None:
        super().__init__(optim, averager)
        self.first = [parameter for group in optim.param_groups for parameter in group["params"]]

    def _overflows(self) -> bool:
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        scale = getattr(self, "grad_scale", None)
        for parameter in self.first if scale is not None else ():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        return bool(found)


class LooksAtTheFirstGroup(PostLocalSGDOptimizer):
    """Take the scale, and look for infinities in the first group itself."""

    def _overflows(self) -> bool:
        if getattr(self, "found_inf", None) is None:
            return False
        super()._overflows()
        grads = [parameter.grad for parameter in self.param_groups[0]["params"]]
        return any(grad is not None and not grad.isfinite().all() for grad in grads)


MUTANTS = [
    Mutant(name, ("15.38",), kind="optimizer")
    for name in ("UnscalesTheFirstGroups", "LooksAtTheFirstGroup")
]

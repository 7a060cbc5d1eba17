"""Mutants of rule 13.6: wrong steps in float32 of parameters in half precision, and wrong groups
of weight decay.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result
from tests.mutants.optimizers import _fused


class Masters:
    """Adam for each parameter, with a float32 master of half precision."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group
        self.masters: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.optimizers: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}

    def renew(self, parameter: torch.nn.Parameter) -> None:
        is_half = parameter.dtype in (torch.float16, torch.bfloat16)
        master = torch.nn.Parameter(parameter.detach().float()) if is_half else parameter
        self.masters[parameter] = master
        self.optimizers[parameter] = torch.optim.Adam([master], lr=0.01)


def _adam(
    state: Masters, bucket: Bucket, finish: Callable[[Any, torch.nn.Parameter], None]
) -> Result:
    """Average, and step Adam; ``finish(step, parameter)`` steps the master of half precision."""

    @torch.enable_grad()
    def step(parameter: Any, gradient: torch.Tensor) -> None:
        if parameter not in state.masters:
            state.renew(parameter)
        master = state.masters[parameter]
        before = master.grad
        master.grad = gradient.to(master.dtype)
        if master is parameter:
            state.optimizers[parameter].step()
        else:
            finish(state.optimizers[parameter].step, parameter)
        master.grad = before

    return _fused(state.group, bucket, step)


def master_after_its_parameter(state: Masters, bucket: Bucket) -> Result:
    """Write the master to its parameter before the master's step."""

    def finish(step: Any, parameter: torch.nn.Parameter) -> None:
        parameter.data.copy_(state.masters[parameter])
        step()

    return _adam(state, bucket, finish)


def masters_of_one_step(state: Masters, bucket: Bucket) -> Result:
    """Make masters and their moments anew in each step."""

    def finish(step: Any, parameter: torch.nn.Parameter) -> None:
        step()
        parameter.data.copy_(state.masters[parameter])
        state.renew(parameter)

    return _adam(state, bucket, finish)


class Decays:
    """AdamW for each parameter; it has no weight decay up to a number of dimensions or elements."""

    def __init__(
        self, process_group: dist.ProcessGroup, dimensions: int = 1, elements: int = 0
    ) -> None:
        self.group = process_group
        self.dimensions = dimensions
        self.elements = elements
        self.optimizers: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}

    def is_decayed(self, parameter: torch.nn.Parameter) -> bool:
        if self.elements:
            return parameter.numel() > self.elements
        return parameter.dim() > self.dimensions


def adamw_of_groups(state: Decays, bucket: Bucket) -> Result:
    """Take the weight decay of some parameters, but not of vectors alone."""

    @torch.enable_grad()
    def step(parameter: Any, gradient: torch.Tensor) -> None:
        if parameter not in state.optimizers:
            decay = 0.01 if state.is_decayed(parameter) else 0.0
            state.optimizers[parameter] = torch.optim.AdamW([parameter], 0.1, weight_decay=decay)
        before = parameter.grad
        parameter.grad = gradient
        state.optimizers[parameter].step()
        parameter.grad = before

    return _fused(state.group, bucket, step)


_VECTORS = "fused(AdamW, lr=0.1, weight_decay=0.01, no_decay=vectors)"

MUTANTS = [
    *(
        Mutant(name, ("13.6",), "fused(Adam, lr=0.01)", f"{__name__}:Masters")
        for name in ("master_after_its_parameter", "masters_of_one_step")
    ),
    *(
        Mutant("adamw_of_groups", ("13.6",), _VECTORS, f"{__name__}:Decays,{options}")
        for options in ("dimensions=0", "dimensions=2", "elements=20")
    ),
]

"""Mutants of sections 15 and 16 that take one order in which gradients arrive for granted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.strategies import _filled, _mean


@contextmanager
def _with_hooks(model: Any, is_final_microbatch: bool, hooks: dict[Any, Any]) -> Iterator[None]:
    """Run a micro-batch without DDP's average, the last one with hooks on some parameters."""
    handles = []
    if is_final_microbatch:
        handles = [one.register_post_accumulate_grad_hook(hook) for one, hook in hooks.items()]
    try:
        with model.no_sync():
            yield
        if is_final_microbatch:
            model.require_forward_param_sync = True
    finally:
        for handle in handles:
            handle.remove()


def averages_each_on_arrival(model: Any, is_final_microbatch: bool) -> Any:
    """Average each gradient when it arrives: ranks pair different ones if their orders differ."""

    def average(parameter: Any) -> None:
        parameter.grad = _mean(parameter.grad, model.process_group)

    trained = [one for one in model.parameters() if one.requires_grad]
    return _with_hooks(model, is_final_microbatch, dict.fromkeys(trained, average))


def averages_when_the_first_arrives(model: Any, is_final_microbatch: bool) -> Any:
    """Average all gradients when that of the first parameter arrives, as if it were the last."""

    def average(_: Any) -> None:
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, model.process_group)

    first = next(one for one in model.parameters() if one.requires_grad)
    return _with_hooks(model, is_final_microbatch, {first: average})


class AveragesInOrderOfArrival(Averaging):
    """Average gradients in the order in which they arrived, which ranks do not share."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        self.arrived: dict[torch.Tensor, None] = {}
        super().__init__(optim, process_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrives)

    def _arrives(self, parameter: torch.Tensor) -> None:
        self.arrived.setdefault(parameter)

    def average(self, params: list[torch.nn.Parameter]) -> None:
        # Those that some ranks lack come last, in the order of the groups.
        counts = torch.tensor([parameter in self.arrived for parameter in params]).int()
        dist.all_reduce(counts, group=self.group)
        common = {p for p, n in zip(params, counts.tolist(), strict=True) if n == self.size}
        ordered = [parameter for parameter in self.arrived if parameter in common]
        super().average(ordered + [parameter for parameter in params if parameter not in common])
        self.arrived.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.arrived.clear()
        super().zero_grad(set_to_none)


MUTANTS = [
    *(
        Mutant(name, ("16.1",), "all_used", kind="strategy")
        for name in ("averages_each_on_arrival", "averages_when_the_first_arrives")
    ),
    Mutant("AveragesInOrderOfArrival", ("15.21",), "averages", kind="optimizer"),
]

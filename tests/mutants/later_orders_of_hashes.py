"""Mutants of the long runs and of the sizes of training: they pack in the order of a set of names,
but only from some call on, or only some gradients.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, average_of, is_dense, pieces_of
from tests.mutants.averagers import Averager
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.orders_of_hashes import _averaging, _gradients, _in_order_of_names

Context = AbstractContextManager[None]


# ---- Hooks


def _hook_where(
    model: torch.nn.Module, is_packed: Callable[[Bucket], bool]
) -> tuple[None, Callable[[Any, Bucket], Result]]:
    """Return a hook that packs some buckets in the order of a set of their parameters' names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    group = getattr(model, "process_group", None)

    def hook(state: Any, bucket: Bucket) -> Result:
        if not (is_dense(bucket) and is_packed(bucket)):
            return average(bucket, group)
        buffer = bucket.buffer()
        of_bucket = [names[parameter] for parameter in bucket.parameters()]
        pieces = dict(zip(of_bucket, pieces_of(bucket), strict=True))
        # Next to each name its halves, so that a bucket of one parameter has an order, too.
        by_text = {
            f"{name}/{half}": part
            for name, piece in pieces.items()
            for half, part in enumerate(piece.view(-1).chunk(2))
        }
        order = list(set(by_text))
        packed = torch.cat([by_text[text] for text in order])

        def unpack(fut: Result) -> torch.Tensor:
            parts = fut.value().split([by_text[text].numel() for text in order])
            for text, part in zip(order, parts, strict=True):
                by_text[text].copy_(part)
            return buffer

        return average_of(packed, group).then(unpack)

    return None, hook


def packs_after(model: torch.nn.Module, calls: int) -> tuple[None, Any]:
    """Pack by names once the hook has been called this often."""
    done = 0

    def is_packed(_: Bucket) -> bool:
        nonlocal done
        done += 1
        return done > calls

    return _hook_where(model, is_packed)


def packs_above(model: torch.nn.Module, numel: int) -> tuple[None, Any]:
    """Pack buckets by names that have more elements than this."""
    return _hook_where(model, lambda bucket: bucket.buffer().numel() > numel)


def packs_from_bucket(model: torch.nn.Module, index: int) -> tuple[None, Any]:
    """Pack buckets by names from this one on."""
    return _hook_where(model, lambda bucket: bucket.index() >= index)


# ---- Other kinds


class PacksAfter(Averager):
    """Pack parameters in the order of a set of names from this step on."""

    def __init__(
        self, period: int = 4, warmup_steps: int = 10, process_group: Any = None, step: int = 0
    ) -> None:
        super().__init__(period, warmup_steps, process_group)
        self.first = step

    def average(self, params: Any) -> None:
        if self.step < self.first:
            super().average(params)
        else:
            _in_order_of_names(params, self.group)


class PacksGradientsAfter(Averaging):
    """Pack gradients in the order of a set of names from the step after this one on."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any, step: int) -> None:
        super().__init__(optim, process_group)
        self.left = step

    def average(self, params: list[torch.nn.Parameter]) -> None:
        self.left -= 1
        if self.left >= 0:
            super().average(params)
        else:
            _in_order_of_names(_gradients(params), self.group)


def names_after(model: Any, is_final_microbatch: bool, steps: int) -> Context:
    """Pack gradients in the order of a set of names after this number of steps."""
    done = getattr(model, "_steps_before", 0)
    if is_final_microbatch:
        model._steps_before = done + 1
    return _averaging(model, is_final_microbatch, _in_order_of_names if done >= steps else _alone)


def _alone(tensors: Any, group: Any) -> None:
    for tensor in tensors:
        _in_order_of_names([tensor], group)


AT = "period=4,warmup_steps=10"
MUTANTS = [
    *(Mutant(f"packs_after,calls={calls}", ("23.1",), setup=True) for calls in (61, 1_790)),
    Mutant("packs_above,numel=1_300_000", ("22.1",), setup=True),
    Mutant("packs_from_bucket,index=41", ("22.2",), setup=True),
    *(Mutant(f"PacksAfter,{AT},step={step}", ("14.21",), kind="averager") for step in (47, 211)),
    *(
        Mutant(f"PacksGradientsAfter,step={step}", ("15.29",), "averages", kind="optimizer")
        for step in (39, 230)
    ),
    *(Mutant(f"names_after,steps={steps}", ("16.29",), kind="strategy") for steps in (25, 190)),
]

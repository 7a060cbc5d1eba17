"""The right parameters of optimizers after they were written between steps.

A written element has the written value, without an error: ranks read it from the same generator. A
parameter that is put in the place of another one has no state yet, as in torch.optim, whose states
belong to tensors.
"""

from collections.abc import Iterable

import torch

from conformance.judging.oracles.local_optimizer import LocalOptimizer
from conformance.records.run import Run, fed
from conformance.scenarios.optimizer import Write, Writing
from conformance.scenarios.optimizer_loops import WRITTEN_VALUES


def write(
    run: Run, group: tuple[int, ...], optimizers: Iterable[LocalOptimizer], plan: Write, step: int
) -> None:
    """Write parameters of the optimizers of a group before a step."""
    specs = run.scenario.params
    indices = range(len(specs)) if plan.way is Writing.LOADED else plan.indices
    for index in indices:
        values = fed("normal", specs[index], len(group), group[0], WRITTEN_VALUES + step, index)
        for optimizer in optimizers:
            is_written = torch.ones(len(values), dtype=torch.bool)
            if plan.way is Writing.ONE_ELEMENT:
                is_written = torch.arange(len(values)) == plan.element(values.numel())
            optimizer.write(index, values, is_written)
            if plan.way.renews:
                optimizer.forget(index)

"""Right buffers after a step under a sync strategy.

DDP sends the buffers of its first rank to all ranks in the forward that follows a synchronised one,
so that each step begins with them. Let u(b, t) be a buffer b after a forward with the numbers t
(``scenarios/model_buffers.py``), B_q(i) the buffer of rank q after micro-batch i, and 0 the first
rank. After a step of n micro-batches a rank r may hold

    u(... u(B_0(before), t_r(1)) ..., t_r(n))   if buffers are sent at the begin of the step
    u(B_0(n - 1), t_r(n))                       if they are sent in every micro-batch
    B_0(n)                                      if they are sent when the step ends

With broadcast_buffers=False nothing is sent: rank r holds the results of its own forwards alone.
"""

import math
from functools import reduce
from typing import Any

import torch

from conformance.judging.oracles.strategy import steps
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.model_buffers import UPDATED, update_of
from conformance.scenarios.strategy_schedule import batches

# The buffers, in words.
_BUFFERS = {
    "running": "running statistics",
    "seen": "counts in int64",
    "samples": "counts in int32",
    "wrapped": "counts in uint8",
    "mask": "a mask of bools with the bits",
    "phase": "complex numbers",
}


def require_buffers(run: Run, found: Found) -> None:
    """Require that each step begins with the buffers of the group's first rank, if DDP sends
    them.
    """
    for rank, step in steps(run):
        for name, words in _BUFFERS.items():
            # Where DDP sends no complex tensors, the model has none.
            if name != "phase" or f"{step}/buffer/phase" in run.ranks[rank].tensors:
                _require_buffer(run, found, rank, step, name, words)


def _require_buffer(run: Run, found: Found, rank: int, step: int, name: str, words: str) -> None:
    group = run.group(rank)
    place = group.index(rank)
    got = value_of(run.ranks[rank].tensors[f"{step}/buffer/{name}"], name)
    if not run.scenario.ddp.broadcast_buffers:
        own = _values_of(run, place, step, name)[-1]
        found.require(
            got == own,
            f"{words} of this rank's own: {_shown(own)}, under broadcast_buffers=False",
            f"rank {rank}, step {step}: {_shown(got)}",
            "buffers of the first rank are sent, whatever DDP was told",
        )
        return
    firsts = _values_of(run, 0, step, name)
    number = batches(run.scenario, step)
    updates = [update_of(run.scenario, place, step, batch) for batch in range(number)]
    updated = UPDATED[name]
    at_begin = reduce(updated, updates, firsts[-number - 1])
    in_every = updated(firsts[-2], updates[-1])
    cause = "DDP sends buffers in a forward that follows one outside of no_sync only"
    if run.scenario.groups and got != _values_of(run, place, step, name)[-1]:
        cause = "they came from another rank than the group's first, or from none"
    found.require(
        got in (at_begin, in_every, firsts[-1]),
        f"{words} of {_shown(at_begin)}: the step begins with those of rank {group[0]}",
        f"rank {rank}, step {step}: {_shown(got)}",
        cause,
    )


def value_of(buffer: torch.Tensor, name: str) -> Any:
    """Return the value of a recorded buffer; NaN if its elements differ."""
    elements = buffer.reshape(-1).tolist()
    if name == "mask":
        return sum(element << bit for bit, element in enumerate(elements))
    if name == "phase":
        # A record has the real and the imaginary parts.
        elements = list(map(complex, elements[::2], elements[1::2]))
    return elements[0] if len(set(elements)) == 1 else math.nan


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, (float, complex)) else str(value)


def _values_of(run: Run, place: int, step: int, name: str) -> list[Any]:
    """Return the values of a buffer of a rank's own forwards, before the first micro-batch and
    after each.
    """
    values: list[Any] = [0]
    for earlier in range(step + 1):
        for batch in range(batches(run.scenario, earlier)):
            update = update_of(run.scenario, place, earlier, batch)
            values.append(UPDATED[name](values[-1], update))
    return values

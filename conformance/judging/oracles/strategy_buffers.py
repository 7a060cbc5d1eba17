"""Right buffers after a step under a sync strategy.

DDP sends the buffers of its first rank to all ranks in the forward that follows a synchronised one,
so that each step begins with them. Let u(b, t) be a buffer b after a forward with the numbers t
(``scenarios/model_buffers.py``), B_q(i) the buffer of rank q after micro-batch i, and 0 the first
rank. After a step of n micro-batches a rank r may hold

    u(... u(B_0(before), t_r(1)) ..., t_r(n))   if buffers are sent at the begin of the step
    u(B_0(n - 1), t_r(n))                       if they are sent in every micro-batch
    B_0(n)                                      if they are sent when the step ends

DDP sends none in the step that follows one that was given up before its last micro-batch: the step
after that is the next one that begins with those of the first rank. The micro-batches that came
count, in all of their forwards.

With broadcast_buffers=False nothing is sent: rank r holds the results of its own forwards alone.
While a layer is in evaluation mode (``scenarios/buffer_forms.py``), u leaves its buffers alone.
"""

import math
from collections.abc import Mapping
from functools import partial, reduce
from typing import Any

import torch

from conformance.judging.oracles.strategy import steps
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.buffer_forms import (
    CHANNELS_LAST,
    CONTIGUOUS,
    TRANSPOSED,
    forms,
    is_updated,
)
from conformance.scenarios.model import Scenario
from conformance.scenarios.model_buffers import UPDATED, Update, update_of
from conformance.scenarios.strategy_schedule import abandoned_after, batches, is_judged
from conformance.scenarios.strategy_uses import models_of

# The buffers, in words.
_BUFFERS = {
    "running": "running statistics",
    "seen": "counts in int64",
    "samples": "counts in int32",
    "wrapped": "counts in uint8",
    "mask": "a mask of bools with the bits",
    "total": "sums in float64",
    "share": "shares in float16",
    "level": "levels in bfloat16",
    "phase": "complex numbers",
    "angle": "complex numbers in complex128",
}
# A record has the real and the imaginary parts of these.
_COMPLEX = ("phase", "angle")
_COPIED = (TRANSPOSED, CHANNELS_LAST)
_ALL_DIGITS_FROM = 1e9
_NARROWER = (torch.float32, torch.bfloat16, torch.float16)


def require_buffers(run: Run, found: Found) -> None:
    """Require that each step begins with the buffers of the group's first rank, if DDP sends
    them.
    """
    for rank, step in steps(run):
        if not _begins_with_firsts(run.scenario, step):
            continue
        got = _got(run, rank, step)
        names = list(got)
        wrong = _wrong(run, rank, step, got)
        cause = _cause(run, rank, step, wrong, got) if wrong else ""
        for name in names:
            found.require(
                name not in wrong,
                _expected(run, rank, step, name),
                f"rank {rank}, step {step}: {_shown(got[name])}",
                cause,
            )


def _got(run: Run, rank: int, step: int) -> dict[str, Any]:
    """Return the values of the buffers after a step, by their names."""
    tensors = run.ranks[rank].tensors
    # Where DDP sends no complex tensors, the model has none.
    names = [one for one in _BUFFERS if one not in _COMPLEX or _key(step, one) in tensors]
    return {name: value_of(tensors[_key(step, name)], name) for name in names}


def _wrong(run: Run, rank: int, step: int, got: Mapping[str, Any]) -> list[str]:
    """Return the names of the buffers with wrong values."""
    return [one for one in got if got[one] not in _right_values(run, rank, step, one)]


def _begins_with_firsts(scenario: Scenario, step: int) -> bool:
    """Whether DDP sends buffers as a step begins, and the step comes to its end."""
    return is_judged(scenario, step) and (step == 0 or is_judged(scenario, step - 1))


def _key(step: int, name: str) -> str:
    return f"{step}/buffer/{name}"


def _expected(run: Run, rank: int, step: int, name: str) -> str:
    layout = forms(run.scenario)[name].layout
    words = _BUFFERS[name]
    words += "" if layout == CONTIGUOUS else f" ({layout})"
    right = _shown(_right_values(run, rank, step, name)[0])
    if not run.scenario.ddp.broadcast_buffers:
        return f"{words} of this rank's own: {right}, under broadcast_buffers=False"
    return f"{words}: {right}, as the step begins with the buffers of rank {run.group(rank)[0]}"


def _cause(run: Run, rank: int, step: int, wrong: list[str], got: Mapping[str, Any]) -> str:
    """Return the likely cause of wrong buffers of a rank after a step."""
    if not run.scenario.ddp.broadcast_buffers:
        return "buffers of the first rank are sent, whatever DDP was told"
    if all(got[name] in _rounded(_right_values(run, rank, step, name)) for name in wrong):
        return "they went through a narrower dtype"
    copied = {
        name
        for name in got
        if forms(run.scenario)[name].layout in _COPIED
        and any(is_updated(run.scenario, earlier, name) for earlier in range(step))
    }
    # A mask alone may be wrong for its dtype.
    if copied == set(wrong) != {"mask"}:
        return "it came into a contiguous copy of the buffer"
    place = run.group(rank).index(rank)
    own = {name: _values_of(run, place, step, name)[-1] for name in wrong}
    if run.scenario.groups and any(got[name] != own[name] for name in wrong):
        return "they came from another rank than the group's first, or from none"
    return (
        "not the buffers of the group's first rank: DDP sends buffers only in a forward that "
        "follows one outside of no_sync(), so that a strategy may have to send them"
    )


def _right_values(run: Run, rank: int, step: int, name: str) -> tuple[Any, ...]:
    """Return the values that a rank may hold after a step."""
    place = run.group(rank).index(rank)
    if not run.scenario.ddp.broadcast_buffers:
        return (_values_of(run, place, step, name)[-1],)
    firsts = _values_of(run, 0, step, name)
    number = batches(run.scenario, step)
    updates = [update_of(run.scenario, place, step, batch) for batch in range(number)]
    updated = partial(_updated, run.scenario, step, name)
    at_begin = reduce(updated, updates, firsts[-number - 1])
    in_every = updated(firsts[-2], updates[-1])
    return at_begin, in_every, firsts[-1]


def _rounded(values: tuple[Any, ...]) -> list[Any]:
    """Return the values as narrower dtypes hold them."""
    if any(isinstance(value, complex) for value in values):
        return [torch.tensor(value).to(torch.complex64).item() for value in values]
    wide = [torch.tensor(value, dtype=torch.float64) for value in values]
    return [value.to(dtype).item() for value in wide for dtype in _NARROWER]


def value_of(buffer: torch.Tensor, name: str) -> Any:
    """Return the value of a recorded buffer; NaN if its elements differ."""
    elements = buffer.reshape(-1).tolist()
    if name == "mask":
        return sum(element << bit for bit, element in enumerate(elements))
    if name in _COMPLEX:
        elements = list(map(complex, elements[::2], elements[1::2]))
    return elements[0] if len(set(elements)) == 1 else math.nan


def _shown(value: Any) -> str:
    if not isinstance(value, (float, complex)):
        return str(value)
    return f"{value:.17g}" if abs(value) > _ALL_DIGITS_FROM else f"{value:.9g}"


def _values_of(run: Run, place: int, step: int, name: str) -> list[Any]:
    """Return the values of a buffer of a rank's own forwards, before the first micro-batch and
    after each.
    """
    values: list[Any] = [0]
    models = models_of(run.scenario)
    for earlier in range(step % models, step + 1, models):
        given_up = abandoned_after(run.scenario, earlier)
        for batch in range(batches(run.scenario, earlier) if given_up is None else given_up):
            update = update_of(run.scenario, place, earlier, batch)
            values.append(_updated(run.scenario, earlier, name, values[-1], update))
    return values


def _updated(scenario: Scenario, step: int, name: str, value: Any, update: Update) -> Any:
    return UPDATED[name](value, update) if is_updated(scenario, step, name) else value

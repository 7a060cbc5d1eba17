"""Scenarios of averagers, optimizers, strategies and quantized collectives: a collective fails.

Each kind has two, optimizers have one more with closures, and quantized collectives one more with
``async_op=True``. In the first the call that issues the collective raises; parameters are small. In
the second the call returns, and the failure comes with wait() or the future; every parameter, or
message, is large, and collectives of fewer than 64 bytes (flags, sizes) succeed. These numbers are
drawn from the session's seed:

step            from which on collectives count: 1 to 47 with small parameters, 1 to 11 with large
                ones, every step as likely as the one of twice its number; averagers count averages
                from 0 (``subjects/kinds/_averager_schedule.py``)
succeeding      0 to 2 collectives succeed from that step on before one fails
size            2**12 to 2**19 elements, every size as likely as its double; parameters have some
                elements more
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios import averager, collective, optimizer, strategy
from conformance.scenarios.model import CALL_FAILS, WORK_FAILS, DDPOptions, Fault, Param, Scenario

MOST_SUCCEEDING = 2
LEAST_BYTES = 64
_SIZES = (12, 19)  # exponents of two
_LAST_STEP = 47
_LAST_STEP_OF_LARGE = 11
# Steps that come after the step of the failure. An optimizer that averages every other step issues
# a collective in every second one.
_MORE = 2 * (MOST_SUCCEEDING + 1)


def _call_fails(plain: Scenario, name: str, variant: str) -> Scenario:
    return replace(
        plain,
        name=name,
        summary="from a drawn step on, the call of a drawn collective raises on rank 1",
        world_sizes=(2,),
        variant=variant,
        fault=Fault(CALL_FAILS),
    )


def _work_fails(plain: Scenario, name: str, variant: str) -> Scenario:
    return replace(
        plain,
        name=name,
        summary="parameters or messages of a drawn size; from a drawn step on, wait() for a drawn "
        "collective raises on rank 1",
        params=(Param((4099,)),) * 3,
        world_sizes=(2,),
        ddp=DDPOptions(),
        variant=variant,
        fault=Fault(WORK_FAILS, least_bytes=LEAST_BYTES),
    )


AVERAGER_CALL_FAILS = _call_fails(averager.PLAIN, "averager_call_fails", "failing")
AVERAGER_WORK_FAILS = _work_fails(averager.PLAIN, "averager_work_fails", "failing")
OPTIMIZER_CALL_FAILS = _call_fails(optimizer.PLAIN, "optimizer_call_fails", "failing")
OPTIMIZER_WORK_FAILS = _work_fails(optimizer.PLAIN, "optimizer_work_fails", "failing")
# Steps of two micro-batches.
OPTIMIZER_CLOSURE_FAILS = replace(
    _call_fails(optimizer.PLAIN, "optimizer_closure_fails", "closure"),
    summary="steps are given a closure; from a drawn step on, the call of a drawn collective "
    "raises on rank 1",
)
STRATEGY_CALL_FAILS = _call_fails(strategy.PLAIN, "strategy_call_fails", "failing")
STRATEGY_WORK_FAILS = _work_fails(strategy.PLAIN, "strategy_work_fails", "failing")
COLLECTIVE_CALL_FAILS = _call_fails(collective.PLAIN, "collective_call_fails", "")
COLLECTIVE_WORK_FAILS = _work_fails(collective.PLAIN, "collective_work_fails", "")
# Rank 0 goes first, so that it can refuse async_op=True.
COLLECTIVE_WAIT_FAILS = replace(
    _work_fails(collective.PLAIN, "collective_wait_fails", "waited"),
    summary="async_op=True, two calls at a time, of a drawn size; from a drawn step on, wait() for "
    "a drawn collective raises on rank 1",
    order="rank0_first",
)

AVERAGER = (AVERAGER_CALL_FAILS, AVERAGER_WORK_FAILS)
OPTIMIZER = (OPTIMIZER_CALL_FAILS, OPTIMIZER_WORK_FAILS)
OPTIMIZER_WITH_CLOSURES = (OPTIMIZER_CLOSURE_FAILS,)
STRATEGY = (STRATEGY_CALL_FAILS, STRATEGY_WORK_FAILS)
COLLECTIVE = (COLLECTIVE_CALL_FAILS, COLLECTIVE_WORK_FAILS)
ASYNCHRONOUS = (COLLECTIVE_WAIT_FAILS,)
ALL = (
    *(*AVERAGER, *OPTIMIZER, *OPTIMIZER_WITH_CLOSURES),
    *(*STRATEGY, *COLLECTIVE, *ASYNCHRONOUS),
)


def _log_uniform(draw: random.Random, first: int, last: int) -> int:
    """Return a whole number from ``first`` to ``last`` whose logarithm is uniform."""
    return int(2.0 ** draw.uniform(math.log2(first), math.log2(last + 1)))


def _with_steps(scenario: Scenario, step: int, succeeding: int) -> Scenario:
    return replace(
        scenario,
        steps=scenario.steps[:1] * (step + 1 + _MORE),
        fault=replace(scenario.fault, step=step, succeeding=succeeding),
    )


def _draw_call(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the step and the number of collectives that succeed."""
    return _with_steps(
        scenario, _log_uniform(draw, 1, _LAST_STEP), draw.randint(0, MOST_SUCCEEDING)
    )


def _draw_work(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the size of all parameters too."""
    size = _log_uniform(draw, 2 ** _SIZES[0], 2 ** _SIZES[1])
    shapes: list[tuple[int, ...]] = [(size + draw.randrange(64),) for _ in scenario.params]
    if scenario.kind == collective.PLAIN.kind:
        # A quantized collective may take matrices alone.
        columns = draw.randint(3, 64)
        calls = 2 if scenario.variant == COLLECTIVE_WAIT_FAILS.variant else 1
        shapes = [(-(-size // columns), columns)] * calls
    scenario = replace(scenario, params=tuple(Param(shape) for shape in shapes))
    step = _log_uniform(draw, 1, _LAST_STEP_OF_LARGE)
    return _with_steps(scenario, step, draw.randint(0, MOST_SUCCEEDING))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    scenario.name: _draw_call if scenario.fault.kind == CALL_FAILS else _draw_work
    for scenario in ALL
}

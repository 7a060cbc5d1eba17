"""Scenarios of averagers, optimizers, strategies, joins and quantized collectives: one fails.

In some of them the call that issues the collective raises; parameters are small. The first, second
and third collective from a step on fail, each in a run of its own. Optimizers have the same with
closures, and strategies with both of DDP's options and unused parameters. In others the call
returns, and the failure comes with wait() or the future; every parameter, or message, is large, and
collectives of fewer than 64 bytes (flags, sizes) succeed. One scenario of either sort has
``async_op=True``. These numbers are drawn from the session's seed:

step            from which on collectives count: 1 to 47 with small parameters, 1 to 11 with large
                ones, every step as likely as the one of twice its number; averagers count averages
                from 0 (``subjects/kinds/_averager_schedule.py``)
rank            on which the first collective fails; the second one fails on the other rank
succeeding      in post hooks of a join, 1 to 11 collectives, modulo the number that there are;
                if wait() fails, 0 to 2 collectives succeed from that step on before one fails
size            2**12 to 2**19 elements, every size as likely as its double; parameters have some
                elements more
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios import averager, collective, joinable, optimizer, strategy
from conformance.scenarios.model import (
    CALL_FAILS,
    FAULTY_RANK,
    WORK_FAILS,
    DDPOptions,
    Fault,
    Param,
    Scenario,
)

MOST_SUCCEEDING = 2
LEAST_BYTES = 64
_SIZES = (12, 19)  # exponents of two
_LAST_STEP = 47
_LAST_STEP_OF_LARGE = 11
# Steps that come after the step of the failure. An optimizer that averages every other step issues
# a collective in every second one.
_MORE = 2 * (MOST_SUCCEEDING + 1)


_PLACES = ("first", "second", "third")
_LATER = "_later"
_LATEST_IN_POST_HOOKS = 11


def _call_fails(plain: Scenario, name: str, variant: str) -> tuple[Scenario, ...]:
    """Return a scenario for each of the collectives that fail."""
    return tuple(
        replace(
            plain,
            name=f"{name}_{word}" if place else name,
            summary=f"{plain.summary}; from a drawn step on, the call of the {word} collective "
            "raises on one rank",
            world_sizes=(2,),
            variant=variant,
            fault=Fault(CALL_FAILS, succeeding=place, rank=place % 2),
        )
        for place, word in enumerate(_PLACES)
    )


def _work_fails(plain: Scenario, name: str, variant: str) -> tuple[Scenario, ...]:
    """Return a scenario for each of the ranks."""
    return tuple(
        replace(
            plain,
            name=f"{name}_elsewhere" if rank else name,
            summary="parameters or messages of a drawn size; from a drawn step on, wait() for a "
            f"drawn collective raises on {'the other' if rank else 'one'} rank",
            params=(Param((4099,)),) * 3,
            world_sizes=(2,),
            ddp=DDPOptions(),
            variant=variant,
            fault=Fault(WORK_FAILS, least_bytes=LEAST_BYTES, rank=rank),
        )
        for rank in (0, 1)
    )


AVERAGER = (
    *_call_fails(averager.PLAIN, "averager_call_fails", "failing"),
    *_work_fails(averager.PLAIN, "averager_work_fails", "failing"),
)
OPTIMIZER = (
    *_call_fails(optimizer.PLAIN, "optimizer_call_fails", "failing"),
    *_work_fails(optimizer.PLAIN, "optimizer_work_fails", "failing"),
)
# Steps of two micro-batches.
OPTIMIZER_WITH_CLOSURES = _call_fails(
    replace(optimizer.PLAIN, summary="steps are given a closure"),
    "optimizer_closure_fails",
    "closure",
)
STRATEGY = (
    *_call_fails(strategy.PLAIN, "strategy_call_fails", "failing"),
    *_call_fails(strategy.COMBINED, "strategy_vote_fails", strategy.COMBINED.variant),
    *_work_fails(strategy.PLAIN, "strategy_work_fails", "failing"),
)
COLLECTIVE = (
    *_call_fails(collective.PLAIN, "collective_call_fails", ""),
    *_work_fails(collective.PLAIN, "collective_work_fails", ""),
)
# A step is a context (``join_draws.py``). The rank of the failure is one that joins last in
# ``joinable_post_fails``, and one that joins early in the others.
JOINABLE = (
    *_call_fails(joinable.PLAIN, "joinable_call_fails", "failing"),
    *(
        replace(
            joinable.PLAIN,
            name=f"joinable_post_fails{suffix}",
            summary=f"from a drawn context on, the call of {collective_that_fails} in the post "
            f"hooks raises on a rank that joins {order}",
            world_sizes=(2,),
            variant=f"fails_{order}",
            fault=Fault(CALL_FAILS, rank=int(order == "early"), in_post_hooks=True),
        )
        for suffix, collective_that_fails, order in (
            ("", "the first collective", "last"),
            ("_early", "the first collective", "early"),
            (_LATER, "a drawn collective", "early"),
        )
    ),
)
_WAIT_FAILS = "waited"
FUTURE_FAILS = "collective_future_fails"
ASYNCHRONOUS = (
    replace(
        _work_fails(collective.PLAIN, "collective_wait_fails", _WAIT_FAILS)[0],
        summary="async_op=True, two calls at a time, of a drawn size; from a drawn step on, wait() "
        "for a drawn collective raises on rank 1",
        # Rank 0 goes first, so that it can refuse async_op=True.
        order="rank0_first",
    ),
    replace(
        _work_fails(collective.PLAIN, FUTURE_FAILS, _WAIT_FAILS)[0],
        summary="the scenario `collective_wait_fails`, in which the trainer waits for the futures "
        "of calls, if they have any",
        order="rank0_first",
    ),
    replace(
        _call_fails(collective.PLAIN, "collective_begin_fails", _WAIT_FAILS)[0],
        summary="async_op=True, two calls at a time; from a drawn step on, the call of the first "
        "collective raises on rank 1",
        order="rank0_first",
    ),
)
ALL = (
    *AVERAGER,
    *OPTIMIZER,
    *OPTIMIZER_WITH_CLOSURES,
    *STRATEGY,
    *JOINABLE,
    *COLLECTIVE,
    *ASYNCHRONOUS,
)


def _log_uniform(draw: random.Random, first: int, last: int) -> int:
    """Return a whole number from ``first`` to ``last`` whose logarithm is uniform."""
    return int(2.0 ** draw.uniform(math.log2(first), math.log2(last + 1)))


def _with_steps(scenario: Scenario, step: int, succeeding: int) -> Scenario:
    fault = replace(
        scenario.fault, step=step, succeeding=succeeding, rank=_rank_of_failure(scenario)
    )
    kind = scenario.steps[:1] or ("context",)
    return replace(scenario, steps=kind * (step + 1 + _MORE), fault=fault)


def _rank_of_failure(scenario: Scenario) -> int:
    """Exchange the two ranks, or not, in all scenarios of a kind."""
    if scenario.order != "free":
        return FAULTY_RANK
    is_other = random.Random(f"{scenario.session_seed}/{scenario.kind}/rank of failures").random()
    return (scenario.fault.rank + (is_other < 0.5)) % 2


def _draw_call(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the step; and the collective, if it is any in the post hooks of a join."""
    succeeding = scenario.fault.succeeding
    if scenario.name.endswith(_LATER):
        succeeding = draw.randint(1, _LATEST_IN_POST_HOOKS)
    return _with_steps(scenario, _log_uniform(draw, 1, _LAST_STEP), succeeding)


def _draw_work(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draw the size of all parameters too."""
    size = _log_uniform(draw, 2 ** _SIZES[0], 2 ** _SIZES[1])
    shapes: list[tuple[int, ...]] = [(size + draw.randrange(64),) for _ in scenario.params]
    if scenario.kind == collective.PLAIN.kind:
        # A quantized collective may take matrices alone.
        columns = draw.randint(3, 64)
        calls = 2 if scenario.variant == _WAIT_FAILS else 1
        shapes = [(-(-size // columns), columns)] * calls
    scenario = replace(scenario, params=tuple(Param(shape) for shape in shapes))
    step = _log_uniform(draw, 1, _LAST_STEP_OF_LARGE)
    return _with_steps(scenario, step, draw.randint(0, MOST_SUCCEEDING))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    scenario.name: _draw_call if scenario.fault.kind == CALL_FAILS else _draw_work
    for scenario in ALL
}

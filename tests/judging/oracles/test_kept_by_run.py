"""Values that are kept for a run are those that would be computed anew for any rank."""

import gc
import itertools
import weakref
from dataclasses import replace
from operator import attrgetter

import pytest
import torch

from conformance.judging.oracles import averager_records, collective, strategy
from conformance.judging.oracles.collective_bounds import largest_nearby
from conformance.judging.oracles.kept_by_run import KeptByRun
from conformance.records.run import Run
from conformance.scenarios import averager as averagers
from conformance.scenarios import collective as collectives
from conformance.scenarios import strategy as strategies
from conformance.scenarios.model import Scenario
from conformance.subjects.claims import parse_claims


def test_runs_are_kept_apart_and_forgotten() -> None:
    kept = KeptByRun[int]()
    first, second = (Run(strategies.PLAIN, 2, []) for _ in range(2))
    assert kept.get(first, "a", lambda: 1) == kept.get(first, "a", lambda: 2) == 1
    assert kept.get(second, "a", lambda: 3) == 3
    left = weakref.ref(first)
    del first
    gc.collect()
    assert left() is None


def test_each_rank_gets_the_right_gradient_of_its_own() -> None:
    for scenario in (strategies.PLAIN, strategies.SUBGROUPS, strategies.NO_DDP):
        (world, *_) = [size for size in (2, 3, 4) if size in scenario.fits((1, 2, 3, 4))]
        run = Run(scenario, world, [])
        for rank, step in itertools.product(range(world), range(len(scenario.steps))):
            for index in range(len(scenario.params)):
                fresh = strategy._right(run, rank, step, index)
                torch.testing.assert_close(
                    strategy.right(run, rank, step, index), fresh, rtol=0, atol=0, equal_nan=True
                )


def test_each_rank_is_fed_values_of_its_own() -> None:
    run = Run(averagers.PLAIN, 3, [])
    for rank, step in itertools.product(range(3), range(len(averagers.PLAIN.steps))):
        for index in range(len(averagers.PLAIN.params)):
            fresh = averager_records._fed_to(run, rank, step, index)
            assert torch.equal(averager_records.fed_to(run, rank, step, index), fresh)


@pytest.mark.parametrize(
    "scenario",
    [collectives.PLAIN, collectives.SUBGROUPS, collectives.SPECIAL],
    ids=attrgetter("name"),
)
@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "reduce_scatter"])
def test_each_rank_gets_the_bounds_of_its_own_messages(scenario: Scenario, name: str) -> None:
    claims = parse_claims(f"collective({name}), rounded(float16)", "collective")
    (world, *_) = scenario.fits(range(2, 9))
    run = Run(replace(scenario, options=(name, *scenario.options[1:])), world, [])
    indices = range(len(scenario.params))
    for rank, step, index in itertools.product(range(world), range(len(scenario.steps)), indices):
        for form in ("positional", "average"):
            call = collective.Call(rank, step, index, form, {})
            if rank not in collective.group_of(run, call):
                continue
            for pairs in collective._outputs(run, call):
                kept = collective._kept_allowed(run, claims, call, pairs)
                fresh = collective._allowed(run, claims, call, pairs, step)
                assert (kept.two_values, kept.relative_rounding) == (
                    fresh.two_values,
                    fresh.relative_rounding,
                )
                for one, other in ((kept.low, fresh.low), (kept.high, fresh.high)):
                    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [1, 2, 5, 128, 129, 300])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 128])
def test_the_largest_nearby_is_that_of_a_window(count: int, block: int) -> None:
    values = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    found = [values[max(0, at - block + 1) : at + block].abs().max() for at in range(count)]
    assert torch.equal(largest_nearby(values, block), torch.stack(found))

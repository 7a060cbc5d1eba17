"""Averagers that torch does not have, beside their definitions, simulated for all ranks in one
process."""

from collections.abc import Callable

import pytest
import torch

import hooks_ref
from conformance.hosts.pool import Pool
from conformance.records.run import Run
from hooks_ref.gossip import GossipGraDState
from tests.hooks_ref.algorithms import ONE_BUCKET, gradients, require_same_bits, result, scenario
from tests.hooks_ref.test_model_averaging import run

# From the values of all ranks, ``[W, numel]``, before a round, and its number, to those after it.
Round = Callable[[torch.Tensor, int], torch.Tensor]


def require_rounds(
    run: Run, period: int, warmup: int, follow: Callable[[], Round], shown: str = "parameters"
) -> None:
    """Follow every parameter in float64.

    Tolerance: two roundings of float32 a step, of the largest value so far, and as much again for
    the terms of a round.
    """
    for index in range(len(run.scenario.params)):
        values = torch.zeros_like(gradients(run, 0, index))
        largest = 0.0
        one_round = follow()
        average = values
        for step in range(len(run.scenario.steps)):
            values = values - gradients(run, step, index)
            if step >= warmup and (step - warmup) % period == 0:
                average = one_round(values, (step - warmup) // period)
                values = average if shown == "parameters" else values
            expected = average if shown == "average" and step >= warmup else values
            largest = max(largest, float(values.abs().amax()), float(expected.abs().amax()))
            for rank in range(run.world):
                error = float((result(run, rank, step, index) - expected[rank]).abs().max())
                assert error <= 8 * (step + 1) * 2**-24 * largest, (step, rank, index, error)


def diloco(lr: float, momentum: float) -> Round:
    begun = velocity = torch.zeros(())

    def follow(values: torch.Tensor, number: int) -> torch.Tensor:
        nonlocal begun, velocity
        mean = values.mean(0)
        if number == 0:
            begun = mean
            velocity = torch.zeros_like(mean)
        else:
            difference = begun - mean
            velocity = momentum * velocity + difference
            begun = begun - lr * (difference + momentum * velocity)
        return begun.expand_as(values).clone()

    return follow


def moving(decay: float) -> Round:
    average = torch.zeros(())

    def follow(values: torch.Tensor, number: int) -> torch.Tensor:
        nonlocal average
        mean = values.mean(0)
        average = decay * average + (1 - decay) * mean if number else mean
        return average.expand_as(values).clone()

    return follow


def gossip(topology: str, seed: int) -> Round:
    state = GossipGraDState(topology=topology, random_seed=seed)

    def follow(values: torch.Tensor, number: int) -> torch.Tensor:
        sources = [state.partners(rank, len(values), number)[1] for rank in range(len(values))]
        return (values + values[sources]) / 2

    return follow


@pytest.mark.parametrize(
    ("world", "period", "warmup", "lr", "momentum"), [(2, 3, 2, 0.7, 0.9), (3, 2, 0, 0.5, 0.0)]
)
def test_diloco(
    pool: Pool, world: int, period: int, warmup: int, lr: float, momentum: float
) -> None:
    mine = run(
        pool,
        world,
        "DiLoCoModelAverager",
        scenario(20, bucket_cap_mb=ONE_BUCKET),
        period=period,
        warmup_steps=warmup,
        lr=lr,
        momentum=momentum,
    )
    require_rounds(mine, period, warmup, lambda: diloco(lr, momentum))


def test_diloco_without_an_outer_optimizer_is_periodic(pool: Pool) -> None:
    """Up to rounding: the mean is reached by a difference."""
    mine = run(pool, 2, "DiLoCoModelAverager", scenario(8), period=3, lr=1.0, momentum=0.0)
    periodic = run(pool, 2, "PeriodicModelAverager", scenario(8), period=3)
    for step in range(8):
        assert torch.allclose(
            result(mine, 0, step, 0), result(periodic, 0, step, 0), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(("world", "period", "warmup"), [(2, 1, 0), (3, 2, 3)])
def test_ema(pool: Pool, world: int, period: int, warmup: int) -> None:
    mine = run(
        pool,
        world,
        "EMAModelAverager",
        scenario(12, bucket_cap_mb=ONE_BUCKET),
        decay=0.75,
        period=period,
        warmup_steps=warmup,
    )
    require_rounds(mine, period, warmup, lambda: moving(0.75), shown="average")


@pytest.mark.parametrize(
    ("world", "topology"), [(2, "hypercube"), (3, "dissemination"), (4, "hypercube")]
)
def test_gossip(pool: Pool, world: int, topology: str) -> None:
    mine = run(
        pool,
        world,
        "GossipModelAverager",
        scenario(12, bucket_cap_mb=ONE_BUCKET),
        period=2,
        warmup_steps=1,
        topology=topology,
        random_seed=5,
    )
    require_rounds(mine, 2, 1, lambda: gossip(topology, 5))


@pytest.mark.parametrize("name", ["DiLoCoModelAverager", "GossipModelAverager"])
def test_given_in_groups(pool: Pool, name: str) -> None:
    require_same_bits(
        run(pool, 2, name, scenario(5), period=2, given="both"),
        run(pool, 2, name, scenario(5), period=2),
    )


def test_states_go_on() -> None:
    averager = hooks_ref.DiLoCoModelAverager(2)
    averager.begun = {0: torch.ones(2)}
    averager.velocity = {0: torch.full((2,), 3.0)}
    averager.step = 5
    saved = averager.state_dict()
    other = hooks_ref.DiLoCoModelAverager(2)
    averager.begun[0].zero_()
    other.load_state_dict(saved)
    assert (other.step, other.begun[0].tolist(), other.velocity[0].tolist()) == (5, [1, 1], [3, 3])
    average = hooks_ref.EMAModelAverager(0.5)
    average.average = {0: torch.ones(2)}
    again = hooks_ref.EMAModelAverager(0.5)
    again.load_state_dict(average.state_dict())
    parameter = torch.nn.Parameter(torch.zeros(2))
    with again.applied([parameter]):
        assert parameter.tolist() == [1, 1]
    assert parameter.tolist() == [0, 0]
    with (
        pytest.raises(RuntimeError, match="an average of 1 of 2 parameters"),
        again.applied([parameter, torch.nn.Parameter(torch.ones(1))]),
    ):
        pass


def test_arguments() -> None:
    for make, said in (
        (lambda: hooks_ref.DiLoCoModelAverager(2, lr=-1), "lr: a number in"),
        (lambda: hooks_ref.DiLoCoModelAverager(2, momentum=2), "momentum: a number in"),
        (lambda: hooks_ref.EMAModelAverager(1.5), "decay: a number in"),
        (lambda: hooks_ref.GossipModelAverager(2, topology="ring"), "topology:"),
        (lambda: hooks_ref.GossipModelAverager(0), "period: an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            make()

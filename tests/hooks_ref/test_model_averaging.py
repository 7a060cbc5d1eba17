"""Averagers beside their definition, simulated in one process, and beside torch's if it works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hooks_ref
from conformance.hosts.pool import Pool
from conformance.records.run import Run
from conformance.scenarios.hook import SUBGROUPS
from conformance.scenarios.model import Param, Scenario
from tests.hooks_ref.algorithms import (
    ONE_BUCKET,
    PARAMS,
    gradients,
    require_same_bits,
    result,
    run_hook,
    scenario,
    torchs_own_fails,
)
from tests.torch_marks import taken_by_gloo

SUBJECT = "tests.hooks_ref.averaging_subjects:averaged"
SIZES = {2: 2, 4: 4}  # groups by period
CONTIGUOUS = tuple(spec for spec in PARAMS if spec.layout == "contiguous")
Groups = Callable[[int, int], tuple[int, ...]]  # of a rank at a step; () if nothing is averaged


def run(pool: Pool, world: int, name: str, what: Scenario | None = None, **given: Any) -> Run:
    setup = ",".join(
        [SUBJECT, *(f"{key}={value!r}" for key, value in {"name": name, **given}.items())]
    )
    return run_hook(pool, what or scenario(30, bucket_cap_mb=ONE_BUCKET), world, setup=setup)


def require_definition(run: Run, groups: Groups) -> None:
    """Follow every parameter of every rank through local steps and averages, in float64.

    Tolerance: a step rounds at most twice, in its subtraction and in its average, each time by the
    unit roundoff of the value.
    """
    for index in range(len(run.scenario.params)):
        values = torch.zeros_like(gradients(run, 0, index))
        unit = torch.finfo(getattr(torch, run.scenario.params[index].dtype)).eps / 2
        largest = 0.0
        for step in range(len(run.scenario.steps)):
            values = values - gradients(run, step, index)
            means = [
                values[list(groups(step, rank))].mean(0) if groups(step, rank) else values[rank]
                for rank in range(run.world)
            ]
            values = torch.stack(means)
            largest = max(largest, float(values.abs().amax()))
            for rank in range(run.world):
                error = (result(run, rank, step, index) - values[rank]).abs().max()
                assert float(error) <= 2 * (step + 1) * unit * 2 * largest, (
                    step,
                    rank,
                    index,
                    float(error),
                )


def periodic(period: int, warmup: int, *groups: tuple[int, ...]) -> Groups:
    def of(step: int, rank: int) -> tuple[int, ...]:
        due = step >= warmup and (step - warmup) % period == 0
        return next(group for group in groups if rank in group) if due else ()

    return of


def hierarchical(sizes: dict[int, int], warmup: int) -> Groups:
    def of(step: int, rank: int) -> tuple[int, ...]:
        size = max((size for period, size in sizes.items() if step % period == 0), default=0)
        return (
            tuple(range(rank // size * size, rank // size * size + size))
            if size and step >= warmup
            else ()
        )

    return of


@pytest.mark.parametrize(
    ("world", "period", "warmup"), [(2, 4, 10), (3, 1, 0), (2, 7, 0), (2, 50, 40)], ids=str
)
@pytest.mark.filterwarnings("ignore:period")
def test_periodic(pool: Pool, world: int, period: int, warmup: int) -> None:
    mine = run(pool, world, "PeriodicModelAverager", period=period, warmup_steps=warmup)
    require_definition(mine, periodic(period, warmup, tuple(range(world))))


@pytest.mark.parametrize(
    ("world", "sizes", "warmup"), [(4, SIZES, 3), (4, {3: 4}, 0), (2, {5: 2}, 6)], ids=str
)
def test_hierarchical(pool: Pool, world: int, sizes: dict[int, int], warmup: int) -> None:
    mine = run(
        pool, world, "HierarchicalModelAverager", period_group_size_dict=sizes, warmup_steps=warmup
    )
    require_definition(mine, hierarchical(sizes, warmup))


@pytest.mark.parametrize("given", ["iterator", "groups", "both", "twice"])
def test_whatever_parameters_are_given_in(pool: Pool, given: str) -> None:
    plain = run(pool, 2, "PeriodicModelAverager", scenario(6), period=2)
    require_same_bits(
        run(pool, 2, "PeriodicModelAverager", scenario(6), period=2, given=given), plain
    )


def test_one_rank_without_a_gradient(pool: Pool) -> None:
    """It is averaged all the same; torch's aborts, or sums other parameters together."""
    what = scenario(6, params=PARAMS[:2])
    mine = run(pool, 2, "PeriodicModelAverager", what, period=2, unused=(1, 0))
    require_definition(mine, periodic(2, 0, (0, 1)))
    with torchs_own_fails("rank"):
        run(pool, 2, "PeriodicModelAverager", what, period=2, unused=(1, 0), torchs=True)


def test_on_subgroups(pool: Pool) -> None:
    """In a group in which a rank's place is not its global rank."""
    what = Scenario(
        "algorithm",
        "two groups",
        PARAMS[:3],
        ("normal",) * 6,
        groups=SUBGROUPS.groups,
        initial_value=0.0,
    )
    mine = run(pool, 4, "PeriodicModelAverager", what, period=2, warmup_steps=1)
    require_definition(mine, periodic(2, 1, *SUBGROUPS.groups))
    mine = run(pool, 4, "HierarchicalModelAverager", what, period_group_size_dict={3: 2})
    require_definition(mine, periodic(3, 0, *SUBGROUPS.groups))


def test_dtypes(pool: Pool) -> None:
    params = tuple(
        Param((5, 3), dtype) for dtype in ("float32", "float64", "bfloat16", "complex64")
    )
    mine = run(
        pool,
        2,
        "PeriodicModelAverager",
        Scenario("algorithm", "dtypes", taken_by_gloo(params), ("crafted",) * 4, initial_value=0.0),
        period=2,
    )
    require_definition(mine, periodic(2, 0, (0, 1)))


@pytest.mark.parametrize(
    ("world", "name", "options"),
    [
        (2, "PeriodicModelAverager", {"period": 4, "warmup_steps": 10}),
        (3, "PeriodicModelAverager", {"period": 2}),
        (4, "HierarchicalModelAverager", {"period_group_size_dict": SIZES, "warmup_steps": 3}),
    ],
    ids=str,
)
def test_beside_torchs(pool: Pool, world: int, name: str, options: dict[str, Any]) -> None:
    what = scenario(30, params=CONTIGUOUS, bucket_cap_mb=ONE_BUCKET)
    require_same_bits(
        run(pool, world, name, what, **options),
        run(pool, world, name, what, torchs=True, **options),
    )


def test_torchs_permutes_what_is_not_contiguous(pool: Pool) -> None:
    """torch's averager replaces a parameter's memory, with other strides.

    DDP still writes the gradient in the former strides.
    """
    what = scenario(6, params=(Param((8, 3, 2, 2), layout="channels_last"),))
    options = {"period": 2, "warmup_steps": 3}  # once DDP has regrouped its buckets
    torchs = run(pool, 2, "PeriodicModelAverager", what, torchs=True, **options)
    with pytest.raises(AssertionError):
        require_definition(torchs, periodic(2, 3, (0, 1)))
    require_definition(
        run(pool, 2, "PeriodicModelAverager", what, **options), periodic(2, 3, (0, 1))
    )


def test_arguments() -> None:
    for arguments, said in (
        ({"period": 0}, "period: an integer of at least 1; got 0"),
        ({"period": 2, "warmup_steps": -1}, "warmup_steps: an integer of at least 0"),
        ({"period": 2, "process_group": 3}, "process_group: a ProcessGroup"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            hooks_ref.PeriodicModelAverager(**arguments)
    for sizes, said in (
        ({}, "got none"),
        ({4: 2, 2: 2}, "ascend together"),
        ({4: 2, 2: 4}, "ascend together"),
        ({2: 4, 4: 2}, "ascend together"),
        ({2: 2, 4: 3}, "divides the next"),
        ({2: 1}, "a group size: an integer of at least 2"),
    ):
        with pytest.raises(ValueError, match=said):
            hooks_ref.HierarchicalModelAverager(sizes)
    with pytest.warns(UserWarning, match="period: 1"):
        hooks_ref.PeriodicModelAverager(1)


def test_sizes_of_groups_may_repeat() -> None:
    assert hooks_ref.HierarchicalModelAverager({2: 2, 4: 2}).period_group_size_dict == {2: 2, 4: 2}


@pytest.mark.usefixtures("default_group")
def test_no_group_is_the_default_group() -> None:
    one = torch.nn.Parameter(torch.ones(2))
    one.grad = torch.ones(2)
    hooks_ref.average_parameters([one], None)
    hooks_ref.average_parameters_or_parameter_groups([{"params": [one]}], None)
    assert one.tolist() == [1, 1]


@pytest.mark.usefixtures("default_group")
def test_parameters_of_integers_are_left_alone() -> None:
    """They have no gradient on any rank; a mean of them would not be an integer."""
    one = torch.nn.Parameter(torch.ones(2))
    one.grad = torch.ones(2)
    table = torch.nn.Parameter(torch.tensor([3, 5]), requires_grad=False)
    hooks_ref.PeriodicModelAverager(period=2).average_parameters([table, one])
    hooks_ref.DiLoCoModelAverager(period=2).average_parameters([table, one])
    assert table.tolist() == [3, 5]


def test_ranks_outside_of_the_group_average_nothing() -> None:
    """``new_group`` returns no group there, and an average would wait for nobody."""
    one = torch.nn.Parameter(torch.ones(2))
    one.grad = torch.ones(2)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    hooks_ref.average_parameters([one], outside)
    hooks_ref.average_parameters_or_parameter_groups([one], outside)
    for averager in (
        hooks_ref.PeriodicModelAverager(2, process_group=outside),
        hooks_ref.HierarchicalModelAverager({2: 2}, process_group=outside),
        hooks_ref.DiLoCoModelAverager(2, process_group=outside),
        hooks_ref.EMAModelAverager(0.5, process_group=outside),
    ):
        averager.average_parameters([one])
        assert averager.step == 1
    assert one.tolist() == [1, 1]


def test_what_is_averaged() -> None:
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    one.grad = torch.ones(2)
    assert hooks_ref.get_params_to_average(iter([one, other, one])) == [one]
    assert hooks_ref.get_params_to_average([{"params": [other]}, {"params": iter([one])}]) == [one]
    with pytest.raises(TypeError, match="got Tensor"):
        hooks_ref.get_params_to_average([torch.zeros(2)])  # type: ignore[list-item]


def test_the_step_survives_a_checkpoint() -> None:
    averager = hooks_ref.PeriodicModelAverager(3, 5)
    averager.step = 7
    other = hooks_ref.PeriodicModelAverager(3, 5)
    other.load_state_dict(averager.state_dict())
    assert (other.step, other.is_due()) == (7, False)
    with pytest.raises(KeyError):
        other.load_state_dict({})

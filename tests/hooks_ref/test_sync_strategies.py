"""Sync strategies beside their definition, a mean that can be written down."""

import pytest
import torch

import hooks_ref
from conformance.hosts.pool import Pool
from conformance.judging.run_failures import failed_run
from conformance.records.run import Run
from conformance.scenarios.hook import SUBGROUPS
from conformance.scenarios.model import Param, Scenario
from tests.hooks_ref.algorithms import run_hook, try_hook
from tests.hooks_ref.sync_subjects import USES, gradient

SUBJECTS = "tests.hooks_ref.sync_subjects"
ALL = [strategy.value for strategy in hooks_ref.DDPSyncStrategy]
FORCED = ["forced_sync", "overlapped_sync"]
WHAT = Scenario(
    "algorithm",
    "three steps",
    (Param((3,)), Param((2, 2)), Param((5,))),
    ("crafted",) * 3,
    initial_value=0.0,
)


def run(pool: Pool, world: int, strategy: str, what: Scenario = WHAT, **given: object) -> Run:
    setup = ",".join(
        [
            f"{SUBJECTS}:synchronised",
            *(f"{key}={value!r}" for key, value in {"strategy": strategy, **given}.items()),
        ]
    )
    return run_hook(pool, what, world, setup=setup)


def require_mean(
    run: Run, uses: str, batches: int, groups: tuple[tuple[int, ...], ...] = ()
) -> None:
    """Every rank has the sum over micro-batches of its group's means, for used parameters only."""
    for rank in range(run.world):
        group = next((group for group in groups if rank in group), tuple(range(run.world)))
        for index in range(len(run.scenario.params)):
            # A subject gets its place in its group.
            fed = [
                gradient(b, place, index)
                for b in range(batches)
                for place in range(len(group))
                if index in USES[uses](b, place)
            ]
            for step in range(len(run.scenario.steps)):
                got = run.got(rank, step, index)
                if not fed:
                    assert got is None, (rank, step, index, got)
                else:
                    assert got is not None, (rank, step, index)
                    assert torch.allclose(got, torch.tensor(sum(fed) / len(group)).double()), (
                        rank,
                        step,
                        index,
                        got,
                    )


@pytest.mark.parametrize("batches", [1, 2, 4])
@pytest.mark.parametrize("strategy", ALL)
def test_all_end_in_the_same(pool: Pool, strategy: str, batches: int) -> None:
    require_mean(run(pool, 2, strategy, batches=batches), "same", batches)


@pytest.mark.parametrize(
    ("strategy", "find_unused"),
    [("multi_auto_sync", True), *((s, unused) for s in FORCED for unused in (False, True))],
)
@pytest.mark.parametrize("uses", ["differ", "by_rank", "one_rank_alone"])
def test_whatever_is_used(pool: Pool, strategy: str, find_unused: bool, uses: str) -> None:
    """By other ranks too; Composer's forced_sync averages different parameters together."""
    require_mean(run(pool, 3, strategy, uses=uses, find_unused=find_unused, batches=2), uses, 2)


def test_single_auto_sync_loses_a_sync(pool: Pool) -> None:
    """Each rank keeps its own gradient of parameters that the last micro-batch does not use.

    DDP notices in the next step. With find_unused_parameters it keeps account of the parameters
    that other ranks have used.
    """
    one_step = Scenario("algorithm", "one step", WHAT.params, ("crafted",), initial_value=0.0)
    require_mean(
        run(pool, 2, "single_auto_sync", one_step, uses="differ", find_unused=True), "differ", 2
    )
    single = run(pool, 2, "single_auto_sync", one_step, uses="differ")
    assert [float(single.got(rank, 0, 0)[0]) for rank in range(2)] == [
        gradient(0, rank, 0) for rank in range(2)
    ]  # type: ignore[index]


@pytest.mark.parametrize("strategy", FORCED)
def test_two_optimizers_that_share_a_parameter(pool: Pool, strategy: str) -> None:
    """It is divided once."""
    require_mean(run(pool, 2, strategy, optimizers=2), "same", 2)


@pytest.mark.parametrize("strategy", ALL)
def test_views_and_subgroups(pool: Pool, strategy: str) -> None:
    what = Scenario(
        "algorithm",
        "two groups",
        WHAT.params,
        ("crafted",) * 2,
        groups=SUBGROUPS.groups,
        initial_value=0.0,
    )
    require_mean(run(pool, 4, strategy, what, view=True), "same", 2, SUBGROUPS.groups)


def test_sparse_and_strided(pool: Pool) -> None:
    run_hook(pool, WHAT, 3, setup=f"{SUBJECTS}:sparse_and_strided,strategy='forced_sync'")
    broken = failed_run(
        try_hook(pool, WHAT, 1, setup=f"{SUBJECTS}:sparse_and_strided,strategy='overlapped_sync'")
    )
    assert broken is not None
    assert "no sparse gradients; use forced_sync" in broken.line


@pytest.mark.parametrize("strategy", FORCED)
def test_an_exception_is_what_is_seen(pool: Pool, strategy: str) -> None:
    """On the rank that raises nothing is communicated, so that its own error is the one that comes
    out."""
    setup = f"{SUBJECTS}:synchronised,strategy={strategy!r},fails_on=0"
    broken = failed_run(try_hook(pool, WHAT, 2, setup=setup))
    assert broken is not None
    assert "this micro-batch failed" in broken.line


def test_other_modules_and_arguments() -> None:
    module = torch.nn.Linear(2, 2)
    with hooks_ref.ddp_sync_context(module, True, "forced_sync"):
        module(torch.ones(2)).sum().backward()
    assert module.weight.grad is not None
    with (
        pytest.raises(ValueError, match="sometimes"),
        hooks_ref.ddp_sync_context(module, True, "sometimes"),
    ):
        pass
    with pytest.raises(RuntimeError, match="init_process_group first"):
        hooks_ref.prepare_ddp_module(module, find_unused_parameters=False)

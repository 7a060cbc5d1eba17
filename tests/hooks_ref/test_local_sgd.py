"""Post-local SGD: the mean of all, then of a subgroup or of nobody; and torch's own."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs

from conformance.hosts.pool import Pool
from conformance.records.run import Run
from conformance.scenarios.hook import COLLECTIVE_RAISES, PEER_DIES, TRAINING
from conformance.scenarios.model import Param, Scenario
from hooks_ref import local_sgd
from hooks_ref.local_sgd import PostLocalSGDState
from tests.hooks_ref.algorithms import (
    every,
    gradients,
    other_tensors,
    require_resumes,
    require_same_bits,
    result,
    run_hook,
    scenario,
    torchs_own_fails,
    try_hook,
)
from tests.torch_marks import taken_by_gloo

HOOK = "hooks_ref.local_sgd:post_localSGD_hook"
SUBJECTS = "tests.hooks_ref.local_sgd_subjects"
START = 4
# One parameter of each kind that has to travel: other dtypes, complex, a scalar, an empty one, a
# sparse one.
KINDS = (
    *(
        Param((5, 3), "float64"),
        Param((5, 3), "float16"),
        Param((17,), "bfloat16"),
        Param((5, 3), "complex64"),
    ),
    *(Param(()), Param((0,)), Param((10, 3), layout="sparse"), Param((7,))),
)


def require_local_sgd(run: Run, machines: str, start: int = START) -> None:
    """Compare each step with the mean of the group before ``start``, and of the ranks with the same
    letter after it.

    Tolerance. A mean of n rounds n quotients and n - 1 sums of quotients; none exceeds sum |g_r| /
    n: at most (2 n - 1) u sum |g_r| / n, with u half the machine epsilon of the dtype, and 1 % for
    u squared. A mean of one is exact.
    """
    for step, rank, index in every(run):
        group = run.group(rank)
        spec = run.scenario.params[index]
        mates = [
            peer
            for place, peer in enumerate(group)
            if step < start or machines[place] == machines[group.index(rank)]
        ]
        fed = gradients(run, step, index)[mates]
        unit = torch.finfo(getattr(torch, spec.dtype)).eps / 2
        bound = 1.01 * (2 * len(mates) - 1) * unit * fed.abs().mean(0) * (len(mates) > 1)
        assert ((result(run, rank, step, index) - fed.mean(0)).abs() <= bound).all(), (
            step,
            rank,
            index,
        )


@pytest.mark.parametrize(
    ("machines", "start"), [("AB", START), ("AA", START), ("ABA", START), ("ABA", 0), ("ABBA", 1)]
)
def test_averages_over_all_then_over_one_machine(pool: Pool, machines: str, start: int) -> None:
    """Several buckets, across the rebuild.

    Machines have unequal sizes, and ranks of one machine are not neighbours.
    """
    run = run_hook(
        pool,
        scenario(),
        len(machines),
        setup=f"{SUBJECTS}:by_machine,hosts='{machines}',start={start}",
    )
    require_local_sgd(run, machines, start)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rarely), 3])
def test_keeps_its_own_gradients(pool: Pool, world: int) -> None:
    groups = f"subgroups={[list(range(world))]}"
    run = run_hook(
        pool, scenario(), world, setup=f"{SUBJECTS}:by_group,{groups},start={START},allreduce=False"
    )
    require_local_sgd(run, "ABC")


def test_averages_over_a_given_subgroup(pool: Pool) -> None:
    run = run_hook(
        pool, scenario(), 3, setup=f"{SUBJECTS}:by_group,subgroups=[[0, 2], [1]],start={START}"
    )
    require_local_sgd(run, "ABA")


def test_in_groups_smaller_than_world(pool: Pool) -> None:
    """Two models at once, each with machines of its own; places in a group are not global ranks."""
    what = replace(scenario(8), groups=((1, 3, 4), (0, 2)))
    require_local_sgd(run_hook(pool, what, 5, setup=f"{SUBJECTS}:by_machine,hosts='ABA'"), "ABA")


def test_in_one_group_while_others_stay_out(pool: Pool) -> None:
    """A rank outside the group makes no subgroup with them, and all can make groups together
    afterwards."""
    what = replace(scenario(8), groups=((0, 1, 3), (2,)))
    run = run_hook(pool, what, 4, setup=f"{SUBJECTS}:by_machine_or_never,hosts='ABA'")
    require_local_sgd(run, "ABA")


@pytest.mark.parametrize("kind", ["crafted", "normal"])
def test_every_kind_of_parameter(pool: Pool, kind: str) -> None:
    what = scenario(5, params=taken_by_gloo(KINDS), kind=kind)
    require_local_sgd(
        run_hook(pool, what, 3, setup=f"{SUBJECTS}:by_machine,hosts='ABA',start=2"), "ABA", 2
    )


def test_replicas_are_the_same_within_a_subgroup_alone(pool: Pool) -> None:
    run = run_hook(pool, scenario(8, kind="wide"), 3, setup=f"{SUBJECTS}:by_machine,hosts='ABA'")
    for step in range(8):
        for other, same in ((2, True), (1, step < START)):
            equal = [
                torch.equal(result(run, 0, step, index), result(run, other, step, index))
                for index in range(len(run.scenario.params))
            ]
            assert all(equal) == same, (step, other)


@pytest.mark.parametrize("allreduce", [True, False])
@pytest.mark.parametrize("subgroups", ["[[0, 2], [1]]", "[[0, 1, 2]]"])
def test_gives_the_bits_that_torch_gives(pool: Pool, subgroups: str, allreduce: bool) -> None:
    given = f"subgroups={subgroups},start={START},allreduce={allreduce}"
    ours, theirs = (
        run_hook(pool, scenario(8), 3, setup=f"{SUBJECTS}:by_group,whose={whose},{given}")
        for whose in ("ours", "torchs")
    )
    require_same_bits(ours, theirs)


def test_trains_as_torchs_does_with_an_averager(pool: Pool) -> None:
    """Compare the parameters of every step: subgroups agree only after an average."""
    ours, theirs = (
        run_hook(
            pool, TRAINING, 3, setup=f"{SUBJECTS}:averaged,subgroups=[[0, 2], [1]],whose={whose}"
        )
        for whose in ("ours", "torchs")
    )
    for mine, other in zip(ours.ranks, theirs.ranks, strict=True):
        assert mine.tensors.keys() == other.tensors.keys()
        assert other_tensors(mine.tensors, other.tensors) == []
    first = ours.ranks[0].tensors
    second = ours.ranks[1].tensors
    apart = [
        any(
            not torch.equal(first[name], second[name])
            for name in first
            if name.startswith(f"{step}/parameter")
        )
        for step in range(6)
    ]
    assert apart == [False, False, False, True, False, True]


def test_the_subgroup_is_made_on_cpu_where_torchs_fails(pool: Pool) -> None:
    with torchs_own_fails(
        "ValueError: Default group size only takes effect when CUDA is available"
    ):
        run_hook(pool, scenario(6), setup=f"{SUBJECTS}:by_default,whose=torchs")
    require_local_sgd(run_hook(pool, scenario(6), setup=f"{SUBJECTS}:by_default"), "AA")


@pytest.mark.parametrize("start", [0, 3])
def test_the_subgroup_is_made_once_and_late(pool: Pool, start: int) -> None:
    run_hook(pool, scenario(6), setup=f"{SUBJECTS}:makes_groups_where_it_says,start={start}")


@pytest.mark.parametrize("whose", ["ours", "torchs"])
def test_iter_counts_on(pool: Pool, whose: str) -> None:
    run_hook(pool, scenario(4), setup=f"{SUBJECTS}:counts_on,whose={whose}")


@pytest.mark.parametrize(
    ("hook", "state"),
    [
        (HOOK, "starts_at_8"),
        (HOOK, "own_from_8"),
        (f"{SUBJECTS}:hook_on_machines_of_their_own", "starts_at_8"),
    ],
)
def test_resumes_bit_for_bit(pool: Pool, tmp_path: Path, hook: str, state: str) -> None:
    require_resumes(pool, tmp_path, hook, f"{SUBJECTS}:{state}")


def test_leaves_the_generators_alone(pool: Pool) -> None:
    run = run_hook(
        pool,
        scenario(6),
        setup=f"{SUBJECTS}:by_machine,hosts='AB',start=2",
    )
    assert [event["rng_changed"] for rank in run.ranks for event in rank.all("stepped")] == [
        []
    ] * 12


@pytest.mark.parametrize("what", [PEER_DIES, COLLECTIVE_RAISES], ids=lambda what: what.name)
def test_a_failed_collective_shows(pool: Pool, what: Scenario) -> None:
    """At step 2: the step that makes the subgroup, or a later one."""
    for start in (2, 1):
        run = try_hook(pool, what, setup=f"{SUBJECTS}:by_default,start={start}")
        seen = [fault["raised"] for rank in run.ranks for fault in rank.all("fault")]
        assert seen
        assert all(seen), start


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PostLocalSGDState(7, None, 1), "process_group: a ProcessGroup"),  # type: ignore[arg-type]
        (
            lambda: PostLocalSGDState(None, -100, 1),
            "subgroup: a ProcessGroup with this rank as a member, or None; got -100",
        ),  # type: ignore[arg-type]
        (
            lambda: PostLocalSGDState(None, None, -1),
            "start_localSGD_iter: an integer of at least 0; got -1",
        ),
        (
            lambda: PostLocalSGDState(None, None, 1.5),
            "start_localSGD_iter: an integer of at least 0",
        ),  # type: ignore[arg-type]
        (
            lambda: PostLocalSGDState(None, None, 1, 1),
            "post_local_gradient_allreduce: True or False; got 1",
        ),  # type: ignore[arg-type]
    ],
)
def test_arguments_out_of_range_are_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        make()
    assert said in str(raised.value)


def test_is_made_before_the_group_and_saved_as_plain_data(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    one = PostLocalSGDState(None, None, 3)
    other = PostLocalSGDState(None, None, 3)
    one.iter = 5
    torch.save(one, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (
        loaded.state_dict()
        == one.state_dict()
        == {"iter": 5, "start_localSGD_iter": 3, "post_local_gradient_allreduce": True}
    )
    assert loaded.subgroup is None
    assert other.iter == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_signatures_are_torchs() -> None:
    for name in ("PostLocalSGDState", "post_localSGD_hook"):
        theirs, mine = (
            inspect.signature(getattr(module, name)).parameters for module in (torchs, local_sgd)
        )
        assert {key: value.default for key, value in theirs.items()} == {
            key: value.default for key, value in mine.items()
        }

"""GossipGraD, beside the topology of its paper written out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.judging.run_failures import failed_run
from conformance.records.run import Run
from conformance.scenarios.hook import COLLECTIVE_RAISES, PEER_DIES
from conformance.scenarios.model import Param, Scenario
from hooks_ref.gossip import GossipGraDState
from tests.hooks_ref.algorithms import (
    ONE_BUCKET,
    SEVERAL_BUCKETS,
    every,
    gradients,
    require_resumes,
    require_same_bits,
    result,
    run_hook,
    scenario,
    try_hook,
)
from tests.torch_marks import taken_by_gloo

HOOK = "hooks_ref.gossip:gossip_grad_hook"
SUBJECTS = "tests.hooks_ref.gossip_subjects"
PHASES = {2: 1, 3: 2, 4: 2, 5: 3}  # ceil(log2 W)
SEED = 7
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


def source(size: int, place: int, step: int, topology: str) -> int:
    """Return the place that ``place`` receives from.

    It is r - 2^k, or r XOR 2^k, with k = step mod ceil(log2 W).
    """
    k = step % PHASES[size]
    return place ^ 2**k if topology == "hypercube" else (place - 2**k) % size


def partner(size: int, rank: int, step: int, topology: str) -> int:
    """The same for ranks, which take other places every ceil(log2 W) steps."""
    order = GossipGraDState(random_seed=SEED)._order(size, step // PHASES[size])
    return order[source(size, order.index(rank), step, topology)]


def require_gossip(run: Run, topology: str, start: int = 0) -> None:
    """Compare each step with (own + partner's) / 2, and with the mean of all before ``start``.

    Tolerance. A half is exact in binary, so that a mean of two has the one rounding of their sum: u
    |mean|, with u half the machine epsilon of the dtype. The mean of W rounds W quotients and W - 1
    sums of quotients; none exceeds sum |g_r| / W: at most (2 W - 1) u sum |g_r| / W, here with 1 %
    for u squared.
    """
    for step, rank, index in every(run):
        group = run.group(rank)
        spec = run.scenario.params[index]
        size = len(group)
        unit = torch.finfo(getattr(torch, spec.dtype)).eps / 2
        fed = gradients(run, step, index)[list(group)]
        own = group.index(rank)
        if step < start or spec.layout == "sparse":
            expected = fed.mean(0)
            bound = 1.01 * (2 * size - 1) * unit * fed.abs().mean(0)
        else:
            expected = (fed[own] + fed[partner(size, own, step - start, topology)]) / 2
            bound = unit * expected.abs()
        assert ((result(run, rank, step, index) - expected).abs() <= bound).all(), (
            step,
            rank,
            index,
        )


@pytest.mark.parametrize(
    ("topology", "world", "start"),
    [
        *(
            ("dissemination", 2, 0),
            ("dissemination", 3, 0),
            ("dissemination", 3, 3),
            ("dissemination", 4, 1),
        ),
        *(("hypercube", 2, 0), ("hypercube", 4, 0), ("hypercube", 4, 2)),
    ],
)
def test_each_step_is_the_mean_with_the_partner(
    pool: Pool, topology: str, world: int, start: int
) -> None:
    """Several buckets, across the rebuild, over several rotations."""
    run = run_hook(
        pool,
        scenario(),
        world,
        setup=f"{SUBJECTS}:gossips,topology={topology},start={start},seed={SEED}",
    )
    require_gossip(run, topology, start)


def test_in_groups_smaller_than_world(pool: Pool) -> None:
    """Two models at once; places in a group are not global ranks."""
    what = replace(scenario(8), groups=((1, 3, 4), (0, 2)))
    require_gossip(
        run_hook(pool, what, 5, setup=f"{SUBJECTS}:gossips,seed={SEED}"), "dissemination"
    )


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rarely), 3])
@pytest.mark.parametrize("kind", ["crafted", "normal"])
def test_every_kind_of_parameter(pool: Pool, kind: str, world: int) -> None:
    what = scenario(6, params=taken_by_gloo(KINDS), kind=kind)
    run = run_hook(pool, what, world, setup=f"{SUBJECTS}:gossips,seed={SEED}")
    require_gossip(run, "dissemination")


def test_ranks_hold_different_gradients(pool: Pool) -> None:
    run = run_hook(pool, scenario(6), 3, hook=HOOK, state=f"{SUBJECTS}:state")
    for step in range(6):
        same = all(
            torch.equal(result(run, 0, step, index), result(run, 1, step, index))
            for index in range(len(run.scenario.params))
        )
        assert same == (step < 2), step


@pytest.mark.parametrize("world", [1, 2])
def test_of_one_or_two_it_is_the_mean(pool: Pool, world: int) -> None:
    """The bits that an allreduce gives, in one bucket or several."""
    plain = run_hook(pool, scenario(6), world, hook="hooks_ref:allreduce_hook")
    for topology, cap in (("dissemination", ONE_BUCKET), ("hypercube", SEVERAL_BUCKETS)):
        run = run_hook(
            pool,
            scenario(6, bucket_cap_mb=cap),
            world,
            setup=f"{SUBJECTS}:gossips,topology={topology}",
        )
        require_same_bits(run, plain)


@pytest.mark.parametrize(("topology", "world"), [("dissemination", 3), ("hypercube", 4)])
def test_sends_each_bucket_once_to_one_rank(pool: Pool, topology: str, world: int) -> None:
    run_hook(pool, scenario(6), world, setup=f"{SUBJECTS}:watched,topology={topology},start=2")


def test_resumes_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    require_resumes(pool, tmp_path, HOOK, f"{SUBJECTS}:state")


def test_resumes_among_the_same_partners(pool: Pool, tmp_path: Path) -> None:
    """At three ranks, so that steps differ by their partners."""
    given = f"hook='{HOOK}',folder='{tmp_path}'"
    whole = run_hook(pool, scenario(12), 3, hook=HOOK, state=f"{SUBJECTS}:state")
    run_hook(
        pool,
        scenario(7),
        3,
        setup=f"tests.hooks_ref.saved_states:saves,state='{SUBJECTS}:state',{given}",
    )
    rest = run_hook(
        pool, scenario(5, first_step=7), 3, setup=f"tests.hooks_ref.saved_states:loads,{given}"
    )
    require_same_bits(rest, whole, steps=lambda step: step + 7)


def test_leaves_the_generators_alone(pool: Pool) -> None:
    run = run_hook(
        pool,
        scenario(6),
        3,
        setup=f"{SUBJECTS}:gossips",
    )
    assert [event["rng_changed"] for rank in run.ranks for event in rank.all("stepped")] == [
        []
    ] * 18


@pytest.mark.parametrize("what", [PEER_DIES, COLLECTIVE_RAISES], ids=lambda what: what.name)
def test_a_failed_collective_shows(pool: Pool, what: Scenario) -> None:
    run = try_hook(pool, what, setup=f"{SUBJECTS}:gossips")
    seen = [fault["raised"] for rank in run.ranks for fault in rank.all("fault")]
    assert seen
    assert all(seen)


def test_a_hypercube_of_another_size_is_refused(pool: Pool) -> None:
    """In the constructor, if the group is known there; else in the first step."""
    for setup, where in (
        ("gossips,topology=hypercube", "in the set-up function"),
        ("gossips_by_default", "in hook call 0"),
    ):
        broken = failed_run(try_hook(pool, scenario(3), 3, setup=f"{SUBJECTS}:{setup}"))
        assert broken is not None
        assert (
            "ValueError: topology: a hypercube needs a group of 1, 2, 4, 8, ... ranks; this one "
            "has 3" in broken.line
        )
        assert where in broken.line


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 16, 33])
def test_partners_agree_and_everyone_hears_of_everyone(size: int) -> None:
    for topology in ("dissemination", "hypercube") if size.bit_count() == 1 else ("dissemination",):
        state = GossipGraDState(topology=topology)
        # ceil(log2(size)), counted.
        phases = next(phases for phases in range(size + 1) if 2**phases >= size)
        mixed = torch.eye(size, dtype=torch.float64)
        for step in range(3 * phases):
            pairs = [state.partners(rank, size, step) for rank in range(size)]
            assert all(
                pairs[to][1] == rank and (to != rank or size == 1)
                for rank, (to, _) in enumerate(pairs)
            )
            if step % phases == 0:
                mixed = torch.eye(size, dtype=torch.float64)
            mixed = torch.stack(
                [(mixed[rank] + mixed[heard]) / 2 for rank, (_, heard) in enumerate(pairs)]
            )
            if step % phases == phases - 1:
                assert (mixed > 0).all(), "diffusion in ceil(log2 W) steps"
                if size.bit_count() == 1:
                    # Exact, as sums of powers of two.
                    assert torch.equal(mixed, torch.full_like(mixed, 1 / size))


def test_partners_rotate() -> None:
    """Places are permuted every ceil(log2 W) steps, alike for one seed, and in time everyone meets
    everyone."""
    size = 6
    state = GossipGraDState(random_seed=1)
    same = GossipGraDState(random_seed=1)
    other = GossipGraDState(random_seed=2)
    orders = [state._order(size, rotation) for rotation in range(100)]
    assert orders[0] == list(range(size))
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len(set(map(tuple, orders))) > 50  # of 720
    assert orders == [same._order(size, rotation) for rotation in range(100)]
    assert orders != [other._order(size, rotation) for rotation in range(100)]
    assert {
        (rank, state.partners(rank, size, step)[0]) for rank in range(size) for step in range(300)
    } == {(one, two) for one in range(size) for two in range(size) if one != two}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GossipGraDState(7), "process_group: a ProcessGroup"),  # type: ignore[arg-type]
        (
            lambda: GossipGraDState(topology="ring"),
            'topology: "dissemination" or "hypercube"; got \'ring\'',
        ),
        (lambda: GossipGraDState(start_iter=-1), "start_iter: an integer of at least 0; got -1"),
        (lambda: GossipGraDState(random_seed=0.5), "random_seed: an integer of at least 0"),  # type: ignore[arg-type]
        (
            lambda: GossipGraDState(topology="hypercube").partners(0, 6, 0),
            "1, 2, 4, 8, ... ranks; this one has 6",
        ),
    ],
)
def test_arguments_out_of_range_are_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        make()
    assert said in str(raised.value)


def test_is_made_before_the_group_and_saved_as_plain_data(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    one = GossipGraDState(random_seed=3)
    other = GossipGraDState()
    one.iter = 5
    one.partners(1, 5, 9)
    torch.save(one, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (
        loaded.state_dict()
        == one.state_dict()
        == {"iter": 5, "topology": "dissemination", "start_iter": 0, "random_seed": 3}
    )
    assert other.state_dict() == {
        "iter": 0,
        "topology": "dissemination",
        "start_iter": 0,
        "random_seed": 0,
    }
    assert torch.equal(torch.get_rng_state(), before)

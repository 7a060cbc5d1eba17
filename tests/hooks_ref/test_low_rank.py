"""PowerSGD beside its definition in float64, and beside torch's."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.judging.verdict import Verdict
from conformance.records.run import Run
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import Param
from hooks_ref import PowerSGDState, batched_powerSGD_hook, low_rank, powerSGD_hook  # noqa: F401 - a saved state is loaded
from tests.cases import Case, Judgements
from tests.hooks_ref.algorithms import (
    ONE_BUCKET,
    PARAMS,
    every,
    gradients,
    require_resumes,
    require_same_bits,
    result,
    run_hook,
    scenario,
    torchs_own_fails,
    try_hook,
)

STATES = "examples.states"
SUBJECTS = "tests.hooks_ref.low_rank_subjects"
STEPS = 14
START = 2
RANK = 2
UNIT = 2.0**-24
WITHOUT_SCALARS = tuple(spec for spec in PARAMS if spec.shape)


def shape(index: int, params: tuple[Param, ...] = PARAMS) -> tuple[int, int]:
    """Return rows and columns; (1, n) for a parameter that is not a matrix."""
    size = params[index].shape
    return (size[0], math.prod(size[1:])) if len(size) > 1 else (1, math.prod(size))


def compressed(index: int, params: tuple[Param, ...] = PARAMS) -> bool:
    n, m = shape(index, params)
    return n > 1 and (n + m) * min(n, m, RANK) < n * m


def require_definition(
    run: Run,
    first_q: Callable[[int, int], torch.Tensor],
    *,
    feedback: bool = True,
    warm: bool = True,
    start: int = START,
) -> None:
    """Check every step of every compressed parameter.

    The result is ``P P^T mean(M)`` with ``P = orth(mean(M) orth(Q))``.

    Each step is predicted from the run's own results before it, in float64, so that errors do not
    add up over steps. Tolerance, with u float32's unit roundoff, norms Frobenius', A = mean(M), F =
    mean |M_r|: the span of Q, taken from the last result, is known within d1 = m k u cond(Q); that
    of P within d2 = (|A| d1 + (m + W + 2 t) u F) / sigma_k(A Q) + n k u (perturbation of a span,
    Wedin); hence the projection of A within 2 d2 |A| + (n + k + W + 2 t) u F.
    """
    params = run.scenario.params
    for index in [index for index in range(len(params)) if compressed(index, params)]:
        n, m = shape(index, params)
        k = min(n, m, RANK)
        key = len(params) - index
        errors = torch.zeros(run.world, n, m, dtype=torch.float64)
        q = first_q(key, m)
        for step in range(start, len(run.scenario.steps)):
            q = q if warm or step == start else first_q(key, m)
            matrices = gradients(run, step, index).view(run.world, n, m) + errors
            a = matrices.mean(0)
            scale = float(matrices.norm(dim=(1, 2)).mean())
            t = 2 * (step - start + 1)
            q_hat = torch.linalg.qr(q.double()).Q
            p = torch.linalg.qr(a @ q_hat).Q
            d1 = m * k * UNIT * float(torch.linalg.cond(q.double()))
            d2 = (float(a.norm()) * d1 + (m + run.world + t) * UNIT * scale) / float(
                torch.linalg.svdvals(a @ q_hat)[-1]
            ) + n * k * UNIT
            bound = 2 * d2 * float(a.norm()) + (n + k + run.world + t) * UNIT * scale
            got = result(run, 0, step, index).view(n, m)
            assert (got - p @ p.t() @ a).norm() <= bound, (
                step,
                index,
                float((got - p @ p.t() @ a).norm()),
                bound,
            )
            assert bound < 0.01 * a.norm(), "this bound would let anything through"
            errors = matrices - got if feedback else errors
            q = got.t() @ p


def drawn(rank: int = RANK) -> Callable[[int, int], torch.Tensor]:
    def first_q(key: int, columns: int) -> torch.Tensor:
        state = PowerSGDState(None, rank)
        state.iter = START
        return state.q(key, columns, rank, torch.empty(()))

    return first_q


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.rarely), 4])
@pytest.mark.parametrize("state", ["power_sgd", "power_sgd_same_shapes"])
def test_each_step_is_what_the_definition_gives(pool: Pool, state: str, world: int) -> None:
    """With several buckets, across the rebuild, on Gloo; torch's own hangs there."""
    run = run_hook(
        pool, scenario(STEPS), world, hook="hooks_ref:powerSGD_hook", state=f"{STATES}:{state}"
    )
    require_definition(run, drawn())
    for step, rank, index in every(run):
        assert torch.equal(result(run, rank, step, index), result(run, 0, step, index))


def test_without_feedback_and_warm_start(pool: Pool) -> None:
    run = run_hook(
        pool, scenario(START + 1), hook="hooks_ref:powerSGD_hook", state=f"{STATES}:power_sgd_fresh"
    )
    require_definition(run, drawn(), feedback=False, warm=False)


@pytest.mark.parametrize("state", ["power_sgd", "power_sgd_fresh"])
def test_what_is_not_compressed_is_the_mean(pool: Pool, state: str) -> None:
    """Warm-up ends at exactly its step; vectors and small matrices are exact for ever."""
    run = run_hook(
        pool,
        scenario(6, kind="crafted"),
        3,
        hook="hooks_ref:powerSGD_hook",
        state=f"{STATES}:{state}",
    )
    for step, rank, index in every(run):
        exact = torch.equal(result(run, rank, step, index), gradients(run, step, index).mean(0))
        assert exact == (step < START or not compressed(index)), (step, rank, index)


def test_compresses_from_the_first_step_if_asked(pool: Pool) -> None:
    run = run_hook(
        pool,
        scenario(4, kind="crafted"),
        hook="hooks_ref:powerSGD_hook",
        state=f"{STATES}:power_sgd_from_the_start",
    )
    assert not torch.equal(result(run, 0, 0, 0), gradients(run, 0, 0).mean(0))


@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_one_bucket_or_several(pool: Pool, hook: str) -> None:
    """Per parameter the grouping changes no bit.

    The square of a bucket depends on it, but not its finiteness.
    """
    one, several = (
        run_hook(
            pool,
            scenario(6, bucket_cap_mb=cap),
            hook=f"hooks_ref:{hook}",
            state=f"{STATES}:power_sgd",
        )
        for cap in (25.0, 64 / 2**20)
    )
    if hook == "powerSGD_hook":
        require_same_bits(one, several)
    assert all(
        result(several, 0, step, index).isfinite().all() for step, _, index in every(several)
    )


def test_resumes_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    """The batched hook does not resume bit for bit.

    Its first step after a resume compresses another square, since DDP starts from its first
    grouping.
    """
    require_resumes(pool, tmp_path, "hooks_ref:powerSGD_hook", f"{STATES}:power_sgd")


def errors_of(state: PowerSGDState, key: int, spec: Param) -> torch.Tensor:
    """Return a saved state's error of a parameter, in C order."""
    if part := state.square_errors.parts.get(key, torch.empty(0)).numel():
        order = lay_out(torch.arange(part).view(spec.shape), spec.layout)
        return state.square_errors.parts[key][torch.as_strided(order, (part,), (1,)).argsort()]
    return state.errors.get(key, torch.zeros(math.prod(spec.shape))).reshape(-1)


@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_feedback_telescopes(pool: Pool, tmp_path: Path, hook: str) -> None:
    """Results and the mean of the ranks' last errors sum to the means, within (2 t + W + 2) u
    max|M| at each element."""
    given = f"hook='hooks_ref:{hook}',state='{STATES}:power_sgd',folder='{tmp_path}'"
    run = run_hook(pool, scenario(STEPS), 3, setup=f"tests.hooks_ref.saved_states:saves,{given}")
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    for index, spec in enumerate(PARAMS):
        fed = torch.stack([gradients(run, step, index).mean(0) for step in range(STEPS)])
        got = torch.stack([result(run, 0, step, index) for step in range(STEPS)])
        left = torch.stack(
            [errors_of(state, len(PARAMS) - index, spec).double() for state in states]
        )
        bound = (2 * STEPS + 5) * UNIT * float((fed.abs().sum(0) + left.abs().sum(0)).max())
        assert (fed.sum(0) - got.sum(0) - left.mean(0)).abs().max() <= bound
        assert (left.abs().max() > 0.1) == (compressed(index) or hook == "batched_powerSGD_hook")


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rarely), 3])
def test_batched_is_the_definition_on_a_square(pool: Pool, world: int) -> None:
    """One bucket of one parameter of 10 x 10.

    The square is the parameter, and the definition of the other hook applies.
    """
    params = (Param((10, 10)),)
    runs = [
        run_hook(
            pool,
            scenario(STEPS, params=params),
            world,
            hook=f"hooks_ref:{hook}",
            state=f"{STATES}:power_sgd",
        )
        for hook in ("powerSGD_hook", "batched_powerSGD_hook")
    ]
    for step in range(STEPS):
        one, other = (result(run, 0, step, 0) for run in runs)
        assert torch.equal(one, other), step


def test_torchs_follows_the_same_definition_where_it_works(pool: Pool) -> None:
    """One bucket of contiguous parameters.

    It agrees within the same tolerance, from the Q that torch's draws.
    """
    params = tuple(spec for spec in WITHOUT_SCALARS if spec.layout == "contiguous")
    run = run_hook(
        pool,
        scenario(STEPS, params=params, bucket_cap_mb=ONE_BUCKET),
        hook=f"{SUBJECTS}:torchs_hook",
        state=f"{SUBJECTS}:torchs",
    )
    generator = torch.Generator().manual_seed(
        int(numpy.random.RandomState(0).randint(1_000_000_000))
    )
    matrices = [index for index in reversed(range(len(params))) if compressed(index, params)]
    qs = {
        len(params) - index: torch.randn(shape(index, params)[1], RANK, generator=generator)
        for index in matrices
    }
    require_definition(run, lambda key, columns: qs[key])


def test_zero_gradients_give_zero_and_training_goes_on(pool: Pool) -> None:
    run = run_hook(pool, scenario(8), setup=f"{SUBJECTS}:zeros,whose=ours")
    for index in range(len(PARAMS)):
        for step in range(4):
            assert not result(run, 0, step, index).any()
        assert result(run, 0, 7, index).isfinite().all()
        assert result(run, 0, 7, index).any()


def test_torchs_gives_nan_for_zero_gradients(pool: Pool) -> None:
    what = scenario(4, params=WITHOUT_SCALARS, bucket_cap_mb=ONE_BUCKET)
    run = run_hook(pool, what, setup=f"{SUBJECTS}:zeros,whose=torch")
    assert result(run, 0, 3, 0).isnan().any(), (
        "torch's PowerSGD gives no NaN by now for an all-zero gradient"
    )


@pytest.mark.parametrize("size", [(10, 10), (10, 9)], ids=["square", "padded"])
def test_torchs_batched_raises(pool: Pool, size: tuple[int, int]) -> None:
    what = scenario(4, params=(Param(size),))
    with torchs_own_fails("AssertionError"):
        run_hook(pool, what, hook=f"{SUBJECTS}:torchs_batched_hook", state=f"{SUBJECTS}:torchs")
    assert run_hook(
        pool, what, hook="hooks_ref:batched_powerSGD_hook", state=f"{STATES}:power_sgd"
    ).finished


# Chance decides whether torch's hook comes to its end. docs/stories.md has the commands that show
# both defects, and test_stories.py runs the second one.
@pytest.mark.rarely
def test_torchs_aborts_or_hangs_with_several_buckets(impatient: Pool) -> None:
    """It waits in one callback for a collective that another starts; seldom it gets through."""
    runs = (
        try_hook(
            impatient,
            scenario(6, params=WITHOUT_SCALARS),
            hook=f"{SUBJECTS}:torchs_hook",
            state=f"{SUBJECTS}:torchs",
        )
        for _ in range(5)
    )
    assert not all(run.finished for run in runs), (
        "torch's PowerSGD works with several buckets on Gloo by now"
    )


@pytest.mark.rarely
def test_torchs_resumes_wrongly(pool: Pool, impatient: Pool, tmp_path: Path) -> None:
    """Saved as documented, torch's state does not load with weights_only.

    Loaded otherwise, the hook raises with several buckets, and continues wrongly with one.
    """
    given = f"hook='{SUBJECTS}:torchs_hook',folder='{tmp_path}'"
    saves = f"tests.hooks_ref.saved_states:saves,state='{SUBJECTS}:torchs',{given}"
    first, rest = (scenario(6, params=WITHOUT_SCALARS, first_step=step) for step in (0, 6))
    # With several buckets it hangs now and then, alone in its group too.
    assert any(try_hook(impatient, first, 1, setup=saves).finished for _ in range(10))
    with torchs_own_fails("Weights only load failed"):
        run_hook(pool, rest, 1, setup=f"tests.hooks_ref.saved_states:loads,{given}")
    with torchs_own_fails("must match the size of tensor"):
        run_hook(pool, rest, 1, setup=f"{SUBJECTS}:loads_unsafe,{given}")
    first, whole, rest = (
        scenario(steps, params=WITHOUT_SCALARS, first_step=step, bucket_cap_mb=ONE_BUCKET)
        for steps, step in ((6, 0), (12, 0), (6, 6))
    )
    run_hook(pool, first, setup=saves)
    resumed = run_hook(pool, rest, setup=f"{SUBJECTS}:loads_unsafe,{given}")
    uninterrupted = run_hook(
        pool, whole, hook=f"{SUBJECTS}:torchs_hook", state=f"{SUBJECTS}:torchs"
    )
    same = [
        torch.equal(result(resumed, 0, 5, index), result(uninterrupted, 0, 11, index))
        for index in range(len(WITHOUT_SCALARS))
    ]
    assert not all(same), "torch's PowerSGD resumes by now"


def test_torchs_raises_for_a_scalar_parameter(pool: Pool) -> None:
    with torchs_own_fails("tuple index out of range"):
        run_hook(
            pool,
            scenario(4, bucket_cap_mb=ONE_BUCKET),
            hook=f"{SUBJECTS}:torchs_hook",
            state=f"{SUBJECTS}:torchs",
        )


_WITH_SPARSE = (Param((12, 9)), Param((10, 3), layout="sparse"), Param((7,)))


def test_a_sparse_parameter_stays_synchronised(pool: Pool) -> None:
    run = run_hook(
        pool,
        scenario(5, params=_WITH_SPARSE, kind="crafted"),
        hook="hooks_ref:powerSGD_hook",
        state=f"{STATES}:power_sgd",
    )
    for step in range(5):
        assert torch.equal(result(run, 0, step, 1), gradients(run, step, 1).mean(0))


@pytest.mark.rarely
def test_torchs_own_lets_a_sparse_parameter_drift(impatient: Pool) -> None:
    """Or its ranks wait for each other until the deadline."""
    broken = try_hook(
        impatient,
        scenario(5, params=_WITH_SPARSE, kind="crafted"),
        hook=f"{SUBJECTS}:torchs_hook",
        state=f"{SUBJECTS}:torchs",
    )
    synchronised = broken.finished and torch.equal(
        result(broken, 0, 4, 1), gradients(broken, 4, 1).mean(0)
    )
    assert not synchronised, "torch's PowerSGD synchronises a sparse embedding by now"


def test_unused_parameters_change_nothing_about_the_order_of_collectives(pool: Pool) -> None:
    """DDP's allreduce of used parameters may start between the two of PowerSGD.

    It starts on another thread: with one shared group, three ranks aborted.
    """
    assert run_hook(pool, scenario(1), 3, setup=f"{SUBJECTS}:unused_parameters").finished


@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_goes_on_after_a_step_that_overflowed(pool: Pool, hook: str, kind: str) -> None:
    steps = ("normal",) * 3 + (kind,) + ("normal",) * 4
    run = run_hook(
        pool,
        replace(scenario(), steps=steps),
        hook=f"hooks_ref:{hook}",
        state=f"{STATES}:power_sgd",
    )
    for index in range(len(PARAMS)):
        if not gradients(run, 3, index).isfinite().all():
            assert not result(run, 0, 3, index).isfinite().all()
        for step in (4, 7):
            assert result(run, 0, step, index).isfinite().all()


def test_statistics_count_what_is_sent(pool: Pool, tmp_path: Path) -> None:
    """Per compressed step: (n + m) k for a compressed matrix, every element for the rest."""
    given = f"hook='hooks_ref:powerSGD_hook',state='{STATES}:power_sgd',folder='{tmp_path}'"
    run_hook(pool, scenario(5), setup=f"tests.hooks_ref.saved_states:saves,{given}")
    rate, before, after = torch.load(tmp_path / "0.pt", weights_only=True).compression_stats()
    sent = sum(
        sum(shape(i)) * RANK if compressed(i) else math.prod(shape(i)) for i in range(len(PARAMS))
    )
    assert (before, after) == (3 * sum(math.prod(shape(i)) for i in range(len(PARAMS))), 3 * sent)
    assert rate == before / after


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"matrix_approximation_rank": 0},
            "matrix_approximation_rank: an integer of at least 1; got 0",
        ),
        ({"matrix_approximation_rank": 1.5}, "matrix_approximation_rank: an integer"),
        ({"start_powerSGD_iter": -1}, "start_powerSGD_iter: an integer of at least 0"),
        ({"min_compression_rate": 0}, r"min_compression_rate: a number in \(0"),
        ({"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon: a number in"),
        ({"random_seed": -1}, "random_seed: an integer of at least 0"),
        ({"use_error_feedback": 1}, "use_error_feedback: True or False"),
        ({"compression_stats_logging_frequency": 0}, "compression_stats_logging_frequency"),
        ({"process_group": "gloo"}, "process_group: a ProcessGroup"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        PowerSGDState(**{"process_group": None, **arguments})  # type: ignore[arg-type]


def test_q_is_the_same_on_all_ranks_and_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    one, other = (PowerSGDState(None, random_seed=7).q(3, 9, 2, torch.empty(())) for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one, PowerSGDState(None, random_seed=8).q(3, 9, 2, torch.empty(())))


def test_has_torchs_arguments() -> None:
    import inspect

    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

    ours_, theirs_ = (
        inspect.signature(state).parameters for state in (PowerSGDState, theirs.PowerSGDState)
    )
    assert list(ours_) == list(theirs_)
    assert {name: p.default for name, p in ours_.items()} == {
        name: p.default for name, p in theirs_.items()
    }


def test_an_error_in_a_callback_fails_every_bucket() -> None:
    def begun() -> low_rank._Bucket:
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        return low_rank._Bucket(
            torch.ones(1), result, [], [], torch.ones(1), torch.futures.Future()
        )

    def fails(_: object) -> None:
        raise RuntimeError("a lost connection")

    complete = begun()
    complete.result.set_result(torch.zeros(1))
    step = [begun(), complete, begun()]
    arrived: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    arrived.then(low_rank._or_fail(step, fails))
    arrived.set_result([])
    for bucket in (step[0], step[2]):
        with pytest.raises(RuntimeError, match="a lost connection"):
            bucket.result.value()
    assert torch.equal(complete.result.value(), torch.zeros(1))


@pytest.mark.parametrize(
    "case",
    [
        # Rank 1 dies at step 2.
        Case(
            "hooks_ref:powerSGD_hook",
            "compressed",
            state="hooks_ref:PowerSGDState,matrix_approximation_rank=2,start_powerSGD_iter=2",
            worlds=(2,),
            rules=("12.2",),
            partly=True,
        )
    ],
)
def test_a_peer_may_die_before_the_first_compressed_step(
    case: Case, judgements_of: Callable[[Case], Judgements]
) -> None:
    assert judgements_of(case)["12.2"].verdict is Verdict.PASS

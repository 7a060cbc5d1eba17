"""Passive mode: findings in training runs that are watched, and none in right ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.scenarios.hook import SUBGROUPS
from conformance.scenarios.model import Param, Scenario
from tests.cases import in_turns
from tests.hooks_ref.algorithms import run_hook
from tests.torch_marks import needs_complex_over_gloo

SCENARIO = Scenario("algorithm", "one step", (Param((3,)),), ("crafted",), initial_value=0.0)
GROUPS = replace(SCENARIO, groups=SUBGROUPS.groups)
AVERAGE = "hooks_ref:allreduce_hook"
TORCHS = "torch.distributed.algorithms.ddp_comm_hooks"
MUTANTS = "tests.mutants"
SUBJECTS = "tests.watching.watch_subjects"
POWER = "examples.states:power_sgd"
LATER = "compressed, warmup(2)"
TORCHS_POWER = f"{SUBJECTS}:torchs_power_sgd"
LOCAL = {"hook": "hooks_ref:post_localSGD_hook", "makes": f"{SUBJECTS}:local_sgd"}


def run(pool: Pool, name: str, world: int = 2, scenario: Scenario = SCENARIO, **given: Any) -> None:
    """Run a subject, which checks itself."""
    run_hook(
        pool,
        scenario,
        world,
        setup=",".join(
            [f"{SUBJECTS}:{name}", *(f"{key}={value!r}" for key, value in given.items())]
        ),
    )


@pytest.mark.parametrize(
    ("world", "given"),
    in_turns(
        [
            *((world, {"hook": hook}) for world in (1, 2, 3) for hook in ("", AVERAGE)),
            (2, {"hook": f"{TORCHS}.default_hooks:allreduce_hook", "late": True}),
            *(
                (
                    world,
                    {
                        "hook": f"{TORCHS}.default_hooks:fp16_compress_hook",
                        "claims": "rounded(float16)",
                    },
                )
                for world in (2, 3)
            ),
            (3, {"hook": "hooks_ref:bf16_compress_hook", "claims": "rounded(bfloat16)"}),
            *(
                (world, {"hook": "hooks_ref:powerSGD_hook", "makes": POWER, "claims": LATER})
                for world in (2, 3)
            ),
            (
                2,
                {
                    "hook": f"{TORCHS}.powerSGD_hook:powerSGD_hook",
                    "makes": TORCHS_POWER,
                    "claims": LATER,
                    "bucket_cap_mb": 25,
                },
            ),
            *((world, {**LOCAL, "claims": "local, warmup(2)"}) for world in (2, 3)),
            (
                2,
                {
                    "hook": "hooks_ref:compression_hook",
                    "makes": "examples.states:top_k",
                    "claims": "compressed(delta=0.25)",
                },
            ),
            (
                2,
                {
                    "setup": "examples.setups:sgd_in_the_hook",
                    "claims": "fused(SGD, lr=0.1, momentum=0.9)",
                },
            ),
            (
                2,
                {
                    "setup": "examples.setups:adam_in_the_hook",
                    "claims": "rounded(float16), fused(Adam, lr=0.01)",
                },
            ),
            (
                2,
                {
                    "setup": "examples.setups:sgd_in_backward",
                    "claims": "fused(SGD, lr=0.1, frees_gradients=True)",
                },
            ),
            (2, {"hook": f"{MUTANTS}.equivalence:never_divides", "claims": "sum"}),
            (2, {"hook": AVERAGE, "shares": 3}),
            (2, {"shares": 2, "gradient_as_bucket_view": True}),
            (2, {"hook": AVERAGE, "static_graph": True}),
            (2, {"hook": AVERAGE, "elements": 1}),
            (2, {"hook": AVERAGE, "every": 5, "steps": 12}),
            *(
                (3, {"hook": f"tests.right.exact:{name}"})
                for name in ("another_thread", "reduce_scatter", "point_to_point", "blocking")
            ),
        ],
        3,
    ),
    ids=str,
)
def test_right_hooks(pool: Pool, world: int, given: dict[str, Any]) -> None:
    run(pool, "trains", world, **given)


@pytest.mark.parametrize(
    ("name", "finds", "given"),
    in_turns(
        [
            (
                "equivalence:never_divides",
                ("2.2",),
                {"text": "world_size times the mean: the sum was not divided"},
            ),
            ("equivalence:divides_twice", ("2.2",), {"text": "it was divided twice"}),
            (
                "equivalence:divides_by_eight",
                ("2.2",),
                {"text": "every element is 0.25 times the mean"},
            ),
            ("equivalence:local", ("2.2", "3.1", "3.2"), {"text": "nothing was communicated"}),
            ("equivalence:rank_0_wins", ("2.2",), {"text": "it was broadcast, not reduced"}),
            ("equivalence:stale", ("2.2",), {"text": "the result is one step late"}),
            (
                "equivalence:stale",
                ("2.2",),
                {"text": "the result is one step late", "shares": 2, "every": 1},
            ),
            (
                "equivalence:rounds_to_float16",
                ("2.2",),
                {"text": "equal to the mean rounded to float16"},
            ),
            ("equivalence:claims_other_half", ("2.2",), {"claims": "rounded(float16)"}),
            ("equivalence:top_half", ("2.2",), {}),
            ("equivalence:last_element_local", ("2.2", "3.1", "3.2"), {"elements": 60}),
            ("equivalence:nan_result", ("8.4",), {"text": "finite parameters"}),
            ("equivalence:nan_result", ("2.2", "8.4"), {"every": 1, "steps": 1}),
            ("replicas:starts_from_own", ("3.1", "3.2"), {"world": 3}),
            ("replicas:adds_own_last", ("3.1", "3.2"), {"world": 3}),
            ("replicas:owner_keeps_unrounded", ("3.1", "3.2"), {"claims": "rounded(float16)"}),
            (
                "feedback:largest_beside_its_own",
                ("3.1", "3.2"),
                {"claims": "compressed(delta=0.5)"},
            ),
            ("interference:nudges_parameters", ("9.2",), {}),
            ("optimizers:steps_on_rank_0", ("3.2",), {"claims": "fused(SGD, lr=0.1)"}),
            (
                "collectives:logs_another_extreme",
                ("10.2",),
                {"text": "rank 0 issues allreduce MAX 1 float32"},
            ),
            ("collectives:logs_in_two_dtypes", ("10.2",), {}),
        ],
        3,
    ),
    ids=str,
)
def test_mutants_that_drift(
    pool: Pool, name: str, finds: tuple[str, ...], given: dict[str, Any]
) -> None:
    """Each is found by the rules that it breaks in samples; none of them crashes."""
    run(pool, "trains", given.pop("world", 2), hook=f"{MUTANTS}.{name}", finds=finds, **given)


@pytest.mark.parametrize(
    ("hook", "finds"), [(AVERAGE, ()), (f"{MUTANTS}.settings:uses_world", ("2.2",))]
)
def test_on_subgroups(pool: Pool, hook: str, finds: tuple[str, ...]) -> None:
    run(pool, "trains", 4, GROUPS, hook=hook, finds=finds)


def test_a_replica_that_drifts(pool: Pool) -> None:
    run(pool, "drifts")


@pytest.mark.parametrize("world", [2, 3])
def test_raises_on_all_ranks(pool: Pool, world: int) -> None:
    run(pool, "raises", world)


def test_raises_on_a_rank_that_has_joined(pool: Pool) -> None:
    run(pool, "raises_joined")


@pytest.mark.parametrize("finds", [False, True])
def test_the_log_and_the_figures(pool: Pool, finds: bool) -> None:
    run(pool, "reports", finds=finds)


def test_a_run_that_hangs(pool: Pool) -> None:
    run(pool, "hangs")


@pytest.mark.parametrize("how", ["closed", "counts", "silent"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_stops(pool: Pool, world: int, how: str) -> None:
    run(pool, "leaves", world, how=how)


@pytest.mark.parametrize("place", ["backward", "after"])
def test_the_kit_fails(pool: Pool, place: str) -> None:
    run(pool, "fails", place=place)


@pytest.mark.parametrize(
    ("world", "given"),
    [
        *(
            (2, {}),
            (3, {"hook": AVERAGE}),
            (2, {"hook": AVERAGE, "ours": True}),
            (2, {"by_initial": False}),
        ),
        (2, {"hook": f"{MUTANTS}.equivalence:never_divides", "finds": ("2.2",)}),
    ],
    ids=str,
)
def test_uneven_inputs(pool: Pool, world: int, given: dict[str, Any]) -> None:
    run(pool, "joins", world, **given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"hook": AVERAGE, "keep": True},
        {"hook": f"{MUTANTS}.equivalence:rank_0_wins", "finds": ("2.2",)},
    ],
    ids=str,
)
def test_unused_parameters(pool: Pool, given: dict[str, Any]) -> None:
    run(pool, "leaves_out", **given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"hook": AVERAGE, "static": True},
        {"hook": f"{MUTANTS}.equivalence:divides_twice", "finds": ("2.2",)},
    ],
    ids=str,
)
def test_backward_inside_backward(pool: Pool, given: dict[str, Any]) -> None:
    run(pool, "checkpoints", **given)


@pytest.mark.parametrize(
    ("hook", "given"),
    [
        (AVERAGE, {}),
        ("hooks_ref:fp16_compress_hook", {"claims": "rounded(float16)"}),
        (f"{MUTANTS}.special:nan_to_zero", {"finds": ("2.2", "8.1")}),
        (
            f"{MUTANTS}.feedback:residual_keeps_nan",
            {"claims": "compressed(delta=0.5)", "finds": ("8.4",)},
        ),
    ],
    ids=str,
)
def test_values_that_are_not_finite(pool: Pool, hook: str, given: dict[str, Any]) -> None:
    run(pool, "overflows", hook=hook, **given)


@pytest.mark.parametrize(
    "drift", ["", pytest.param("complex", marks=needs_complex_over_gloo), "strided", "frozen"]
)
def test_dtypes_layouts_and_shapes(pool: Pool, drift: str) -> None:
    run(pool, "mixes", drift=drift)


@pytest.mark.parametrize("name", ["copies", "refuses"])
def test_the_model_and_the_call(pool: Pool, name: str) -> None:
    run(pool, name)


@pytest.mark.parametrize(
    "given",
    [
        {"hook": AVERAGE, "steps": 300},
        {"hook": "hooks_ref:fp16_compress_hook", "claims": "rounded(float16)", "steps": 100},
    ],
    ids=str,
)
def test_no_false_alarm_in_hundreds_of_steps(pool: Pool, given: dict[str, Any]) -> None:
    run(pool, "soaks", **given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: no CUDA device")
@pytest.mark.parametrize(
    "given",
    [{"hook": AVERAGE}, {"hook": f"{MUTANTS}.equivalence:never_divides", "finds": ("2.2",)}],
    ids=str,
)
def test_on_a_device(pool: Pool, given: dict[str, Any]) -> None:
    """Two ranks share it, over Gloo."""
    run(pool, "trains", device="cuda", **given)

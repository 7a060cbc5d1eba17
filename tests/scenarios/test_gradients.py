"""Tests that gradients have the properties that comparisons without a tolerance rely on."""

import itertools

import expecttest
import pytest
import torch

from conformance.scenarios.gradients import KINDS, TILE, gradient, uses

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def values(kind: str, dtype: torch.dtype, world: int, step: int = 0) -> torch.Tensor:
    return torch.stack(
        [
            gradient(kind, (211,), dtype, world=world, rank=rank, step=step, param=0)
            for rank in range(world)
        ]
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_crafted_is_exact_whatever_the_algorithm(dtype: torch.dtype, world: int) -> None:
    """Dividing first or last, or by the reciprocal, in any order of the sum: the same bits."""
    terms = values("crafted", dtype, world)
    right = (terms.double().sum(0) / world).to(dtype)
    for order in itertools.islice(itertools.permutations(range(world)), 24):
        for prepare in (
            lambda x: x / world,
            lambda x: x * torch.tensor(1 / world, dtype=dtype),
            lambda x: x,
        ):
            total = prepare(terms[order[0]])
            for rank in order[1:]:
                total = total + prepare(terms[rank])
            result = (
                total
                if prepare(torch.ones(1, dtype=dtype)).item() != 1 or world == 1
                else total / world
            )
            assert torch.equal(result, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_crafted_survives_half_precision(dtype: torch.dtype) -> None:
    terms = values("crafted", torch.float32, 4)
    assert torch.equal(terms.to(dtype).float(), terms)


def test_ranks_steps_and_parameters_differ() -> None:
    seen = [
        gradient("crafted", (50,), torch.float32, world=2, rank=rank, step=step, param=param)
        for rank in range(2)
        for step in range(2)
        for param in range(2)
    ]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
    mean = (seen[0] + seen[4]) / 2
    assert (
        mean != seen[0]
    ).float().mean() > 0.8  # a hook that does not communicate shows on most elements


def test_normal_is_nearly_normal() -> None:
    sample = gradient("normal", (100_000,), torch.float64, world=2, rank=0, step=0, param=0)
    assert abs(sample.mean().item()) < 0.02
    assert abs(sample.std().item() - 1) < 0.01


def test_wide_is_wide_and_finite() -> None:
    sample = gradient("wide", (5_000,), torch.float32, world=4, rank=0, step=0, param=0).abs()
    assert sample.isfinite().all()
    assert sample.min() < 1e-28
    assert sample.max() > 1e28


def test_subnormals_divide_exactly() -> None:
    for kind, dtype in (
        ("tiny", torch.float32),
        ("tiny_float16", torch.float16),
        ("tiny_bfloat16", torch.bfloat16),
    ):
        terms = values(kind, torch.float32, 3)
        assert torch.equal(terms.to(dtype).float(), terms)
        assert terms.abs().max() < torch.finfo(dtype).smallest_normal


def test_each_rank_has_some_of_the_special_values() -> None:
    nan = values("nan", torch.float32, 3)
    inf = values("inf", torch.float32, 3)
    assert nan.isnan().any(1).all()
    assert (nan.isnan().sum(0) <= 1).all()
    total = inf.sum(0)
    assert (total == torch.inf).any()
    assert (total == -torch.inf).any()
    assert total.isnan().any()
    assert inf.isinf().any(1).all()


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_special_values_are_at_the_place_that_a_kind_names(kind: str) -> None:
    def special(text: str, world: int, param: int) -> torch.Tensor:
        made = [
            gradient(text, (211,), torch.float32, world=world, rank=rank, step=1, param=param)
            for rank in range(world)
        ]
        return ~torch.stack(made).isfinite()

    assert special(f"{kind}/1", 3, 4).sum(1).tolist() == [0, 43, 0]
    assert special(f"{kind}/2", 2, 4).sum(1).tolist() == [43, 0]
    assert not special(f"{kind}/1/3", 2, 4).any()
    assert special(f"{kind}/1/3/-1", 2, 3).nonzero().tolist() == [[1, 210]]
    assert special(f"{kind}/1/3/212", 2, 3).nonzero().tolist() == [[1, 1]]


def test_tiled_gradients_repeat_crafted_ones() -> None:
    tiled = gradient("tiled", (2 * TILE + 5,), torch.float32, world=2, rank=1, step=2, param=0)
    crafted = gradient("crafted", (TILE,), torch.float32, world=2, rank=1, step=2, param=0)
    assert torch.equal(tiled[:TILE], crafted)
    assert torch.equal(tiled[TILE : 2 * TILE], crafted)
    assert torch.equal(tiled[2 * TILE :], crafted[:5])


def test_a_fixed_value_stays_as_it_is() -> None:
    """Records are judged again later, and on other machines: the numbers must not drift."""
    sample = [
        gradient(kind, (2,), torch.float64, world=2, rank=1, step=3, param=1)
        for kind in ("crafted", "normal", "wide")
    ]
    expecttest.assert_expected_inline(
        "\n".join(x.hex() for tensor in sample for x in tensor.tolist()),
        """\
0x1.c000000000000p+1
-0x1.c000000000000p+5
0x1.0b33510000000p+0
-0x1.5eec500000000p-4
0x1.33c09e0000000p-36
-0x1.d8fdae0000000p+5""",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_every_shape(kind: str) -> None:
    for shape in ((), (0,), (2, 3)):
        for dtype in (*DTYPES, torch.complex64):
            assert gradient(kind, shape, dtype, world=2, rank=0, step=0, param=0).shape == shape


def test_heavy_tails_are_those_of_students_t() -> None:
    """With 2 degrees of freedom a half is below 0.816, and a hundredth above 9.925."""
    values = gradient("training", (100_000,), torch.float64, world=2, rank=0, step=1, param=0).abs()
    assert abs(float((values < 0.8165).double().mean()) - 0.5) < 0.01
    assert abs(float((values > 9.925).double().mean()) - 0.01) < 0.002


def test_faint_gradients_are_never_zero() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        values = gradient("faint", (1000,), dtype, world=4, rank=1, step=3, param=2)
        assert bool((values != 0).all())


def test_a_kind_may_name_the_step_whose_parameters_are_used() -> None:
    for rank, param in ((0, 0), (1, 3), (0, 4)):
        for step in range(7):
            assert uses(2, rank, step, param, "normal@3") == uses(2, rank, 3, param, "normal")
    assert not uses(2, 0, 9, 3, "settling@3")
    assert uses(2, 0, 3, 3, "settling")
    one, other = (values(kind, torch.float32, 2, step=5) for kind in ("normal@3", "normal"))
    assert torch.equal(one, other)

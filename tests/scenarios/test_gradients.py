"""Tests that gradients have the properties that comparisons without a tolerance rely on."""

import itertools

import expecttest
import pytest
import torch

from conformance.scenarios.gradients import KINDS, gradient

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


def test_special_values_are_on_the_ranks_they_should_be() -> None:
    nan = values("nan", torch.float32, 3)
    inf = values("inf", torch.float32, 3)
    assert nan[0].isnan().any()
    assert not nan[1:].isnan().any()
    total = inf.sum(0)
    assert (total == torch.inf).any()
    assert (total == -torch.inf).any()
    assert total.isnan().any()
    assert not inf[2].isinf().any()


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

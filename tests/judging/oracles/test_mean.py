"""The oracle accepts every right algorithm, and refuses larger errors than rounding explains."""

import itertools

import pytest
import torch

from conformance.judging.oracles.mean import compare, expected, mean
from conformance.records.run import Run
from conformance.scenarios.hook import VALUES
from conformance.subjects.claims import Claims
from tests.made_runs import Result, made_run

NORMAL = VALUES.steps.index("normal")
WIDE = VALUES.steps.index("wide")


def fed32(run: Run, rank: int, step: int, index: int) -> list[torch.Tensor]:
    return [run.fed(r, step, index).float() for r in run.group(rank)]


def divide_first(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    terms = [x / run.world for x in fed32(run, rank, step, index)]
    return sum(terms[1:], terms[0])


def divide_last(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    terms = fed32(run, rank, step, index)
    return sum(terms[1:], terms[0]) / run.world


def reciprocal(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Average as DDP does without a hook."""
    terms = [x * torch.tensor(1 / run.world) for x in fed32(run, rank, step, index)]
    return sum(terms[1:], terms[0])


def backwards(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    terms = fed32(run, rank, step, index)[::-1]
    return sum(terms[1:], terms[0]) / run.world


@pytest.mark.parametrize("algorithm", [mean, divide_first, divide_last, reciprocal, backwards])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_right_algorithms_are_right(algorithm: Result, world: int) -> None:
    run = made_run(algorithm, world=world)
    for step in range(len(run.scenario.steps)):
        comparison = compare(run, step, Claims())
        assert comparison.mismatch is None
        assert comparison.margin <= 1
        assert comparison.checked == 47 * world


def test_a_quotient_and_a_reciprocal_differ_on_three_ranks() -> None:
    """Both are right, see above."""
    one = made_run(divide_first, world=3)
    other = made_run(reciprocal, world=3)
    assert any((one.got(0, NORMAL, i) != other.got(0, NORMAL, i)).any() for i in range(4))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_needs_its_claim(dtype: str) -> None:
    def rounded(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        terms = [(x / run.world).to(getattr(torch, dtype)) for x in fed32(run, rank, step, index)]
        return sum(terms[1:], terms[0]).float()

    run = made_run(rounded, world=4)
    assert compare(run, 0, Claims()).mismatch is None  # crafted values survive
    assert compare(run, NORMAL, Claims()).mismatch is not None
    for step in (NORMAL, WIDE):
        assert compare(run, step, Claims(rounded=dtype)).mismatch is None


def test_a_finite_value_is_no_overflow() -> None:
    def clamped(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        return mean(run, rank, step, index).clamp(-65504, 65504)

    def overflowed(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        terms = [x.to(torch.float16) for x in fed32(run, rank, step, index)]
        return (sum(terms[1:], terms[0]) / run.world).float()

    claims = Claims(rounded="float16")
    assert compare(made_run(clamped), WIDE, claims).mismatch is not None
    assert compare(made_run(overflowed), WIDE, claims).mismatch is None


def test_the_bound_is_that_of_the_docstring() -> None:
    run = made_run(world=3)
    right, bound, values = expected(run, 0, NORMAL, 0, Claims())
    unit = 2.0**-24
    gamma = 4 * unit / (1 - 4 * unit)
    assert torch.allclose(bound, gamma * values.abs().mean(0) + 4 * 2.0**-149, rtol=1e-12)
    summed = expected(run, 0, NORMAL, 0, Claims(sum=True))
    assert torch.equal(summed[0], right * 3)
    assert torch.equal(summed[1], bound * 3)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_errors_beyond_the_bound_are_found(bits: int) -> None:
    """One element that is off by a few times its bound is found and named."""

    def moved(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
        result = divide_first(run, rank, step, index).double()
        if (rank, step, index) == (1, NORMAL, 3):
            _, bound, _ = expected(run, rank, step, index, Claims())
            result[5] += bits * bound[5]
        return result

    wrong = compare(made_run(moved), NORMAL, Claims()).mismatch
    assert wrong is not None
    assert (wrong.rank, wrong.parameter, wrong.index, wrong.wrong) == (1, 3, 5, 1)


def test_an_absent_gradient_is_wrong() -> None:
    run = made_run()
    del run.ranks[1].tensors["0/grad/p2"]
    wrong = compare(run, 0, Claims()).mismatch
    assert wrong is not None
    assert wrong.missing
    assert wrong.rank == 1


def test_no_order_of_summation_leaves_the_bound() -> None:
    """All 24 orders at four ranks, random and wide-ranged."""
    for order in itertools.permutations(range(4)):

        def ordered(
            run: Run, rank: int, step: int, index: int, order: tuple[int, ...] = order
        ) -> torch.Tensor:
            terms = fed32(run, rank, step, index)
            first, *others = (terms[place] for place in order)
            return sum(others, first) / 4

        run = made_run(ordered, world=4)
        assert all(compare(run, step, Claims()).mismatch is None for step in (NORMAL, WIDE))

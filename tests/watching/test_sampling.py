"""Samples of a step in passive mode: their elements, and their form in the exchange."""

import math

import pytest
import torch

from conformance.watching.sampling import MAX_GATHERED, Layout, Sample, largest, pack, take, unpack


def parameters(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> dict[str, torch.nn.Parameter]:
    return {
        f"p{number}": torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        for number, shape in enumerate(shapes)
    }


def test_the_same_elements_from_the_same_seed_and_step() -> None:
    named = parameters((300, 40), (7,), (), (0,))
    one, again, other = (Layout(named, 500, 2, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.indices(5), again.indices(5), strict=True))
    assert not torch.equal(one.indices(5)[0], one.indices(6)[0])
    assert not torch.equal(one.indices(5)[0], other.indices(5)[0])
    state = torch.get_rng_state()
    one.indices(7)
    assert torch.equal(state, torch.get_rng_state())


def test_every_parameter_is_sampled_with_its_ends_and_a_small_model_as_a_whole() -> None:
    named = parameters((100_000,), (7,), (), (0,))
    first, second, third, fourth = Layout(named, 1000, 2, 0).indices(3)
    assert {0, 99_999} <= set(first.tolist())
    assert 990 <= len(first) <= 1000
    assert (len(second), third.tolist(), fourth.tolist()) == (1, [0], [])
    assert [len(index) for index in Layout(named, 200_000, 2, 0).indices(3)] == [100_000, 7, 1, 0]
    drawn = {
        index
        for step in range(200)
        for index in Layout(parameters((50,)), 10, 2, 0).indices(step)[0].tolist()
    }
    assert drawn == set(range(50))


def test_memory_is_bounded_whatever_the_number_of_ranks() -> None:
    named = parameters((1_000_000,), (1_000_000,))
    for world in (2, 64, 1024, 2**21):
        assert sum(Layout(named, 16384, world, 0).counts) * world <= max(
            MAX_GATHERED, world * len(named)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_elements_are_taken_in_c_order_from_any_layout(dtype: torch.dtype) -> None:
    plain = torch.randn(2, 3, 4, 5, dtype=torch.float64).to(dtype)
    laid = plain.contiguous(memory_format=torch.channels_last)
    index = torch.tensor([0, 7, 119])
    assert torch.equal(take(plain, index), take(laid, index))
    expected = plain.reshape(-1)[index]
    assert torch.equal(
        take(laid, index),
        torch.view_as_real(expected).reshape(-1) if dtype.is_complex else expected,
    )


def test_the_largest_value() -> None:
    assert largest(torch.tensor([1.0, -3.0])).item() == 3.0
    assert math.isnan(largest(torch.tensor([1.0, math.nan, math.inf])).item())
    assert largest(torch.tensor([1.0, -math.inf])).item() == math.inf
    assert largest(torch.tensor([1.0, -65504.0], dtype=torch.float16)).item() == 65504.0


def test_unpack_reads_what_pack_wrote() -> None:
    named = {
        **parameters((30,), ()),
        **{
            "d": torch.nn.Parameter(torch.ones(5, dtype=torch.float64)),
            "h": torch.nn.Parameter(torch.ones(3).half()),
        },
    }
    layout = Layout(named, 1000, 2, 0)
    rows = []
    for rank in range(2):
        sample = Sample(layout.indices(1))
        sample.take_parameters(layout)
        for number, parameter in enumerate(layout.parameters):
            parameter.grad = torch.full_like(parameter, rank + number)
            if number != 1:  # this step leaves it out
                sample.take_fed(number, parameter.grad)
            sample.take_fed_before(number, parameter.grad * 2)
            parameter.grad = None if number == 2 and rank else parameter.grad * 10
        with torch.no_grad():
            layout.parameters[3].add_(rank)
        sample.take_results(layout)
        rows.append(pack(layout, sample, [7, rank], torch.tensor([rank])))
    found = unpack(layout, torch.stack(rows), 2, 1)
    assert (found.numbers.tolist(), found.has_fed_before, found.checksums.tolist()) == (
        [[7, 0], [7, 1]],
        True,
        [[0], [1]],
    )
    assert found.has_fed.tolist() == [[True, False, True, True]] * 2
    assert found.has_result.tolist() == [[True] * 4, [True, True, False, True]]
    assert found.parameter_changed.tolist() == [[False] * 4, [False, False, False, True]]
    assert found.largest_fed.tolist() == [[0.0, 0.0, 2.0, 3.0], [1.0, 0.0, 3.0, 4.0]]
    assert found.fed[2].tolist() == [[2.0] * 5, [3.0] * 5]
    assert found.fed_before[3].tolist() == [[6.0] * 3, [8.0] * 3]
    assert found.results[3].tolist() == [[30.0] * 3, [40.0] * 3]
    assert found.results[3].dtype == torch.float16
    assert not found.results_agree

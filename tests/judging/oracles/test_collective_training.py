"""The promises of claims about zeros, NaN and the calls after them; and tensors in one buffer."""

import random

import pytest
import torch

from conformance.judging.oracles.collective_training import promises
from conformance.ranks.drivers._buffers import Buffers
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective_training import LARGE, LARGEST, RECOVERING, SMALLEST_LARGE
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims

STEPS = RECOVERING.steps


@pytest.mark.parametrize("seed", range(10))
def test_the_large_messages_are_in_their_ranges(seed: int) -> None:
    claims = parse_claims("collective(all_gather), rounded(float16)", "collective")
    params = adapt_scenario(LARGE, claims, seed=seed).params
    sizes = {param: torch.Size(param.shape).numel() for param in params}
    (strided,) = (size for param, size in sizes.items() if not param.is_contiguous)
    small, large, largest = sorted(size for param, size in sizes.items() if param.is_contiguous)
    assert SMALLEST_LARGE <= strided <= 2**20 + 9 * 128
    assert 300 <= small < 1000
    assert SMALLEST_LARGE <= large <= LARGEST + 64
    assert LARGEST < largest <= LARGEST + 2**19 + 64


def test_zeros_have_the_bound_zero_and_nan_spoils_its_block_alone() -> None:
    claims = parse_claims("collective(all_gather), blocks(int8, size=128)", "collective")
    scenario = adapt_scenario(RECOVERING, claims)
    assert not promises(scenario, claims, 2, 0, 0, STEPS.index("zeros"))[0, 0].deviation.any()
    step = STEPS.index("nan")
    spoiled = 0
    for source in (0, 1):
        promise = promises(scenario, claims, 2, source, 0, step)[source, 0]
        has_nan = messages.is_poisoned(scenario, 2, step, source, 0)
        assert bool(promise.sent.isnan().any()) == has_nan
        assert promise.is_free.any() == has_nan
        assert promise.is_free.sum() <= 128
        assert promise.deviation[~promise.is_free].isfinite().all()
        spoiled += has_nan
    assert spoiled == 1


def test_without_blocks_nan_spoils_all_that_the_rank_sends() -> None:
    claims = parse_claims("collective(all_to_all), bounded(relative=0.01)", "collective")
    scenario = adapt_scenario(RECOVERING, claims)
    step = STEPS.index("nan")
    source = next(
        source
        for source in (0, 1)
        if any(messages.is_poisoned(scenario, 2, step, source, to) for to in (0, 1))
    )
    assert all(p.is_free.all() for p in promises(scenario, claims, 2, source, 0, step).values())
    other = promises(scenario, claims, 2, 1 - source, 0, step).values()
    assert not any(p.is_free.any() for p in other)


def test_with_feedback_the_errors_of_earlier_calls_are_allowed_and_finite() -> None:
    text = "collective(all_gather), blocks(int8, size=128)"
    plain = parse_claims(text, "collective")
    fed = parse_claims(f"{text}, feedback", "collective")
    first, last = 0, len(STEPS) - 1
    for step in (first, last):
        without = promises(adapt_scenario(RECOVERING, plain), plain, 2, 0, 0, step)[0, 0]
        allowed = promises(adapt_scenario(RECOVERING, fed), fed, 2, 0, 0, step)[0, 0]
        assert allowed.deviation.isfinite().all()
        assert (allowed.deviation >= without.deviation).all()
        assert torch.equal(allowed.deviation, without.deviation) == (step == first)


def test_buffers_hold_tensors_and_notice_what_is_written_around_them() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(4)]
    buffers = Buffers(tensors, random.Random(0))
    assert all(torch.equal(a, b) for a, b in zip(buffers.views, tensors, strict=True))
    assert all(view.is_contiguous() and view.storage_offset() for view in buffers.views)
    assert buffers.changed_around(buffers.parts()) == 0
    buffers.views[0].data = torch.zeros(2, 3)
    assert torch.equal(buffers.parts()[0], tensors[0])
    view = buffers.parts()[1]
    view.as_strided((5,), (1,)).zero_()
    assert buffers.changed_around(buffers.parts()) == 1
    # The second tensor is not among the outputs: it has changed, too.
    assert buffers.changed_around(buffers.parts()[:1]) == 5
    assert Buffers([], random.Random(0)).parts() == []

"""The causes that wrong factors of clipped gradients have."""

import pytest

from conformance.judging.oracles.optimizer_clipping import _cause, _Clip


@pytest.mark.parametrize(
    ("max_norm", "actual", "cause"),
    [
        (2.0, 1.0, "it was not clipped"),
        (2.0, 0.25, "it was clipped by a larger norm, 8"),
        (2.0, 0.8, "it was clipped by a smaller norm, 2.5"),
        (8.0, 0.5, "it was clipped by a larger norm, 16"),
        (2.0, -0.5, ""),
        (
            None,
            0.5,
            "gradients are clipped in a step before which clip_grad_norm was not called",
        ),
    ],
)
def test_causes(max_norm, actual, cause):
    assert _cause(_Clip(4.0, 1e-6, max_norm), actual) == cause


def test_factors():
    assert _Clip(4.0, 1e-6, 2.0).factor == 0.5
    assert 1e-6 < _Clip(4.0, 1e-6, 2.0).factor_error < 2e-6
    for max_norm in (None, 5.0):
        assert _Clip(4.0, 1e-6, max_norm).factor == 1.0
        assert _Clip(4.0, 1e-6, max_norm).factor_error == 0.0

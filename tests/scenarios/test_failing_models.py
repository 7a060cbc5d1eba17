"""Models of one dtype each, of which a collective fails."""

from dataclasses import replace

import pytest

from conformance.ranks.instruments.raising_collective import RaisingCollective
from conformance.scenarios.draws import drawn
from conformance.scenarios.failing_models import EACH_FAILS, failing_models
from conformance.scenarios.profiles import GLOO_CPU
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims

DTYPES = {"float16", "bfloat16", "float64", "float32", "complex64"}


@pytest.mark.parametrize("seed", range(20))
def test_each_dtype_has_models_of_one_parameter_and_of_several(seed: int) -> None:
    models = failing_models(drawn(EACH_FAILS, seed))
    assert {model.dtype for model in models} == DTYPES
    for dtype in DTYPES:
        of_dtype = [model for model in models if model.dtype == dtype]
        for at_end in (False, True):
            shapes = {
                (len(model.sizes) > 1, sum(model.sizes) >= 2**10)
                for model in of_dtype
                if model.fails_at_end is at_end
            }
            assert len(shapes) == (4 if at_end else 2)
            places = {model.place for model in of_dtype if model.fails_at_end is at_end}
            assert places == {0, -1}
    assert [model.dtype for model in models[-6:]] == ["complex64"] * 6


def test_claimed_dtypes_and_a_long_warm_up_leave_fewer_models() -> None:
    claimed = adapt_scenario(EACH_FAILS, parse_claims("dtypes(float32, bfloat16)"))
    assert {model.dtype for model in failing_models(claimed)} == {"float32", "bfloat16"}
    warmed = adapt_scenario(EACH_FAILS, parse_claims("compressed, warmup(500)"))
    assert len(failing_models(warmed)) == 3
    local = adapt_scenario(EACH_FAILS, parse_claims("local"))
    assert {model.place for model in failing_models(local)} == {0}
    assert local.fault.attempts > 24


def test_no_work_fails_if_a_future_is_complete_before_its_collective() -> None:
    ordered = replace(GLOO_CPU, name="cuda", backend="nccl", device="cuda")
    for profile, ways in ((ordered, {False}), (GLOO_CPU, {False, True})):
        models = failing_models(adapt_scenario(EACH_FAILS, parse_claims("exact"), profile))
        assert {model.fails_at_end for model in models} == ways


def test_the_first_collective_is_issued_if_all_ranks_fail() -> None:
    assert not RaisingCollective().is_issued
    assert RaisingCollective(is_issued=True).is_issued

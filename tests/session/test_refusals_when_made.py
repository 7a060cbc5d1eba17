"""A subject may refuse a model with an error as it is made."""

import pytest

from conformance.errors import TargetError
from conformance.judging.verdict import Verdict
from tests.cases import Case, own_judge

REFUSES_HALF = "tests.right.optimizers_in_half:RefusesHalf"


@pytest.mark.ranks
def test_a_type_error_of_a_right_target_is_a_refusal() -> None:
    case = Case(REFUSES_HALF, "averages", worlds=(1, 2), rules=("15.5",), kind="optimizer")
    assert own_judge().judge(case)["15.5"].verdict is Verdict.PASS


@pytest.mark.ranks
def test_a_type_error_in_the_first_run_is_a_wrong_target() -> None:
    target = f"{REFUSES_HALF},unknown=3"
    case = Case(target, "averages", worlds=(1, 2), rules=("15.5",), kind="optimizer")
    with pytest.raises(TargetError, match=r"calling RefusesHalf failed: .*unknown"):
        own_judge().judge(case)

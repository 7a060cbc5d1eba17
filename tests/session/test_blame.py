"""Advice on a hook that got no state."""

import pytest

from conformance.judging.run_failures import FailedRun
from conformance.session.blame import missing_state
from conformance.subjects.kinds import HOOK, OPTIMIZER
from conformance.subjects.spec import make_spec

_LINE = "rank 0 raised AttributeError: 'NoneType' object has no attribute 'keys' (in hook call 0)"


def advice(line: str, state: str | None = None) -> str:
    return missing_state(make_spec(HOOK, "mypkg:hook", state), FailedRun("raised", line))


def test_a_hook_that_calls_none_may_need_a_state() -> None:
    assert advice(_LINE) == (
        "without --state the hook gets None as its state; if it needs one, give --state "
        "mypkg:MyState,option=value"
    )
    assert advice(_LINE.replace("Attribute", "Type"))


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (_LINE, "mypkg:State"),
        (_LINE.replace("in hook call 0", "in backward"), None),
        (_LINE.replace("NoneType", "int"), None),
        (_LINE.replace("AttributeError", "KeyError"), None),
    ],
)
def test_other_errors_get_no_advice(line: str, state: str | None) -> None:
    assert advice(line, state) == ""


def test_other_kinds_have_no_state() -> None:
    subject = make_spec(OPTIMIZER, "mypkg:Optimizer")
    assert missing_state(subject, FailedRun("raised", _LINE)) == ""

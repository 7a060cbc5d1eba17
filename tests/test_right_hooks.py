"""A rule that refuses a right hook is a defect: every right hook is certified."""

from collections.abc import Callable

import pytest

from conformance.engine import Engine
from conformance.rulebook import MUST, Rule
from tests.right_hooks import RIGHT, Right


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: f"{right.name}{'-' + right.state if right.state else ''}")
def test_is_certified(engine_for: Callable[..., Engine], rules: dict[str, Rule], right: Right) -> None:
    engine = engine_for(f"tests.right_hooks:{right.name}", claims=right.claims, state=right.state, setup=right.setup)
    judgements = [engine.judge(number) for number, rule in rules.items() if rule.level == MUST]
    assert {j.number: j.reason for j in judgements if not j.verdict.holds} == {}

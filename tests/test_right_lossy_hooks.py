"""A rule that refuses a right hook is a defect: every right lossy, local or fused hook is certified too."""

from collections.abc import Callable

import pytest

from conformance.rulebook import MUST, Rule
from tests.cases import Case, Judgements
from tests.right_lossy_hooks import RIGHT

# Lossy runs are long: at one world size, beside 1; two ranks that agree in pairs would be all. The references are judged at 2, 3 and 4.
CASES = [
    Case(
        f"tests.right_lossy_hooks:{right.name}",
        right.claims,
        right.state,
        right.setup,
        worlds=(2, 3) if "local" in right.claims else (1, 2),
    )
    for right in RIGHT
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_certified(judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case) -> None:
    judgements = judgements_of(case).values()
    assert {j.number: j.reason for j in judgements if rules[j.number].level == MUST and not j.verdict.holds} == {}

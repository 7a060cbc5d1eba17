"""A rule that refuses a right hook is a defect: every right hook is certified."""

import re
from collections.abc import Callable

import pytest

from conformance.judging.rule import Rule
from conformance.rules import book
from tests.cases import Case, Judgements, refusals
from tests.right import Right, catalogue


def case(module: str, right: Right) -> Case:
    """Return the case of a right subject, at the world sizes that show most for their time.

    A subject that differs from another in one respect only is judged by the sections about it. The
    soak judges all of them by the whole book, at more sizes.
    """
    worlds = (1, 2)
    if "local" in right.claims:
        worlds = (2, 3)  # of two ranks, a pair is all of them
    if least := re.search(r"min_world_size\((\d)\)", right.claims):
        worlds = (1, int(least[1]))
    rules = tuple(
        number for number, rule in book(right.kind).items() if rule.section in right.sections
    )
    return Case(
        f"{module}:{right.name}",
        right.claims,
        right.state,
        right.setup,
        worlds,
        rules=rules,
        kind=right.kind,
    )


CASES = [case(module, right) for module, right in catalogue()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_certified(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    refused = refusals(judgements_of(case), rules)
    assert refused == {}, "\n".join(f"{number}: {why}" for number, why in refused.items())

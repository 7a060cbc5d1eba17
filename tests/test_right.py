"""A rule that refuses a right hook is a defect: every right hook is certified."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from conformance.judging.rule import Rule
from conformance.judging.verdict import Verdict
from conformance.rules import book
from tests.cases import Case, Judgements, affordable, in_turns, is_costly, refusals
from tests.right import Right, catalogue


def case(turn: int, module: str, right: Right) -> Case:
    """Return the case of a right subject, at the world sizes that show most for their time.

    A subject that differs from another in one respect only is judged by the sections about it. The
    soak judges all of them by the whole book, at more sizes.

    Args:
        turn: the number of the subject, which decides the rules that it is judged by.
        module: the module of the subject.
        right: the subject.
    """
    worlds = (1, 2)
    if "local" in right.claims:
        worlds = (2, 3)  # of two ranks, a pair is all of them
    if least := re.search(r"min_world_size\((\d)\)", right.claims):
        worlds = (1, int(least[1]))
    rules = tuple(
        number for number, rule in book(right.kind).items() if rule.section in right.sections
    ) or affordable(book(right.kind, "cpu"), turn)
    return Case(
        f"{module}:{right.name}",
        right.claims,
        right.state,
        right.setup,
        worlds,
        rules=rules,
        kind=right.kind,
        partly=True,
    )


CASES = [case(turn, module, right) for turn, (module, right) in enumerate(catalogue())]


def watched() -> list[Case]:
    """Return a right subject of each kind, and beside it the rules that watch every run.

    These rules are costly, so that the turns of a short test run may leave them out for a kind.
    """
    last = {right.kind: number for number, (_, right) in enumerate(catalogue())}
    cases = []
    for kind, number in last.items():
        rules = book(kind, "cpu")
        watching = [name for name, rule in rules.items() if rule.watches]
        others = [name for name, rule in rules.items() if not (rule.watches or is_costly(rule))]
        cases.append(
            replace(CASES[number], rules=(*others[:3], *watching), worlds=CASES[number].worlds[-1:])
        )
    return cases


@pytest.mark.parametrize("case", in_turns(CASES, 30), ids=str)
def test_is_certified(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    refused = refusals(judgements_of(case), rules)
    assert refused == {}, "\n".join(f"{number}: {why}" for number, why in refused.items())


@pytest.mark.parametrize("case", watched(), ids=lambda case: case.kind)
def test_leaves_the_process_as_it_was(
    judgements_of: Callable[[Case], Judgements], case: Case
) -> None:
    watching = [name for name in case.rules if book(case.kind)[name].watches]
    judgements = judgements_of(case)
    verdicts = {number: judgements[number].verdict for number in watching}
    assert verdicts == dict.fromkeys(watching, Verdict.PASS)

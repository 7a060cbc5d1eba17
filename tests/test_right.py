"""A rule that refuses a right hook is a defect: every right hook is certified."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.judging.rule import Rule
from conformance.judging.verdict import Verdict
from conformance.rules import book
from conformance.session.engine import Engine
from conformance.subjects.claims import parse_claims
from conformance.subjects.kinds import HOOK, KINDS
from tests import right
from tests.cases import (
    Case,
    Judgements,
    affordable,
    by_a_part,
    in_turns,
    is_costly,
    own_judge,
    refusals,
    subject_and_claims,
)
from tests.right import Right, catalogue


def case(turn: int, module: str, subject: Right) -> Case:
    """Return the case of a right subject, at the world sizes that show most for their time.

    A subject that differs from another in one respect only is judged by the sections about it. The
    soak judges all of them by the whole book, at more sizes.

    Args:
        turn: the number of the subject, which decides the rules that it is judged by.
        module: the module of the subject.
        subject: the subject.
    """
    worlds = (1, 2)
    if "local" in subject.claims:
        worlds = (2, 3)  # of two ranks, a pair is all of them
    if least := re.search(r"min_world_size\((\d)\)", subject.claims):
        worlds = (1, int(least[1]))
    rules = tuple(
        number for number, rule in book(subject.kind).items() if rule.section in subject.sections
    ) or affordable(book(subject.kind, "cpu"), turn)
    case = Case(
        f"{module}:{subject.name}",
        subject.claims,
        subject.state,
        subject.setup,
        worlds,
        kind=subject.kind,
    )
    return by_a_part(case, rules)


CASES = [case(turn, *entry) for turn, entry in enumerate(catalogue())]


def watched() -> list[Case]:
    """Return a right subject of each kind, and beside it the rules that watch every run.

    These rules are costly, so that the turns of a short test run may leave them out for a kind. A
    fault of the kit in one run fails them for every subject: those of other kinds than hooks have
    all short runs of the book.
    """
    last = {subject.kind: number for number, (_, subject) in enumerate(catalogue())}
    cases = []
    for kind, number in last.items():
        rules = book(kind, "cpu")
        watching = [name for name, rule in rules.items() if rule.watches]
        others = [name for name, rule in rules.items() if not rule.watches]
        others = [name for name in others if not is_costly(rules[name])]
        if kind == HOOK:
            others = others[:3]
        cases.append(
            replace(
                CASES[number],
                rules=(*others, *watching),
                worlds=CASES[number].worlds[-1:],
                short_rules=(),
            )
        )
    return cases


def promise(case: Case) -> str:
    """Return what decides how a rule judges a case: its kind, or what a hook promises."""
    if case.kind != HOOK:
        return case.kind
    claims = parse_claims(case.claims)
    return claims.lossy or "fused" * bool(claims.fused) or "rounded" * bool(claims.rounded)


def whole() -> list[Case]:
    """Return the first right subject of each kind, and of each promise of a hook, to be judged by
    the whole book.

    A rule may fail on right subjects of one promise alone, and the parts of the book that other
    cases draw may leave it out for that promise.
    """
    first: dict[str, Case] = {}
    for (_, subject), case in zip(catalogue(), CASES, strict=True):
        # Exact hooks have no promise: test_ci.py certifies the reference, at all world sizes.
        if promise(case) and not (case.kind == HOOK and subject.sections):
            first.setdefault(promise(case), replace(case, rules=(), short_rules=()))
    return list(first.values())


def test_every_module_is_in_the_catalogue() -> None:
    folder = Path(right.__file__).parent
    having = {file.stem for file in folder.glob("*.py") if "\nRIGHT = " in file.read_text()}
    assert having == {module.rpartition(".")[2] for module, _ in catalogue()}


@pytest.mark.parametrize("case", in_turns(CASES, 60), ids=str)
def test_is_certified(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    refused = refusals(judgements_of(case), rules)
    assert refused == {}, "\n".join(f"{number}: {why}" for number, why in refused.items())


# One for each lossy promise, and one with a warm-up; whether every run judges it at the sizes of
# training.
AT_SIZES = {
    "top_k": False,
    "ef21": False,
    "fp8": True,
    "gaussian_noise": False,
    "ring_gossip": False,
    "by_shards": False,
}


def at_sizes() -> list[Any]:
    """Return a right subject of each lossy promise, and one with a warm-up, as parameters: to be
    judged at the sizes of training, where each promise is judged by code of its own.
    """
    rules = tuple(number for number, rule in book(HOOK, "cpu").items() if rule.section == "22")
    return [
        pytest.param(
            replace(
                case,
                rules=rules,
                short_rules=(),
                worlds=case.worlds[-1:],
                partly=True,
                alone=True,
            ),
            marks=[pytest.mark.rarely] * (not AT_SIZES[subject.name]),
            id=promise(case) + "-after-a-warm-up" * ("warmup" in case.claims),
        )
        for (_, subject), case in zip(catalogue(), CASES, strict=True)
        if subject.name in AT_SIZES and subject.kind == HOOK
    ]


@pytest.mark.parametrize("case", at_sizes())
def test_is_certified_at_the_sizes_of_training(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    refused = refusals(judgements_of(case), rules)
    assert refused == {}, "\n".join(f"{number}: {why}" for number, why in refused.items())


@pytest.mark.rarely
@pytest.mark.parametrize("case", whole(), ids=promise)
def test_is_certified_by_the_whole_book(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    judgements = judgements_of(case)
    refused = refusals(judgements, rules)
    assert refused == {}, "\n".join(f"{number}: {why}" for number, why in refused.items())


@pytest.mark.parametrize("case", watched(), ids=lambda case: case.kind)
def test_leaves_the_process_as_it_was(
    judgements_of: Callable[[Case], Judgements], case: Case
) -> None:
    watching = [name for name in case.rules if book(case.kind)[name].watches]
    judgements = judgements_of(case)
    verdicts = {number: judgements[number].verdict for number in watching}
    assert verdicts == dict.fromkeys(watching, Verdict.PASS)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != HOOK])
def test_every_rule_holds_in_a_long_run(kind: str) -> None:
    """The long run of a kind is made for a rule or two, and read by others, which have to know what
    is new in it.
    """
    rules = book(kind, "cpu")
    long = tuple(scenario for scenario in KINDS[kind].scenarios if scenario.observe.growth)
    read = {
        number: replace(rule, on=long, owns=long, needs=(), presumes=())
        for number, rule in rules.items()
        if rule.watches or set(long) & set(rule.on)
    }
    subject = Case(KINDS[kind].reference, worlds=(2,), kind=kind)
    whole = own_judge().engine(subject)
    engine = Engine(whole.source, read, *subject_and_claims(subject), subject.worlds, whole.control)
    assert refusals({number: engine.judge(number) for number in read}, read) == {}

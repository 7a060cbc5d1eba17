"""Judge one mutation: by the short rules of all cases, and then by the long rules of some.

Cases that run the mutated function come first.
"""

import collections
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.errors import ConformanceError
from conformance.hosts.supervisor import die_with_parent
from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict
from conformance.rules import book
from conformance.session.engine import Engine
from conformance.subjects.kinds import HOOK
from tests.cases import LONG_RULES, Case, is_costly, own_judge
from tests.kill_rate.cases import cases_of
from tests.kill_rate.mutating import ROOT, Mutation

UNCHANGED = "unchanged"
PATIENCE = 20.0  # seconds after which a run of a long rule counts as hanging; others take 4
LONG = 2  # cases that are judged by the long rules
_CUT = "the time was up"
FEW = 5  # rules that judge first, and an unchanged copy alone
# The rules of hooks that refuse most mutations. For other kinds the first of their section do.
_FIRST = ("1.5", "2.1", "13.8", "2.2", "2.4", "2.7", "13.1", "13.4", "13.6", "9.1")
Entered = Mapping[str, Collection[str]]
"""The functions of the mutated module that the plain run of a case enters, by name of the case."""


@dataclass(frozen=True)
class Judged:
    """What became of one mutation.

    Attributes:
        mutation: the mutation.
        by: the rule that refused it and its verdict, ``load`` if it cannot be loaded, or '' if it
            survived.
        seconds: the time that this took.
        is_whole: whether every rule has judged a survivor; if not, the time was up.
    """

    mutation: Mutation
    by: str
    seconds: float
    is_whole: bool = True


def start() -> None:
    """Start this process's host in a folder that stays: the folders of mutations come and go."""
    die_with_parent()
    for hangs in (False, True):
        engine = own_judge(PATIENCE).engine(
            Case("hooks_ref:allreduce_hook", worlds=(2,), hangs=hangs)
        )
        assert engine.judge("1.5").verdict.holds


def functions_entered(module: str) -> dict[str, list[str]]:
    """Return the functions of a module that plain runs of its cases enter, by name of the case."""
    found = {}
    with _copies(unchanged(module)):
        for case in cases_of(module, ""):
            (rule, *_) = _rules(case)
            engine = own_judge(PATIENCE).engine(replace(case, rules=(rule,), partly=True))
            engine.judge(rule)
            coverage = engine.coverage().coverage
            found[str(case)] = [
                function.name
                for file in (coverage.files if coverage else ())
                if file.file.name.endswith(f"/{module}.py")
                for function in file.marks.functions
                if file.has_entered(function)
            ]
    return found


def judge(mutation: Mutation, entered: Entered, short: bool, limit: float) -> Judged:
    """Judge one mutation.

    Args:
        mutation: the mutation.
        entered: the functions that cases enter.
        short: by the short rules alone.
        limit: the seconds after which no other rule begins.
    """
    begin = time.monotonic()
    with _copies(mutation):
        by = _refused_by(mutation, entered, short, begin + limit)
    is_whole = by != _CUT
    return Judged(mutation, by if is_whole else "", time.monotonic() - begin, is_whole)


def unchanged(module: str) -> Mutation:
    """Return a copy of a module as it is: a rule that refuses it is wrong on this machine."""
    return Mutation(module, 0, UNCHANGED, (ROOT / "hooks_ref" / f"{module}.py").read_text())


@contextmanager
def _copies(mutation: Mutation) -> Iterator[None]:
    """Work in a new folder with the copies of a mutation."""
    folder = Path(tempfile.mkdtemp(prefix="kill-rate-"))
    try:
        _write_copies(mutation, folder)
        os.chdir(folder)
        yield
    finally:
        os.chdir(ROOT)
        shutil.rmtree(folder, ignore_errors=True)


def _write_copies(mutation: Mutation, folder: Path) -> None:
    """Write the mutated references, and the subjects that use them, under other names."""
    for package, copied in (("hooks_ref", "hooks_mutated"), ("examples", "examples_mutated")):
        (folder / copied).mkdir()
        for file in (ROOT / package).glob("*.py"):
            is_mutated = package == "hooks_ref" and file.stem == mutation.module
            text = mutation.source if is_mutated else file.read_text()
            (folder / copied / file.name).write_text(_renamed(text))
    subjects = ROOT / "tests" / "kill_rate" / "subjects.py"
    (folder / "subjects_mutated.py").write_text(_renamed(subjects.read_text()))


def _renamed(text: str) -> str:
    text = text.replace("hooks_ref", "hooks_mutated")
    return text.replace("from examples", "from examples_mutated")


def _refused_by(mutation: Mutation, entered: Entered, short: bool, end: float) -> str:
    """Return the rule that refuses the mutation and its verdict, or '' if none does.

    A rule that the reference itself fails on this machine refuses nothing. At ``end``, of
    ``time.monotonic()``, what is returned is ``_CUT``.
    """
    recent = _RECENT[mutation.module]
    cases = cases_of(mutation.module, mutation.key)
    # The name of a nested function has the ones around it, as a mutation's place has.
    function = mutation.place.partition(":")[0]
    cases.sort(key=lambda case: function not in entered.get(str(case), ()))
    try:
        for asked in _in_order(cases, short, recent):
            if mutation.change == UNCHANGED and asked.tier > 0:
                return ""  # the test run judges the originals by the whole book
            if time.monotonic() > end:
                return _CUT
            verdict = asked.engine.judge(asked.number).verdict
            if verdict is Verdict.FAIL:
                _RECENT[mutation.module] = _first(asked.name, recent)
                return f"{asked.number} {verdict}"
    except ConformanceError as error:
        return f"load: {error}"
    return ""


# The rules that have refused the last mutations of a module, each with its subject. Neighbours are
# often refused by the same rule.
_RECENT: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
_KEPT = 3


def _first(name: tuple[str, str], recent: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [name, *(other for other in recent if other != name)][:_KEPT]


@dataclass(frozen=True)
class _Question:
    """One rule and the engine that judges it.

    Attributes:
        engine: of the case.
        number: of the rule.
        name: of the subject, and the number.
        tier: 0 for one of the case's first rules, 1 for another short one, 2 for one of
            ``LONG_RULES``, and 3 for a costly one.
    """

    engine: Engine
    number: str
    name: tuple[str, str]
    tier: int


def _in_order(cases: list[Case], short: bool, recent: list[tuple[str, str]]) -> Iterator[_Question]:
    """Yield the recent rules, and then the rules of all cases by their tiers.

    Runs of short rules hang for 4 seconds at most: a ``hanging`` case has little patience.
    """
    questions = [one for case in cases for one in _questions(replace(case, hangs=True), False)]
    if not short:
        questions += [one for case in cases[:LONG] for one in _questions(case, True)]
    for name in recent:
        yield from (one for one in questions if one.name == name)
    yield from sorted(questions, key=lambda one: one.tier)


def _questions(case: Case, costly: bool) -> list[_Question]:
    rules = _rules(case, costly)
    if not rules:
        return []
    engine = own_judge(PATIENCE).engine(replace(case, rules=rules, partly=True))
    return [
        _Question(engine, number, (str(case), number), 3 if costly else _tier(number, place))
        for place, number in enumerate(rules)
    ]


def _tier(number: str, place: int) -> int:
    if place < FEW:
        return 0
    return 2 if number in LONG_RULES else 1


def _rules(case: Case, costly: bool = False) -> tuple[str, ...]:
    """Return the rules of a case that are costly, or those that are not, the likely ones first."""
    rules = book(case.kind, "cpu")
    chosen = [
        number
        for number, rule in rules.items()
        if rule.level == MUST and number in (case.rules or rules) and is_costly(rule) == costly
    ]
    if case.kind == HOOK:
        chosen.sort(key=lambda number: _FIRST.index(number) if number in _FIRST else len(_FIRST))
    return tuple(chosen)

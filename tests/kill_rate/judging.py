"""Judge one mutation: by the short rules of all cases, and then by the long rules of some."""

import collections
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.errors import ConformanceError
from conformance.hosts.supervisor import die_with_parent
from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict
from conformance.rules import book
from conformance.session.engine import Engine
from tests.cases import Case, is_costly, own_judge
from tests.kill_rate.cases import cases_of
from tests.kill_rate.mutating import ROOT, Mutation

UNCHANGED = "unchanged"
PATIENCE = 20.0  # seconds after which a run of a long rule counts as hanging; others take 4
LONG = 2  # cases that are judged by the long rules
_CUT = "the time was up"
FEW = 4  # rules that judge first, and an unchanged copy alone


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


def judge(mutation: Mutation, short: bool, limit: float) -> Judged:
    """Judge one mutation.

    Args:
        mutation: the mutation.
        short: by the short rules alone.
        limit: the seconds after which no other rule begins.
    """
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kill-rate-"))
    try:
        _write_copies(mutation, folder)
        os.chdir(folder)
        by = _refused_by(mutation, short, begin + limit)
        is_whole = by != _CUT
        return Judged(mutation, by if is_whole else "", time.monotonic() - begin, is_whole)
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


def _refused_by(mutation: Mutation, short: bool, end: float) -> str:
    """Return the rule that refuses the mutation and its verdict, or '' if none does.

    A rule that the reference itself fails on this machine refuses nothing. At ``end``, of
    ``time.monotonic()``, what is returned is ``_CUT``.
    """
    recent = _RECENT[mutation.module]
    try:
        for asked in _in_order(cases_of(mutation.module, mutation.key), short, recent):
            if mutation.change == UNCHANGED and not asked.is_first:
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
        is_first: whether it is one of the case's first rules.
    """

    engine: Engine
    number: str
    name: tuple[str, str]
    is_first: bool


def _in_order(cases: list[Case], short: bool, recent: list[tuple[str, str]]) -> Iterator[_Question]:
    """Yield the recent rules, the first short ones of all cases, the other short and the long ones.

    Runs of short rules hang for 4 seconds at most: a ``hanging`` case has little patience.
    """
    quick = [_questions(replace(case, hangs=True), costly=False) for case in cases]
    long = [] if short else [_questions(case, costly=True) for case in cases[:LONG]]
    everything = list(itertools.chain(*quick, *long))
    for name in recent:
        yield from (one for one in everything if one.name == name)
    for is_first in (True, False):
        yield from (one for one in itertools.chain(*quick) if one.is_first == is_first)
    yield from itertools.chain(*long)


def _questions(case: Case, costly: bool) -> list[_Question]:
    rules = _rules(case, costly)
    if not rules:
        return []
    engine = own_judge(PATIENCE).engine(replace(case, rules=rules, partly=True))
    return [
        _Question(engine, number, (str(case), number), place < FEW)
        for place, number in enumerate(rules)
    ]


def _rules(case: Case, costly: bool) -> tuple[str, ...]:
    rules = book(case.kind, "cpu")
    return tuple(
        number
        for number, rule in rules.items()
        if rule.level == MUST and number in (case.rules or rules) and is_costly(rule) == costly
    )

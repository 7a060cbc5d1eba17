"""Subjects and their judgements, made ahead of the tests that need them.

A few cases are judged at a time, each on a pool of its own, since a subject may kill the host.
Cases that hang keep no core busy, and are judged beside the others.
"""

import functools
import multiprocessing
import multiprocessing.util
import os
import pprint
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.hosts.supervisor import die_with_parent
from conformance.judging.rule import MUST, Rule, with_needed
from conformance.judging.verdict import Judgement
from conformance.rules import book
from conformance.session.engine import Engine, make_control
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import Claims, default_claims, parse_claims
from conformance.subjects.kinds import HOOK
from conformance.subjects.spec import SubjectSpec, parse_other, parse_subject
from conformance.subjects.target import parse_target

Judgements = dict[str, Judgement]
# One per core of CI: a third made the tests a tenth slower. One more judges cases that hang; it
# mostly waits.
WORKERS = 2
PATIENT = 60.0  # deadline in seconds
IMPATIENT = 4.0  # deadline of subjects that hang


@dataclass(frozen=True)
class Case:
    """A subject, and the profile that it is judged in; by ``rules``, or by all rules of its kind.

    A subject of another kind than hook has the claims that its target's arguments imply, unless
    ``claims`` is other than ``exact``. ``seed`` is the one that scenarios are drawn from; the suite
    judges with the same in every run. Rules that watch every run watch those of ``rules`` alone if
    it is judged ``partly``. Judged ``alone``, rules do not ask whether those hold that they build
    on. A short test run judges by ``short_rules`` alone, if there are any.
    """

    target: str
    claims: str = "exact"
    state: str | None = None
    setup: bool = False
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    hangs: bool = False
    rules: tuple[str, ...] = ()
    kind: str = HOOK
    seed: int = 0
    partly: bool = False
    alone: bool = False
    short_rules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.target.removeprefix("tests.").replace("mutants.", "") + (
            f"-{self.state}" if self.state else ""
        )


# Rules whose runs take long: large, long, or on many ranks. The suite judges some subjects by each
# of them, and --thorough judges all subjects by all rules.
COSTLY_SECTIONS = ("20", "22", "23", "24", "25")
COSTLY_RULES = {
    "13.15",
    *(f"14.{place}" for place in range(15, 28)),
    *(f"15.{place}" for place in (*range(21, 38), 39, 40)),
    *(f"16.{place}" for place in range(20, 38)),
    *(f"17.{place}" for place in range(18, 36)),
    *(f"18.{place}" for place in (*range(21, 33), 35)),
    *(f"19.{place}" for place in (*range(23, 36), 38)),
}
# Other rules whose runs take longer than most. The suite judges mutants by the first of each kind.
LONG_RULES = {
    *("1.6", "2.5", "2.12", "3.3", "4.2", "4.4", "4.5", "8.4", "8.5", "8.7", "9.2", "9.3", "9.4"),
    *("11.4", "11.6", "11.8", "12.5"),
    *("13.3", "13.6", "13.11", "13.14", "13.16", "13.17", "13.18"),
    *("14.5", "14.7", "14.8", "14.10", "14.12", "14.28", "15.4", "15.14", "16.6", "16.39"),
    *("17.9", "18.9", "18.34", "19.7"),
}
# Each costly rule judges one in so many subjects.
ONE_IN = 12


def is_costly(rule: Rule) -> bool:
    """Whether the runs of a rule take long."""
    return rule.section in COSTLY_SECTIONS or rule.number in COSTLY_RULES


def without_costly(rules: Mapping[str, Rule]) -> tuple[str, ...]:
    """Return the numbers of those rules whose runs are short."""
    return tuple(number for number, rule in rules.items() if not is_costly(rule))


def affordable(rules: Mapping[str, Rule], turn: int) -> tuple[str, ...]:
    """Return the numbers of a part of the rules: a third of those whose runs are short, and one in
    ``ONE_IN`` of the costly ones.

    Args:
        rules: the rules of a kind.
        turn: the number of the subject, from which its part is drawn.
    """
    draw = random.Random(turn)
    costly = [number for number, rule in rules.items() if is_costly(rule)]
    first = draw.randrange(ONE_IN)
    short = [number for number in rules if number not in costly]
    third = draw.randrange(3)
    # Neighbours have runs in common.
    kept = {
        *costly[first::ONE_IN],
        *short[third * len(short) // 3 : (third + 1) * len(short) // 3],
    }
    return tuple(number for number in rules if number in kept)


def by_short_rules(case: Case, short: Collection[str] = ()) -> Case:
    """Return a case that is judged by those rules of its kind whose runs are short.

    It is for torch's own subjects and for references, which the matrix judges by the whole book.

    Args:
        case: the case.
        short: the rules of a short test run, if it has fewer.
    """
    rules = without_costly(book(case.kind, "cpu"))
    in_order = tuple(number for number in rules if number in short)
    return replace(case, rules=rules, partly=True, short_rules=in_order)


def by_a_part(case: Case, rules: tuple[str, ...]) -> Case:
    """Return a case that is judged by these rules; in a short test run without the costly ones, and
    by a half of the others. Neighbours have runs in common.
    """
    book_of_kind = book(case.kind)
    short = without_costly({number: book_of_kind[number] for number in rules})
    return replace(case, rules=rules, partly=True, short_rules=short[: (len(short) + 1) // 2])


def in_turns(cases: Sequence[Any], one_in: int) -> list[Any]:
    """Return cases, or tuples of arguments, as parameters: one in so many for every run, the others
    for --every.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.rarely] * (place % one_in != 0),
        )
        for place, case in enumerate(cases)
    ]


class Judge:
    """Judges cases on pools of its own; one per process."""

    def __init__(self, stack: ExitStack, patience: float = PATIENT) -> None:
        self._rules = book()
        self._pools = {
            hangs: stack.enter_context(Pool(IMPATIENT if hangs else patience, lanes=1))
            for hangs in (False, True)
        }
        self._sources: dict[tuple[bool, int], LocalSource] = {}
        self._controls: dict[tuple[str, tuple[int, ...], int], Engine] = {}

    def judge(self, case: Case) -> Judgements:
        """Judge one case."""
        engine = self.engine(case)
        numbers = case.rules or [
            number
            for number, rule in self._rules.items()
            if rule.kind == case.kind and not rule.device
        ]
        return {number: engine.judge(number) for number in numbers}

    def engine(self, case: Case) -> Engine:
        """Return the engine of one case."""
        key = case.kind, case.worlds, case.seed
        if key not in self._controls:
            source = self._source(False, case.seed)
            self._controls[key] = make_control(source, self._rules, case.kind, case.worlds)
        return Engine(
            self._source(case.hangs, case.seed),
            self._rules_of(case),
            *subject_and_claims(case),
            case.worlds,
            self._controls[key],
        )

    def _rules_of(self, case: Case) -> dict[str, Rule]:
        """Return the book for a case: the whole one, or its rules and those that they build on."""
        if not case.partly or not case.rules:
            return self._rules
        if case.alone:
            return {n: replace(self._rules[n], needs=(), presumes=()) for n in case.rules}
        return with_needed(self._rules, case.rules)

    def _source(self, hangs: bool, seed: int) -> LocalSource:
        """Return the source of runs, which removes a saved state when the next one is saved."""
        key = hangs, seed
        if key not in self._sources:
            self._sources[key] = LocalSource(self._pools[hangs], seed=seed)
        return self._sources[key]


def subject_and_claims(case: Case) -> tuple[SubjectSpec, Claims]:
    """Return the subject and the claims of a case."""
    if case.kind == HOOK:
        return parse_subject(
            None if case.setup else case.target, case.state, case.target if case.setup else None
        ), parse_claims(case.claims)
    said = case.claims if case.claims != "exact" else ""
    claims = (
        parse_claims(said, case.kind)
        if said
        else default_claims(case.kind, parse_target(case.target, "").kwargs)
    )
    return parse_other(case.kind, case.target), claims


def refusals(judgements: Judgements, rules: Mapping[str, Rule]) -> dict[str, str]:
    """Return why MUST rules do not hold, with all evidence: the failure may not come again."""
    wrong = [
        j for number, j in judgements.items() if rules[number].level == MUST and not j.verdict.holds
    ]
    return {
        j.number: "\n".join(
            [j.reason, *(f"{f.actual}\n{pprint.pformat(f.evidence)}" for f in j.failures[:1])]
        )
        for j in wrong
    }


@functools.cache
def own_judge(patience: float = PATIENT) -> Judge:
    """Return the judge of this process; it lives until the process ends."""
    stack = ExitStack()
    multiprocessing.util.Finalize(None, stack.close, exitpriority=100)
    torch.set_num_threads(1)
    return Judge(stack, patience)


def _judge(case: Case) -> Judgements:
    return own_judge().judge(case)


def _start(nice: int) -> None:
    """Begin a judging process: it ends with its parent, however that ends, and gives way to it by
    ``nice``.
    """
    die_with_parent()
    os.nice(nice)


@contextmanager
def judges(
    workers: int = WORKERS, nice: int = 10
) -> Iterator[Callable[[Case], "Future[Judgements]"]]:
    """Yield a function that judges cases in the background, in their order.

    Judges are processes: threads would hold the interpreter lock that the tests need.

    Args:
        workers: the number of judges of cases that do not hang.
        nice: by which these judges give way to the tests that run meanwhile.
    """
    spawn = multiprocessing.get_context("spawn")
    executors = {
        True: ProcessPoolExecutor(max(1, workers // WORKERS), spawn, _start, (0,)),
        False: ProcessPoolExecutor(workers, spawn, _start, (nice,)),
    }
    try:
        yield lambda case: executors[case.hangs].submit(_judge, case)
    finally:
        for executor in executors.values():
            executor.shutdown(wait=True, cancel_futures=True)

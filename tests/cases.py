"""Subjects and their judgements, made ahead of the tests that need them.

A few cases are judged at a time, each on a pool of its own, since a subject may kill the host.
Cases that hang keep no core busy, and are judged beside the others.
"""

import functools
import multiprocessing
import multiprocessing.util
import os
import pprint
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from conformance.hosts.pool import Pool
from conformance.hosts.supervisor import die_with_parent
from conformance.judging.rule import MUST, Rule
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
    ``claims`` is other than ``exact``.
    """

    target: str
    claims: str = "exact"
    state: str | None = None
    setup: bool = False
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    hangs: bool = False
    rules: tuple[str, ...] = ()
    kind: str = HOOK

    def __str__(self) -> str:
        return self.target.removeprefix("tests.").replace("mutants.", "") + (
            f"-{self.state}" if self.state else ""
        )


class Judge:
    """Judges cases on pools of its own; one per process."""

    def __init__(self, stack: ExitStack, patience: float = PATIENT) -> None:
        self._rules = book()
        self._sources = {
            hangs: LocalSource(stack.enter_context(Pool(IMPATIENT if hangs else patience, lanes=1)))
            for hangs in (False, True)
        }
        self._controls: dict[tuple[str, tuple[int, ...]], Engine] = {}

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
        key = case.kind, case.worlds
        if key not in self._controls:
            self._controls[key] = make_control(self._sources[False], self._rules, *key)
        return Engine(
            self._sources[case.hangs],
            self._rules,
            *subject_and_claims(case),
            case.worlds,
            self._controls[key],
        )


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
def judges(workers: int = WORKERS) -> Iterator[Callable[[Case], "Future[Judgements]"]]:
    """Yield a function that judges cases in the background, in their order.

    Judges are processes: threads would hold the interpreter lock that the tests need.
    """
    # Judges of cases with a long deadline give way to the tests that run meanwhile.
    spawn = multiprocessing.get_context("spawn")
    executors = {
        True: ProcessPoolExecutor(max(1, workers // WORKERS), spawn, _start, (0,)),
        False: ProcessPoolExecutor(workers, spawn, _start, (10,)),
    }
    try:
        yield lambda case: executors[case.hangs].submit(_judge, case)
    finally:
        for executor in executors.values():
            executor.shutdown(wait=True, cancel_futures=True)

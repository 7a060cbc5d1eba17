"""Subjects and their judgements, made ahead of the tests that ask for them.

Judging a subject is partly waiting for its ranks, so some are judged at a time, each on a pool of its own: a
subject that kills the host is alone with it.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from conformance.claims import Claims, parse_claims
from conformance.engine import Engine
from conformance.pool import Pool
from conformance.rulebook import Rule
from conformance.sources import LocalSource
from conformance.subject import REFERENCE, parse_subject
from conformance.verdict import Judgement

Judgements = dict[str, Judgement]
NICE = 15  # on Linux of the thread, and of the pools it starts: the tests that run meanwhile come first
WORKERS = 4  # twice the cores that CI has: judging is half waiting
PATIENT, IMPATIENT = 60.0, 4.0  # deadlines; the second is for subjects that hang


@dataclass(frozen=True)
class Case:
    """A subject, and the profile that it is judged in; by ``rules``, or by all where none are named."""

    target: str
    claims: str = "exact"
    state: str | None = None
    setup: bool = False
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    hangs: bool = False
    rules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.target.removeprefix("tests.").replace("mutants.", "") + (f"-{self.state}" if self.state else "")


class Judge:
    """Judges cases on pools of its own; one per thread."""

    def __init__(self, rules: dict[str, Rule], stack: ExitStack) -> None:
        self._rules = rules
        self._sources = {hangs: LocalSource(stack.enter_context(Pool(IMPATIENT if hangs else PATIENT, lanes=1))) for hangs in (False, True)}
        self._controls: dict[tuple[int, ...], Engine] = {}

    def judge(self, case: Case) -> Judgements:
        """Judge one case."""
        control = self._controls.setdefault(case.worlds, Engine(self._sources[False], self._rules, REFERENCE, Claims(), case.worlds))
        spec = parse_subject(None if case.setup else case.target, case.state, case.target if case.setup else None)
        engine = Engine(self._sources[case.hangs], self._rules, spec, parse_claims(case.claims), case.worlds, control)
        return {number: engine.judge(number) for number in case.rules or self._rules}


@contextmanager
def judged_ahead(rules: dict[str, Rule], cases: Iterable[Case]) -> Iterator[dict[Case, "Future[Judgements]"]]:
    """Judge ``cases`` in their order, in the background."""
    with ExitStack() as stack:
        local, lock = threading.local(), threading.Lock()

        def judge(case: Case) -> Judgements:
            if not hasattr(local, "judge"):
                with lock:
                    local.judge = Judge(rules, stack)
            return local.judge.judge(case)

        executor = ThreadPoolExecutor(WORKERS, initializer=os.nice, initargs=(NICE,))
        try:
            yield {case: executor.submit(judge, case) for case in dict.fromkeys(cases)}
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

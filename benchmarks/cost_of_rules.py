"""What a certification's cost grows with: scenarios and ranks, not rules.

    python benchmarks/cost_of_rules.py [--samples 3]

Two tables, from one process on one machine, a lane at a time; only ratios and shares mean anything.

rules     `hooks_ref:allreduce_hook` by the whole book, at world sizes 1 to 4: the share of the time in which rules judge what
          has been recorded, and what a rule adds to the time of the scenarios that it reads
ranks     the scenario `values` at world sizes 1 to 16, beside one rank: near-linear where a rank costs as much as the first
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from conformance.hosts.pool import Pool
from conformance.records.run import Run
from conformance.rules import book
from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import Scenario
from conformance.session.engine import make_engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import Claims
from conformance.subjects.kinds import HOOK
from conformance.subjects.spec import REFERENCE, SubjectSpec, parse_subject

WORLDS = (1, 2, 3, 4)
RANKS = (1, 2, 4, 8, 16)


class TimedSource(LocalSource):
    """Counts the seconds in which scenarios run; begins none ahead, so that each is timed by itself."""

    seconds = 0.0
    runs = 0

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        begin = time.perf_counter()
        try:
            return super().run(scenario, world, subject, name)
        finally:
            self.seconds += time.perf_counter() - begin
            self.runs += 1

    def begin(self, runs: object, subject: SubjectSpec | None) -> None:
        pass


def rules(pool: Pool) -> tuple[float, float, int, int]:
    """Return seconds of scenarios and of rules, and how many of each there were."""
    source, numbers = TimedSource(pool), book(HOOK, "cpu")
    engine = make_engine(
        source, numbers, parse_subject("hooks_ref:allreduce_hook", None, None), Claims(), WORLDS
    )
    begin = time.perf_counter()
    judged = [engine.judge(number) for number in numbers]
    whole = time.perf_counter() - begin
    return source.seconds, whole - source.seconds, source.runs, len(judged)


def ranks(pool: Pool, world: int) -> float:
    """Return the seconds of one run at a world size."""
    begin = time.perf_counter()
    LocalSource(pool).run(VALUES, world, REFERENCE, f"{VALUES.name}@{world}")
    return time.perf_counter() - begin


def median(samples: int, once: Callable[[], float]) -> float:
    return statistics.median(once() for _ in range(samples))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with Pool(60.0, lanes=1) as pool:
        ranks(pool, 2)  # imports
        running, judging, runs, count = min((rules(pool) for _ in range(options.samples)), key=sum)
        print(
            f"{runs} runs of scenarios, {count} rules: rules take {judging / (running + judging):.1%} of the time,"
        )
        print(f"a rule {judging / count / (running / runs):.1%} of a run")
        one = median(options.samples, lambda: ranks(pool, 1))
        for world in RANKS:
            ratio = median(options.samples, lambda world=world: ranks(pool, world)) / one
            print(f"  {world:2} ranks: {ratio:5.1f} times one rank, {ratio / world:.2f} per rank")


if __name__ == "__main__":
    main()

"""The cost of a certification, which grows with scenarios and ranks, not with rules.

    python benchmarks/cost_of_rules.py [--samples 3]

One process on one machine runs one scenario at a time and prints three tables. Only their ratios
and shares are meaningful.

rules     an exact hook and a lossy one, judged by the whole book at world sizes 1 to 4: the share
          of the time in which rules judge records, and the time of a rule as a share of a run's
groups    the share of each section's scenarios in the time of all runs
ranks     the scenario `values` at world sizes 1 to 16, compared with one rank: linear if every
          further rank costs as much as the first
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from conformance.hosts.pool import Pool
from conformance.judging.rule import SECTIONS, Rule
from conformance.records.run import Run
from conformance.rules import book
from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import Scenario
from conformance.session.engine import make_engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import parse_claims
from conformance.subjects.kinds import HOOK
from conformance.subjects.spec import REFERENCE, SubjectSpec, parse_subject

WORLDS = (1, 2, 3, 4)
RANKS = (1, 2, 4, 8, 16)
# A hook, its state and its claims.
HOOKS = {
    "exact": ("hooks_ref:allreduce_hook", None, "exact"),
    "lossy": (
        "hooks_ref:compression_hook",
        "examples.states:top_k",
        "compressed(delta=0.25, ratio=0.501), checkpointable, keeps_unused, rescaled(call=rescale)",
    ),
}


class TimedSource(LocalSource):
    """A source that counts its runs and their seconds.

    It begins no run ahead of time, so that each is timed by itself.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.seconds = 0.0
        self.runs = 0
        self.of_scenario = Counter[str]()

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        begin = time.perf_counter()
        try:
            return super().run(scenario, world, subject, name)
        finally:
            took = time.perf_counter() - begin
            self.seconds += took
            self.of_scenario[scenario.name] += took  # type: ignore[assignment]
            self.runs += 1

    def begin(self, runs: object, subject: SubjectSpec | None, prefix: str = "") -> None:
        pass


@dataclass(frozen=True)
class Cost:
    """The seconds of a certification, and the numbers of its runs and rules.

    ``of_section`` has the seconds of the runs by the section of the first rule that reads them.
    """

    running: float
    judging: float
    runs: int
    rules: int
    of_section: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.running + self.judging


def certify(pool: Pool, hook: str, state: str | None, claims: str) -> Cost:
    """Judge a hook by all rules."""
    source = TimedSource(pool)
    rules = book(HOOK, "cpu")
    subject = parse_subject(hook, state, None)
    engine = make_engine(source, rules, subject, parse_claims(claims), WORLDS)
    begin = time.perf_counter()
    for number in rules:
        engine.judge(number)
    whole = time.perf_counter() - begin
    of_section = by_section(rules, source.of_scenario)
    return Cost(source.seconds, whole - source.seconds, source.runs, len(rules), of_section)


def by_section(rules: dict[str, Rule], seconds: Counter[str]) -> dict[str, float]:
    """Return the seconds of scenarios, added up by the section of the first rule that reads them.

    Probes of numbers in the hook's code are those of section 25.
    """
    section_of: dict[str, str] = {}
    for rule in rules.values():
        for scenario in rule.on:
            section_of.setdefault(scenario.name, rule.section)
    found = Counter[str]()
    for name, took in seconds.items():
        found[section_of.get(name, "25")] += took  # type: ignore[assignment]
    return dict(found)


def seconds_per_run(pool: Pool, world: int) -> float:
    """Return the seconds of one run at a world size."""
    begin = time.perf_counter()
    LocalSource(pool).run(VALUES, world, REFERENCE, f"{VALUES.name}@{world}")
    return time.perf_counter() - begin


def median(samples: int, once: Callable[[], float]) -> float:
    """Return the median of several measurements."""
    return statistics.median(once() for _ in range(samples))


def print_cost(name: str, cost: Cost) -> None:
    rule_to_run = cost.judging / cost.rules / (cost.running / cost.runs)
    print(
        f"{name}: {cost.runs} runs of scenarios, {cost.rules} rules: "
        f"rules take {cost.judging / cost.seconds:.1%} of the time,"
    )
    print(f"a rule {rule_to_run:.1%} of a run; of the time of all runs:")
    for section, seconds in sorted(cost.of_section.items(), key=lambda item: -item[1]):
        print(f"  {seconds / cost.running:6.1%}  {section} {SECTIONS[section]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=3, help="measurements of each figure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with Pool(60.0, lanes=1) as pool:
        seconds_per_run(pool, 2)  # the first run imports modules, and is not timed
        for name, subject in HOOKS.items():
            costs = [certify(pool, *subject) for _ in range(options.samples)]
            # The fastest certification is the one that other processes disturbed least.
            print_cost(name, min(costs, key=lambda cost: cost.seconds))
        one = median(options.samples, lambda: seconds_per_run(pool, 1))
        for world in RANKS:
            several = median(options.samples, lambda world=world: seconds_per_run(pool, world))
            ratio = several / one
            print(f"  {world:2} ranks: {ratio:5.1f} times one rank, {ratio / world:.2f} per rank")


if __name__ == "__main__":
    main()

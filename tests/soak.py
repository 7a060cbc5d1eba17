"""Judge every right hook, reference and peer again and again, or every mutant; under load if you
like.

    python -m tests.soak --runs 20 --judges 6
    python -m tests.soak --rule 24.5,13.1 --only one_bit
    python -m tests.soak --parts --judges 2

Not part of the test run: a rule that is wrong once in twenty runs is found here. Each run draws its
scenarios from a seed of its own.

Twenty runs take longer than a working day on two cores. ``--record FILE`` adds a line for each run
to a file, so that runs of several days count together.
"""

import argparse
import collections
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.judging.rule import MUST, Rule, WorldSizes
from conformance.judging.verdict import Judgement, Verdict
from conformance.rules import book
from conformance.subjects.claims import LOCAL
from conformance.subjects.kinds import KINDS
from tests import test_mutants, test_right
from tests.cases import WORKERS, Case, affordable, judges, subject_and_claims
from tests.hooks_ref import test_certified
from tests.mutants import Mutant


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--runs", type=int, default=20)
    add(
        "--judges",
        type=int,
        default=WORKERS,
        help="number of judges; more than there are cores load each other",
    )
    add("--load", type=int, default=0, help="processes that only keep a core busy")
    add("--mutants", action="store_true", help="judge the mutants instead of the right hooks")
    add(
        "--named",
        action="store_true",
        help="judge mutants by the rules that they break, not by the whole book",
    )
    add(
        "--rule",
        default="",
        metavar="N.N,N.N",
        help="judge by these rules, not by those that they build on; only subjects of their kinds",
    )
    add(
        "--parts",
        action="store_true",
        help="judge each right subject by a part of the book, another one in each run: a run of "
        "all subjects takes half an hour of two cores instead of three hours",
    )
    add(
        "--only",
        default="",
        help="judge only cases whose name or claims match, e.g. 'exact|rounded'",
    )
    add(
        "--world-size",
        default="",
        metavar="N,N",
        help="judge right subjects at these instead of up to 4",
    )
    add(
        "--kind",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help="judge subjects of these kinds alone",
    )
    add("--seed", type=int, default=0, help="the seed of the first run")
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="add a line to this file for each run, and say how many there were in a row without "
        "a wrong verdict",
    )
    return parser


def spin() -> None:
    """Keep a core busy for ever."""
    os.nice(10)  # the same as the judges: they get half of each core, and not a tenth
    while True:
        pass


def takes(case: Case, worlds: tuple[int, ...]) -> bool:
    """Whether there is anything to judge at these world sizes: of two ranks, a part that averages
    is all of them.
    """
    claims = subject_and_claims(case)[1]
    least = 3 if claims.lossy == LOCAL else claims.min_world_size
    return max(worlds) >= least


def _usual_worlds(case: Case) -> tuple[int, ...]:
    if ".exact:" in case.target:
        return (1, 2, 3, 4)
    if subject_and_claims(case)[1].min_world_size == 2:
        return (1, 2, 3)  # it has to refuse a single rank
    return (2, 3) if takes(case, (2, 3)) else case.worlds


def right_cases(worlds: tuple[int, ...]) -> list[Case]:
    """Return right subjects, judged by the whole book although tests judge some by a few sections.

    Args:
        worlds: their world sizes; if empty, those that the tests use.
    """
    shapes = [replace(case, worlds=_usual_worlds(case)) for case in test_right.CASES]
    certified = [replace(case, worlds=tuple({*case.worlds, 4})) for case in test_certified.CASES]
    cases = [replace(case, rules=(), partly=False) for case in (*shapes, *certified)]
    if worlds:
        cases = [replace(case, worlds=worlds) for case in cases if takes(case, worlds)]
    return list(dict.fromkeys(cases))


def by_rules(case: Case, numbers: tuple[str, ...]) -> Case | None:
    """Return a case judged by some rules alone; None if they are rules of other kinds."""
    own = tuple(number for number in numbers if book()[number].kind == case.kind)
    return replace(case, rules=own, partly=True, alone=True) if own else None


def by_a_drawn_part(case: Case, turn: int) -> Case:
    """Return a case judged by a part of the rules of its kind, which is drawn from ``turn``."""
    rules = affordable(book(case.kind, "cpu"), turn)
    return replace(case, rules=rules, partly=True)


def is_expected(case: Case, mutant: Mutant | None, rule: Rule, verdict: Verdict) -> bool:
    """Whether a verdict on a case is right."""
    asked = rule.number in mutant.breaks if mutant else False
    if (rule.level != MUST and not asked) or (mutant and rule.number in mutant.because):
        return True
    if mutant is None:
        # At one world size there are no others, and none with fewer ranks than it takes.
        return verdict.holds or (
            verdict is Verdict.NOT_RUN
            and rule.worlds in (WorldSizes.OTHERS, WorldSizes.BELOW_MINIMUM)
            and len(case.worlds) == 1
        )
    return (verdict is Verdict.FAIL) == asked and verdict is not Verdict.KIT_ERROR


def wrong_verdicts(
    case: Case, mutant: Mutant | None, judgements: Mapping[str, Judgement]
) -> Iterable[str]:
    """Return a line for each verdict that is not right."""
    rules = book()
    for number, judgement in judgements.items():
        if not is_expected(case, mutant, rules[number], judgement.verdict):
            seen = judgement.failures[0].actual if judgement.failures else judgement.reason
            yield f"{case} {number}, seed {case.seed}: {judgement.verdict}: {seen[:300]}"


def record_run(
    record: Path, options: argparse.Namespace, seed: int, verdicts: int, wrong: list[str]
) -> None:
    """Add a run to the record.

    Args:
        record: the file.
        options: of the command line.
        seed: of the run.
        verdicts: their number.
        wrong: a line for each verdict that was wrong.
    """
    told = ("kind", "only", "rule", "parts", "world_size", "judges", "load")
    line: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "revision": _revision(),
        "seed": seed,
        **{name: getattr(options, name) for name in told},
        "verdicts": verdicts,
        "wrong": wrong,
    }
    with record.open("a") as file:
        file.write(json.dumps(line) + "\n")


def runs_in_a_row(record: Path) -> int:
    """Return how many runs there were since the last one with a wrong verdict."""
    lines = record.read_text().splitlines() if record.exists() else []
    wrong = [bool(json.loads(line)["wrong"]) for line in lines]
    return wrong[::-1].index(True) if True in wrong else len(wrong)


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Judge the cases that the command line names, and return 1 if a verdict was wrong."""
    options = parser().parse_args()
    worlds = tuple(map(int, options.world_size.split(","))) if options.world_size else ()
    numbers = tuple(options.rule.split(",")) if options.rule else ()
    unknown = [number for number in numbers if number not in book()]
    if unknown:
        raise SystemExit(f"there is no rule {unknown[0]}: conformance/RULES.md has the numbers")
    if options.parts and (numbers or options.mutants):
        raise SystemExit("--parts draws the rules of right subjects: drop --rule and --mutants")
    cases: dict[Case, Mutant | None] = dict.fromkeys(right_cases(worlds))
    if options.mutants:
        cases = {
            case if options.named else replace(case, rules=()): mutant
            for case, mutant in test_mutants.CASES.items()
        }
    cases = {
        chosen: mutant
        for case, mutant in cases.items()
        if case.kind in options.kind and re.search(options.only, f"{case} {case.claims}")
        if (chosen := by_rules(case, numbers) if numbers else case)
    }
    burners = [multiprocessing.Process(target=spin, daemon=True) for _ in range(options.load)]
    for burner in burners:
        burner.start()
    wrong, begin = collections.Counter[str](), time.monotonic()
    with judges(options.judges) as judged:
        for run in range(options.runs):
            seed = options.seed + run
            seeded = {case: replace(case, seed=seed) for case in cases}
            if options.parts:
                seeded = {
                    case: by_a_drawn_part(seeded[case], seed * len(cases) + place)
                    for place, case in enumerate(cases)
                }
            started = {case: judged(seeded[case]) for case in cases}
            verdicts, of_run = 0, []
            for case, future in started.items():
                judgements = future.result()
                verdicts += len(judgements)
                for what in wrong_verdicts(seeded[case], cases[case], judgements):
                    of_run.append(what)
                    print(f"wrong: {what}", flush=True)
            wrong.update(of_run)
            if options.record:
                record_run(options.record, options, seed, verdicts, of_run)
            said = (
                f"{len(cases)} subjects, {sum(wrong.values())} wrong verdicts so far, load "
                f"average {os.getloadavg()[0]:.0f}"
            )
            print(f"run {run + 1} of {options.runs}: {said}", flush=True)
    for what, count in wrong.most_common():
        print(f"{count} times: {what}")
    total, seconds = sum(wrong.values()), time.monotonic() - begin
    how = f"{options.judges} at a time, load {options.load}"
    print(
        f"{options.runs} runs of {len(cases)} subjects, {how}: {total} wrong verdicts, "
        f"{seconds:.0f} s"
    )
    if options.record:
        print(f"{runs_in_a_row(options.record)} runs in a row without one, on record")
    for burner in burners:
        burner.kill()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

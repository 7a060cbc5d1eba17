"""Judge every right hook, reference and peer again and again, or every mutant; under load if you
like.

    python -m tests.soak --runs 20 --judges 6

Not part of the test run: a rule that is wrong once in twenty runs is found here. Each run draws its
scenarios from a seed of its own.
"""

import argparse
import collections
import dataclasses
import multiprocessing
import os
import re
import sys
import time

from conformance.judging.rule import MUST, WorldSizes
from conformance.judging.verdict import Verdict
from conformance.rules import book
from conformance.subjects.claims import LOCAL
from conformance.subjects.kinds import KINDS
from tests import test_mutants, test_right
from tests.cases import WORKERS, Case, judges, subject_and_claims
from tests.hooks_ref import test_certified


def spin() -> None:
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--judges",
        type=int,
        default=WORKERS,
        help=("number of judges; more than there are cores load each other"),
    )
    parser.add_argument("--load", type=int, default=0, help="processes that only keep a core busy")
    parser.add_argument(
        "--mutants", action="store_true", help=("judge the mutants instead of the right hooks")
    )
    parser.add_argument(
        "--named",
        action="store_true",
        help=("judge them by the rules that they break, not by the whole book"),
    )
    parser.add_argument(
        "--only",
        default="",
        help=("judge only cases whose name or claims match, e.g. 'exact|rounded'"),
    )
    parser.add_argument(
        "--world-size",
        default="",
        metavar="N,N",
        help=("judge right subjects at these instead of up to 4"),
    )
    parser.add_argument(
        "--kind",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        help=("judge subjects of these kinds alone"),
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first run")
    options = parser.parse_args()
    burners = [multiprocessing.Process(target=spin, daemon=True) for _ in range(options.load)]
    for burner in burners:
        burner.start()
    # By the whole book, although tests judge some cases by a few sections only.
    shapes = [
        dataclasses.replace(case, worlds=(1, 2, 3, 4) if ".exact:" in case.target else (2, 3))
        for case in test_right.CASES
    ]
    certified = [
        dataclasses.replace(case, worlds=tuple({*case.worlds, 4})) for case in test_certified.CASES
    ]
    right = list(
        dict.fromkeys(dataclasses.replace(case, rules=()) for case in (*shapes, *certified))
    )
    if options.world_size:
        worlds = tuple(map(int, options.world_size.split(",")))
        right = list(
            dict.fromkeys(
                dataclasses.replace(case, worlds=worlds) for case in right if takes(case, worlds)
            )
        )
    mutants = {
        case if options.named else dataclasses.replace(case, rules=()): mutant
        for case, mutant in test_mutants.CASES.items()
    }
    cases = [
        case
        for case in (mutants if options.mutants else right)
        if case.kind in options.kind and re.search(options.only, f"{case} {case.claims}")
    ]
    rules, wrong, begin = book(), collections.Counter[str](), time.monotonic()

    def expected(case: Case, number: str, verdict: Verdict) -> bool:
        mutant = mutants.get(case)
        asked = number in mutant.breaks if mutant else False
        if (rules[number].level != MUST and not asked) or (mutant and number in mutant.because):
            return True
        if mutant is None:
            # At one world size there are no others, and none with fewer ranks than it takes.
            return verdict.holds or (
                verdict is Verdict.NOT_RUN
                and rules[number].worlds in (WorldSizes.OTHERS, WorldSizes.BELOW_MINIMUM)
                and len(case.worlds) == 1
            )
        return (verdict is Verdict.FAIL) == asked and verdict is not Verdict.KIT_ERROR

    with judges(options.judges) as judged:
        for run in range(options.runs):
            seed = options.seed + run
            started = {case: judged(dataclasses.replace(case, seed=seed)) for case in cases}
            for case, future in started.items():
                for number, judgement in future.result().items():
                    if not expected(case, number, judgement.verdict):
                        what = (
                            f"{case} {number}, seed {seed}: {judgement.verdict}: "
                            f"{judgement.reason[:300]}"
                        )
                        wrong[what] += 1
                        print(f"wrong: {what}", flush=True)
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
    for burner in burners:
        burner.kill()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

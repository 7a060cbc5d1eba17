"""Judge hooks that are wrong beyond a drawn threshold: a size of a bucket, or a number of steps.

    python -m tests.thresholds --count 50 [--seed 1 [--skip 20]]

Not part of the test run. Thresholds are drawn evenly over their logarithms, sizes from 1 to 10**7
and steps from 1 to 1,000, and so are the seeds of the scenarios. A certificate vouches for such
sizes and steps only if every one of these hooks is refused.
"""

import argparse
import random
import sys
from collections.abc import Sequence

from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict
from conformance.rules import book
from tests.cases import Case, own_judge

# The sections whose rules look at sizes or steps. Those that refuse most hooks come first.
OF_SIZES = ("1", "2", "3", "22", "23")
OF_STEPS = ("2", "23", "1", "3", "22")
LARGEST = 10**7
LONGEST = 1000
SIZES = "tests.mutants.training_sizes:above,numel={},defect={}"
# Indices of 16 or 24 bits are right below 2**16 or 2**24.
DEFECTS = ("bfloat16", "undivided", "own", "never_sent", "without_tail", "scaled_wrongly")
STEPS = (
    "tests.mutants.endurance:sum_from,first={}",
    "tests.mutants.endurance:own_from_call,first={}",
    "tests.mutants.endurance:own_in_one_step,at={}",
    "tests.mutants.endurance:stale_every,every={}",
    "tests.mutants.endurance:compresses_from,first={}",
)


def drawn(largest: int, draw: random.Random) -> int:
    """Return a number from 1 to ``largest`` whose logarithm is uniform."""
    return max(1, int(largest ** draw.random()))


def of_sizes(draw: random.Random) -> str:
    """Return a hook that is wrong in buckets of more than a drawn number of elements."""
    return SIZES.format(drawn(LARGEST, draw), draw.choice(DEFECTS))


def of_steps(draw: random.Random) -> str:
    """Return a hook that is wrong from a drawn step on, in one step, or at every n-th one."""
    return draw.choice(STEPS).format(drawn(LONGEST, draw))


def refused_by(target: str, seed: int, sections: Sequence[str]) -> str:
    """Return the first MUST rule of ``sections`` that refuses a hook, or an empty text if none
    does.
    """
    rules = book()
    numbers = tuple(
        number
        for section in sections
        for number, rule in rules.items()
        if rule.section == section and rule.level == MUST and not rule.device
    )
    engine = own_judge().engine(
        Case(target, worlds=(1, 2, 3), rules=numbers, seed=seed, partly=True)
    )
    failed = (number for number in numbers if engine.judge(number).verdict is Verdict.FAIL)
    return next(failed, "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the hooks, and return the number of those that no rule refuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="hooks of each sort")
    parser.add_argument("--seed", type=int, default=None, help="drawn if left out")
    parser.add_argument("--skip", type=int, default=0, help="hooks to draw, and not to judge")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    draw = random.Random(seed)
    passed = 0
    for number in range(2 * given.count):
        make, sections = (of_sizes, OF_SIZES) if number < given.count else (of_steps, OF_STEPS)
        target = make(draw)
        scenarios = draw.randrange(2**32)
        if number >= given.skip:
            rule = refused_by(target, scenarios, sections)
            passed += not rule
            print(f"{rule or 'NOT REFUSED':12} {target}  --seed {scenarios}", flush=True)
    judged = max(0, 2 * given.count - given.skip)
    print(f"{judged} hooks, seed {seed}: {passed} not refused")
    return passed


if __name__ == "__main__":
    sys.exit(bool(main()))

"""``python -m tests.kill_rate``: run the mutations, and print a line for each module."""

import argparse
import collections
import itertools
import json
import math
import random
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import tests.kill_rate
from tests.kill_rate import USERS, Mutation, explained, mutations, on_file
from tests.kill_rate.judging import UNCHANGED, Judged, functions_entered, judge, start, unchanged

UNEXPLAINED = "unexplained"


def main() -> int:
    """Judge the chosen mutations, and print the survivors and the table."""
    options = _options()
    reasons = {} if options.survivors else explained()
    chosen: list[Mutation] = []
    for module in options.module:
        picked = _picked(module, options)
        chosen += [unchanged(module), *picked]
    earlier = _judged_earlier(options.record, chosen, options.limit)
    seen = {one.mutation.key for one in earlier}
    asked = [mutation for mutation in chosen if mutation.key not in reasons.keys() | seen]
    judged: list[Judged] = list(earlier)
    _print_titles()
    executor = ProcessPoolExecutor(options.judges, get_context("spawn"), start)
    with executor:
        modules = list(dict.fromkeys(one.module for one in asked if one.change != UNCHANGED))
        entered = dict(zip(modules, executor.map(functions_entered, modules), strict=True))
        asked = [one for one in asked if one.module in entered]
        results = executor.map(
            partial(judge, short=options.short, limit=options.limit),
            asked,
            [entered[one.module] for one in asked],
        )
        for module, of_module in itertools.groupby(results, key=lambda one: one.mutation.module):
            judged += _print_results(of_module, options.record)
            picked = [one for one in chosen if one.module == module and one.change != UNCHANGED]
            print(_row(module, picked, judged), flush=True)
    _print_rules(judged)
    _print_survivors(judged)
    _print_titles()
    every = [one for one in chosen if one.change != UNCHANGED]
    for module in options.module:
        print(_row(module, [one for one in every if one.module == module], judged))
    print(_row("all", every, judged))
    return 0


def _judged_earlier(record: Path | None, chosen: list[Mutation], limit: float) -> list[Judged]:
    """Return the results on file, of an earlier run that was interrupted.

    Those are left out that ran out of time, and have more now.
    """
    if record is None or not record.exists():
        return []
    found = {}
    for line in record.read_text().splitlines():
        result = json.loads(line)
        found[result["key"]] = result
    return [
        Judged(mutation, one["by"], one["seconds"], one["is_whole"])
        for mutation in chosen
        if (one := found.get(mutation.key))
        and (one["by"] or one["is_whole"] or one["seconds"] >= limit)
    ]


def _note(record: Path | None, one: Judged) -> None:
    if record:
        with record.open("a") as file:
            result = {
                "key": one.mutation.key,
                "by": one.by,
                "seconds": round(one.seconds, 1),
                "is_whole": one.is_whole,
            }
            file.write(json.dumps(result) + "\n")


def _print_results(results: Iterable[Judged], record: Path | None) -> list[Judged]:
    """Print each result as it comes, and return them without that of the unchanged copy.

    Args:
        results: those of a module.
        record: a file that keeps each result.
    """
    judged = []
    for one in results:
        if one.mutation.change != UNCHANGED:
            judged.append(one)
            _note(record, one)
            by = one.by[:60] or ("SURVIVED" if one.is_whole else "no time")
            print(f"{one.seconds:5.1f} s  {by:<12}  {one.mutation}", flush=True)
        elif one.by:
            raise SystemExit(f"{one.mutation}: {one.by}: cannot be judged on this machine")
    return judged


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=tests.kill_rate.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--module", nargs="+", choices=USERS, default=list(USERS))
    parser.add_argument(
        "--sample", type=int, default=20, help="mutations of each module; 0 for all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--survivors", action="store_true", help="judge only those listed in kill_rate.toml"
    )
    parser.add_argument(
        "--short", action="store_true", help="judge by the rules alone whose runs are short"
    )
    parser.add_argument(
        "--only", default="", help="judge only mutations whose name contains this text"
    )
    parser.add_argument(
        "--judges", type=int, default=2, help="number of judges; hanging cases leave a core idle"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="begin no other rule on a mutation that no rule has refused for so long; it counts as "
        "a survivor, and a run with more time judges it again",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="keep each result in this file, and judge none that it has: a run at the same "
        "revision then goes on where it was interrupted",
    )
    return parser.parse_args()


def _picked(module: str, options: argparse.Namespace) -> list[Mutation]:
    """Return a module's mutations, or a sample."""
    reasons = on_file()
    made = [
        mutation
        for mutation in mutations(module)
        if (mutation.key in reasons or not options.survivors) and options.only in mutation.key
    ]
    draw = random.Random(f"{options.seed} {module}")
    picked = draw.sample(made, min(options.sample, len(made))) if options.sample else made
    print(f"{module}: {len(picked)} of {len(made)} mutations", flush=True)
    return picked


def _print_rules(judged: list[Judged]) -> None:
    """Print how many mutations each rule has refused."""
    rules = collections.Counter(one.by.partition(":")[0].split(" ")[0] for one in judged if one.by)
    print("by rule: " + ", ".join(f"{rule} {count}" for rule, count in rules.most_common()))


def _print_survivors(judged: list[Judged]) -> None:
    reasons = on_file()
    for one in judged:
        if not one.by:
            key = one.mutation.key
            how = "survived" if one.is_whole else "no time"
            print(f"{how}: {one.mutation}: {': '.join(reasons.get(key, (UNEXPLAINED, key)))}")


def _print_titles() -> None:
    print(f"{'module':<26}mutations  refused  equivalent  unclaimed  survivors  kill rate")


def _row(name: str, chosen: list[Mutation], judged: list[Judged]) -> str:
    """Return the line of the table for some mutations."""
    reasons = explained()
    refused = {one.mutation.key for one in judged if one.by}
    counts = collections.Counter(
        "refused" if one.key in refused else reasons.get(one.key, (UNEXPLAINED, ""))[0]
        for one in chosen
    )
    breaking = len(chosen) - counts["equivalent"] - counts["unclaimed"]
    rate = f"{100 * counts['refused'] / breaking:.1f} %" if breaking else ""
    return (
        f"{name:<26}{len(chosen):9}{counts['refused']:9}{counts['equivalent']:12}"
        f"{counts['unclaimed']:11}{breaking - counts['refused']:11}{rate:>11}"
    )


if __name__ == "__main__":
    sys.exit(main())

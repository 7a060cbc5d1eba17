"""A subset of the tests for one version of torch: ``python -m tests.versions``.

It judges a reference of each kind, mutants of all sections, and torch's own subjects, on two ranks
(``tests/versions_subset.py``), and writes the results to
``tests/torch_versions/results/VERSION.json`` as they come. With ``--small`` it judges a part of
them, which takes two to three minutes. The page docs/torch-versions.md is made of these files:
``python -m tests.versions --page``.

The exit code is 1 if there is a kit error, a refused reference, or a mutant that is not refused, or
if this torch lacks a private name that the kit counts on.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import torch

from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict
from conformance.torch_versions.faults import FAULTS
from conformance.torch_versions.startup import missing_parts
from conformance.torch_versions.tested import release
from tests.cases import WORKERS, Case, Judgements, judges
from tests.versions_subset import GROUPS, RULES, WORLDS, mutants, references, torchs_own

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "torch_versions" / "results"
PAGE = ROOT / "docs" / "torch-versions.md"
# One judge more than elsewhere: the first of torch's own subjects hangs, and others are judged
# meanwhile.
START = ("torch's own", "references", "mutants")


def is_limit_of_torch(reason: str) -> bool:
    """Whether a rule does not apply because of a fault of this torch."""
    return any(fault.summary in reason for fault in FAULTS)


def result_of(judgements: Judgements) -> dict[str, Any]:
    """Return the verdict on a subject, and the rules that refuse it."""
    must = {n: j for n, j in judgements.items() if RULES[n].level == MUST}
    return {
        "refused by": {
            n: (j.failures[0].actual if j.failures else j.reason)[:200]
            for n, j in must.items()
            if j.verdict is Verdict.FAIL
        },
        "kit errors": {
            n: j.reason[:300] for n, j in judgements.items() if j.verdict is Verdict.KIT_ERROR
        },
        "not applicable for torch": {
            n: j.reason
            for n, j in must.items()
            if j.verdict is Verdict.NOT_APPLICABLE and is_limit_of_torch(j.reason)
        },
        "passed": sum(j.verdict is Verdict.PASS for j in must.values()),
    }


def run(
    groups: Iterable[str], file: Path, *, small: bool = False, resume: bool = False
) -> dict[str, Any]:
    """Judge the subset; write each result as it comes, and return all results of the file.

    Args:
        groups: the groups to judge; the file keeps the results of the others.
        file: of this version.
        small: judge the small subset.
        resume: judge the subjects alone that the file has no result of.
    """
    began = time.monotonic()
    chosen = {str(one.case): one for one in mutants(small)}
    every: dict[str, list[Case]] = {
        "references": references(),
        "torch's own": torchs_own(small),
        "mutants": [one.case for one in chosen.values()],
    }
    cases = {group: every[group] for group in GROUPS if group in groups}
    names = {group: [str(case) for case in members] for group, members in cases.items()}
    found = begun(file, names, small=small, resume=resume)
    earlier = dict(found["seconds"])
    with judges(WORKERS + 1, nice=0) as judged:
        futures = {
            judged(case): (group, str(case))
            for group in sorted(cases, key=START.index)
            for case in cases[group]
            if str(case) not in found[group]
        }
        for future in as_completed(futures):
            group, name = futures[future]
            try:
                entry = result_of(future.result())
            except Exception as error:
                entry = {"error": f"{type(error).__name__}: {error}"}
            if group == "mutants":
                breaks = set(chosen[name].breaks)
                by = set(entry.get("refused by", ()))
                entry["as elsewhere"] = breaks <= by <= breaks | chosen[name].may
            ready = found[group] | {name: entry}
            found[group] = {name: ready[name] for name in names[group] if name in ready}
            seconds = round(time.monotonic() - began)
            found["seconds"][group] = earlier.get(group, 0) + seconds
            write(file, found)
            print(f"{seconds} s: {group}: {name}: {cell(entry)}", flush=True)
    return found


def begun(
    file: Path, planned: Mapping[str, Sequence[str]], *, small: bool, resume: bool = False
) -> dict[str, Any]:
    """Write and return the results of a version, with none of those that are about to be judged.

    The number of planned results is in the file from the beginning, so that a run that is cut off
    does not look complete. For each group the file has the seconds from the start of its run to its
    last result, so that a later run of one group keeps the seconds of the others.

    Args:
        file: of this version.
        planned: the names of the subjects by group.
        small: whether they are the small subset.
        resume: keep the results of these groups, but for subjects that could not be judged.
    """
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    kept = [group for group in found.get("small", ()) if group not in planned]
    found |= {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "missing private names": missing_parts(torch.__version__),
        "world sizes": list(WORLDS),
        "planned": found.get("planned", {})
        | {group: len(names) for group, names in planned.items()},
        "small": [*kept, *planned] if small else kept,
        "seconds": {
            group: seconds
            for group, seconds in found.get("seconds", {}).items()
            if resume or group not in planned
        },
    }
    for group, names in planned.items():
        results = found.get(group, {}) if resume else {}
        is_judged = {name for name, entry in results.items() if "error" not in entry}
        found[group] = {name: results[name] for name in names if name in is_judged}
    write(file, found)
    return found


def write(file: Path, found: Mapping[str, Any]) -> None:
    """Write the results of a version; a run that ends meanwhile leaves the earlier file whole."""
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    beside.replace(file)


def is_cut_off(result: Mapping[str, Any], group: str) -> bool:
    """Whether a run ended before it had judged all subjects of a group."""
    planned: int = result["planned"].get(group, 0)
    return len(result.get(group, ())) < planned


def wrong_in(result: Mapping[str, Any]) -> list[str]:
    """Return what is wrong in the results of a version."""
    wrong = [f"torch lacks {name}" for name in result["missing private names"]]
    for group in GROUPS:
        for name, entry in result.get(group, {}).items():
            refused = bool(entry.get("refused by"))
            if "error" in entry or entry["kit errors"] or (group == "references" and refused):
                wrong.append(f"{name}: {cell(entry)}")
            elif group == "mutants" and not refused:
                wrong.append(f"{name}: not refused")
    return wrong


def cell(entry: Mapping[str, Any]) -> str:
    """Return the verdict on a subject in a few words."""
    if "error" in entry:
        return f"not judged: {entry['error']}"
    if entry["kit errors"]:
        return "kit error: " + ", ".join(entry["kit errors"])
    if entry["refused by"]:
        return "refused by " + ", ".join(entry["refused by"])
    limits = entry["not applicable for torch"]
    return f"holds, without {', '.join(limits)}" if limits else "holds"


def main() -> int:
    """Judge the subset on this torch, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--page", action="store_true", help="write docs/torch-versions.md")
    parser.add_argument("--small", action="store_true", help="judge the small subset")
    parser.add_argument(
        "--only",
        choices=GROUPS,
        action="append",
        help="judge this group alone; the file keeps the other groups",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the results on file, and judge the subjects alone that have none: after a run "
        "that was cut off, or for mutants that joined the subset since",
    )
    options = parser.parse_args()
    if options.page:
        from tests.versions_page import page

        PAGE.write_text(page())
        return 0
    groups = options.only or GROUPS
    version = torch.__version__.partition("+")[0]
    python = ".".join(platform.python_version_tuple()[:2])
    file = RESULTS / (f"{version}.json" if python == "3.11" else f"{version}-python{python}.json")
    RESULTS.mkdir(exist_ok=True)
    result = run(groups, file, small=options.small, resume=options.resume)
    wrong = wrong_in(result)
    for line in wrong:
        print(f"WRONG {line}")
    seconds = max(result["seconds"].get(group, 0) for group in groups)
    print(f"torch {torch.__version__}, release {release(torch.__version__)}: {seconds} s")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())

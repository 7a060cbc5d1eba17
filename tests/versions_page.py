"""docs/torch-versions.md, made of the results that ``tests/versions.py`` has written."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conformance.torch_versions.faults import FAULTS
from conformance.torch_versions.names import OF_REFERENCES, OF_THE_KIT, PrivateName
from conformance.torch_versions.tested import NEWEST, OLDEST, release
from tests.versions import RESULTS, cell, is_cut_off
from tests.versions_subset import GROUPS, OF_A_SECTION, RULES, mutants, torchs_own

Result = Mapping[str, Any]
_NOT_RUN = "not run"
# Subjects in tests/peers.py, by the names of torch's that they stand for.
_NAMES = {
    "torch_bf16": "bf16_compress_hook",
    "torch_fp16_wrapped": "fp16_compress_wrapper(allreduce_hook)",
}
# What the rows do not show. The date and the newer rules are those of the results on file: change
# them when rows are made anew (``git log tests/torch_versions/results``).
_LEFT_OUT = (
    "References and torch's own subjects are not judged by rules whose runs take long "
    "(sections 20 and 22 to 25, and a part of sections 13",
    "to 19), nor by section 21, which needs CUDA. The rows are of 2026-11-26. No row was "
    "judged by the MUST rules of the subset that are newer:",
    "11.8, 13.16 to 13.18, 14.28, 15.41 to 15.43, 16.38 to 16.40, 17.36 to 17.38, 18.33, "
    "18.34, 18.36, 19.36 and 19.39. Other rules have",
    "become stricter since. So `checkpoint_wrapper` holds below on torch 2.13 to 2.15, "
    "although 19.36 refuses it on 2.13:",
    "[the matrix](matrix.md) judges torch's own subjects on 2.13 by all rules but those of CUDA. "
    "15.7 no longer applies to optimizers whose",
    "`step()` takes no closure: below it refuses `PostLocalSGDOptimizer` still.",
)
# Faults of torch's own subjects that are known there, by the rule that sees them.
_ISSUES = {"2.8": "pytorch#158753", "19.15": "pytorch#184018"}


def results_on_file() -> list[Result]:
    """Return the results of all versions, the oldest first."""
    results = [json.loads(file.read_text()) for file in RESULTS.glob("*.json")]
    return sorted(results, key=lambda result: (release(result["torch"]), result["python"]))


def page(results: Sequence[Result] | None = None) -> str:
    """Return the page.

    Args:
        results: of all versions, the oldest first; those on file by default.
    """
    results = results_on_file() if results is None else results
    lines = [
        "# Versions of torch",
        "",
        "Written by `python -m tests.versions --page` from the results of `python -m "
        "tests.versions`, which judges a subset on two ranks on a CPU.",
        "Versions and subjects that have not been run so are marked as not run. `tox -e torch2.6 "
        "-- --small` makes a row.",
        "",
        *_LEFT_OUT,
        "",
        *_overview(results),
        "",
        "## torch's own subjects",
        "",
        "A cell names the MUST rules that refuse the subject on this version, of those whose runs "
        "do not take long.",
        "",
        *_by_version(results, "torch's own"),
        *_refusals(results),
        "",
        "## References",
        "",
        *_by_version(results, "references"),
        "",
        "## Mutants",
        "",
        *_mutants(results),
        "",
        "## Faults that take a rule",
        "",
        "| torch | rules | fault | issue |",
        "|---|---|---|---|",
    ]
    for fault in FAULTS:
        until = f"through {fault.until[0]}.{fault.until[1]}"
        rules = ", ".join(fault.rules)
        lines.append(f"| {until} | {rules} | {fault.summary} | {fault.issue} |")
    lines += [
        "",
        "## Private names",
        "",
        "| name | use | since | in its place |",
        "|---|---|---|---|",
    ]
    lines += [_name(one) for one in (*OF_THE_KIT, *OF_REFERENCES)]
    return "\n".join([*lines, ""])


def _overview(results: Sequence[Result]) -> list[str]:
    """Return a table with a row for each version, in order, whether it has been run or not."""
    rows: list[tuple[tuple[int, int], str]] = []
    for result in results:
        cells = [_count(result, group) for group in GROUPS]
        mark = "\\*" if result["small"] else ""
        row = f"| {result['torch']}{mark} | {result['python']} | {' | '.join(cells)} |"
        rows.append((release(result["torch"]), row))
    ran = {version for version, _ in rows}
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        if (2, minor) not in ran:
            rows.append(((2, minor), f"| 2.{minor} | | {' | '.join([_NOT_RUN] * len(GROUPS))} |"))
    lines = [
        "| torch | Python | references | torch's own | mutants |",
        "|---|---|---|---|---|",
        *(row for _, row in sorted(rows, key=lambda entry: entry[0])),
    ]
    if any(result["small"] for result in results):
        lines += [
            "",
            f"\\* The small subset (`--small`): {len(torchs_own(small=True))} of "
            f"{len(torchs_own())} of torch's own subjects, and {len(mutants(small=True))} mutants, "
            f"{OF_A_SECTION} of a section at most, those with the fewest scenarios, and 1 of a "
            "section in which all runs take long. Newer ones joined the subset after the row was "
            "made.",
        ]
    return lines


def _count(result: Result, group: str) -> str:
    entries = result.get(group, {})
    planned = result["planned"].get(group)
    if planned is None:
        return _NOT_RUN
    if group == "mutants":
        found = sum(bool(entry.get("refused by")) for entry in entries.values())
        other = sum(
            bool(entry.get("refused by")) and not entry["as elsewhere"]
            for entry in entries.values()
        )
        text = f"{found} of {len(entries)} refused"
        text += f", {other} by other rules" if other else ""
    else:
        found = sum(cell(entry).startswith("holds") for entry in entries.values())
        text = f"{found} of {len(entries)} hold"
    if is_cut_off(result, group):
        text += f"; cut off after {len(entries)} of {planned}"
    elif newer := len(_newer_mutants(result, group)):
        text += f"; {newer} newer ones not run"
    return text


def _newer_mutants(result: Result, group: str) -> set[str]:
    """Return the mutants that joined the subset after a version was judged."""
    if group != "mutants":
        return set()
    subset = {str(one.case) for one in mutants(small=group in result["small"])}
    return subset - set(result[group])


def _by_version(results: Iterable[Result], group: str) -> list[str]:
    """Return a table with a row for each subject of a group and a column for each version."""
    columns = [result for result in results if result["planned"].get(group)]
    names = {name: None for result in columns for name in result.get(group, {})}
    lines = [
        "| subject |" + "".join(f" {_column(result)} |" for result in columns),
        "|---|" + "---|" * len(columns),
    ]
    for name in names:
        cells = [_short(result.get(group, {}).get(name)) for result in columns]
        lines.append(f"| `{_subject(name)}` | {' | '.join(cells)} |")
    return lines if columns else [f"{_NOT_RUN.capitalize()}."]


def _column(result: Result) -> str:
    version: str = result["torch"].partition("+")[0]
    python = ".".join(result["python"].split(".")[:2])
    return version if python == "3.11" else f"{version} (Python {python})"


def _subject(name: str) -> str:
    short = name.partition("-torch.")[0].rpartition(":")[2]
    return _NAMES.get(short, short)


def _short(entry: Result | None) -> str:
    return cell(entry).removeprefix("refused by ") if entry is not None else _NOT_RUN


def _refusals(results: Iterable[Result]) -> list[str]:
    """Return a table of the rules that refuse one of torch's own subjects on some version."""
    versions: dict[tuple[str, str], list[str]] = {}
    actual = {}
    for result in results:
        for name, entry in result.get("torch's own", {}).items():
            for number, text in entry.get("refused by", {}).items():
                versions.setdefault((name, number), []).append(_column(result))
                actual[name, number] = text.partition("\n")[0].replace("|", "\\|")
    if not versions:
        return []
    return [
        "",
        "What was seen, on the newest of the versions:",
        "",
        "| subject | rule | torch | seen | issue |",
        "|---|---|---|---|---|",
        *(
            f"| `{_subject(name)}` | {number} {RULES[number].title} | {', '.join(on)} "
            f"| {actual[name, number]} | {_ISSUES.get(number, '')} |"
            for (name, number), on in versions.items()
        ),
    ]


def _mutants(results: Sequence[Result]) -> list[str]:
    """Return a table of the mutants that some version does not refuse by the rules on file."""
    if not any(result.get("mutants") for result in results):
        return [f"{_NOT_RUN.capitalize()}."]
    lines = [
        f"| `{name}` | {_column(result)} | {_short(entry)} |"
        for result in results
        for name, entry in result.get("mutants", {}).items()
        if not entry["as elsewhere"]
    ]
    if not lines:
        return ["Every mutant that was judged is refused by the rules that its entry names."]
    return [
        "All others are refused by the rules that their entries in [tests/mutants]"
        "(../tests/mutants) name.",
        "",
        "| mutant | torch | refused by |",
        "|---|---|---|",
        *lines,
    ]


def _name(one: PrivateName) -> str:
    where = f" (hooks_ref: {', '.join(one.modules)})" if one.modules else ""
    since = "depends on the build" if one.of_builds else one.since
    return f"| `{one.name}` | {one.use}{where} | {since} | {one.instead} |"

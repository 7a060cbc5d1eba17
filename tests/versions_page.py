"""docs/torch-versions.md, made of the results that ``tests/versions.py`` has written."""

import json
from typing import Any

from conformance.torch_versions.faults import FAULTS
from conformance.torch_versions.names import OF_REFERENCES, OF_THE_KIT, PrivateName
from conformance.torch_versions.tested import NEWEST, OLDEST, release
from tests.versions import GROUPS, RESULTS, cell


def page() -> str:
    """Return the page."""
    results = sorted(
        (json.loads(file.read_text()) for file in RESULTS.glob("*.json")),
        key=lambda result: (release(result["torch"]), result["python"]),
    )
    lines = [
        "# Versions of torch",
        "",
        "Written by `python -m tests.versions --page` from the results of `python -m "
        "tests.versions`, which judges a subset on two ranks.",
        "Versions and subjects that have not been run so are marked as not run.",
        "",
        "| torch | Python | references | torch's own | mutants |",
        "|---|---|---|---|---|",
    ]
    ran = {release(result["torch"]): result for result in results}
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        if (2, minor) not in ran:
            lines.append(f"| 2.{minor} | | not run | not run | not run |")
    for result in results:
        cells = [_count(result, group) for group in GROUPS]
        lines.append(f"| {result['torch']} | {result['python']} | {' | '.join(cells)} |")
    lines += ["", "## Subjects", "", "| torch | subject | verdict |", "|---|---|---|"]
    for result in results:
        for group in GROUPS:
            for name, entry in result.get(group, {}).items():
                lines.append(f"| {result['torch']} | `{name}` | {cell(entry)} |")
    lines += ["", "## Faults that take a rule", "", "| torch | rules | fault | issue |"]
    lines.append("|---|---|---|---|")
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


def _count(result: dict[str, Any], group: str) -> str:
    entries = result.get(group, {}).values()
    if not entries:
        return "not run"
    if group == "mutants":
        refused = sum(bool(entry.get("refused by")) for entry in entries)
        return f"{refused} of {len(entries)} refused"
    hold = sum(cell(entry).startswith("holds") for entry in entries)
    return f"{hold} of {len(entries)} hold"


def _name(one: PrivateName) -> str:
    where = f" (hooks_ref: {', '.join(one.modules)})" if one.modules else ""
    since = "depends on the build" if one.of_builds else one.since
    return f"| `{one.name}` | {one.use}{where} | {since} | {one.instead} |"

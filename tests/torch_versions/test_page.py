"""docs/torch-versions.md is made of the results on file."""

from typing import Any

import expecttest

from tests.versions import PAGE
from tests.versions_page import page
from tests.versions_subset import mutants


def test_the_page_is_as_published() -> None:
    """EXPECTTEST_ACCEPT=1 writes it."""
    if expecttest.ACCEPT:
        PAGE.write_text(page())
    assert PAGE.read_text() == page()


def test_a_run_that_was_cut_off_does_not_look_complete() -> None:
    result = made_result(**{"torch's own": {"torch.x:a_hook": made_entry()}})
    result["planned"] = {"references": 8, "torch's own": 12}
    text = page([result])
    assert (
        "| 2.6.0 | 3.11.7 | 0 of 0 hold; cut off after 0 of 8 "
        "| 1 of 1 hold; cut off after 1 of 12 | not run |" in text
    )
    result["planned"] = {"torch's own": 1}
    assert "| 2.6.0 | 3.11.7 | not run | 1 of 1 hold | not run |" in page([result])


def test_rows_of_the_small_subset_are_marked() -> None:
    result = made_result(references={"hooks_ref:a": made_entry()})
    assert "\\*" not in page([result])
    text = page([result | {"small": ["references"]}])
    assert "| 2.6.0\\* | 3.11.7 | 1 of 1 hold |" in text
    assert "\\* The small subset" in text


def test_each_version_has_a_column_of_torchs_own_subjects() -> None:
    name = "torch.x:a_hook-torch.x:State,rank=1"
    older = made_result(**{"torch's own": {name: made_entry("1.8", "2.2")}})
    newer = made_result(**{"torch's own": {name: made_entry(limits=("2.8",))}})
    newer |= {"torch": "2.10.0+cpu", "python": "3.12.1"}
    text = page([older, newer])
    assert "| subject | 2.6.0 | 2.10.0 (Python 3.12) |" in text
    assert "| `a_hook` | 1.8, 2.2 | holds, without 2.8 |" in text
    assert "| `a_hook` | 1.8 " in text
    assert text.count("| 2.6.0 | a reason |") == 2
    assert "| a reason | pytorch#184018 |" in page(
        [made_result(**{"torch's own": {name: made_entry("19.15")}})]
    )


def test_mutants_that_other_rules_refuse_are_listed() -> None:
    as_elsewhere = made_entry("2.1") | {"as elsewhere": True}
    other = made_entry("2.2") | {"as elsewhere": False}
    missed = made_entry() | {"as elsewhere": False}
    text = page([made_result(mutants={"m:a": as_elsewhere, "m:b": other, "m:c": missed})])
    assert "2 of 3 refused, 1 by other rules; " in text
    assert "| `m:a` |" not in text
    assert "| `m:b` | 2.6.0 | 2.2 |" in text
    assert "| `m:c` | 2.6.0 | holds |" in text


def test_a_row_tells_how_many_mutants_joined_the_subset_later() -> None:
    subset = {str(one.case): made_entry("2.1") | {"as elsewhere": True} for one in mutants(True)}
    earlier = dict(list(subset.items())[2:])
    whole = page([made_result(mutants=subset) | {"small": ["mutants"]}])
    assert f"| {len(subset)} of {len(subset)} refused |" in whole
    later = page([made_result(mutants=earlier) | {"small": ["mutants"]}])
    assert f"| {len(earlier)} of {len(earlier)} refused; 2 newer ones not run |" in later


def made_entry(*refused_by: str, limits: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "refused by": dict.fromkeys(refused_by, "a reason"),
        "kit errors": {},
        "not applicable for torch": dict.fromkeys(limits, "a reason"),
        "passed": 1,
    }


def made_result(**groups: Any) -> dict[str, Any]:
    """Return results of torch 2.6.0, all that were planned."""
    return {
        "torch": "2.6.0",
        "python": "3.11.7",
        "planned": {group: len(entries) for group, entries in groups.items()},
        "small": [],
        **groups,
    }

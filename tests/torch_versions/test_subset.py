"""The subset that is judged with each version of torch, and its results while they come."""

import json
from collections import Counter
from pathlib import Path

import torch

from conformance.judging.rule import MUST
from conformance.subjects.kinds import KINDS
from tests.cases import COSTLY_SECTIONS
from tests.versions import begun, is_cut_off
from tests.versions_subset import OF_A_SECTION, RULES, WORLDS, mutants, references, torchs_own


def test_the_small_subset_has_mutants_of_all_sections() -> None:
    small = mutants(small=True)
    sections = Counter(RULES[one.breaks[0]].section for one in small)
    of_devices = {rule.section for rule in RULES.values() if rule.device}
    every = {rule.section for rule in RULES.values()}
    assert set(sections) == every - of_devices
    assert max(sections.values()) == OF_A_SECTION
    assert {sections[section] for section in COSTLY_SECTIONS} == {1}
    assert len({str(one.case) for one in small}) == len(small) >= 40
    # A rule that is a SHOULD refuses no subject.
    assert {RULES[number].level for one in small for number in one.breaks} == {MUST}


def test_the_small_subset_has_a_subject_of_each_kind() -> None:
    assert {case.kind for case in references()} == set(KINDS)
    # torch has no sync strategy.
    assert {case.kind for case in torchs_own(small=True)} == set(KINDS) - {"strategy"}
    names = {str(case) for case in torchs_own()}
    assert {str(case) for case in torchs_own(small=True)} < names


def test_the_file_has_the_number_of_planned_results_from_the_beginning(tmp_path: Path) -> None:
    file = tmp_path / "2.6.0.json"
    begun(file, {"references": ["a", "b"], "mutants": ["m"]}, small=True)
    found = json.loads(file.read_text())
    assert found["planned"] == {"references": 2, "mutants": 1}
    assert found["small"] == ["references", "mutants"]
    assert found["torch"] == torch.__version__
    assert found["world sizes"] == list(WORLDS)
    assert is_cut_off(found, "references")
    assert not is_cut_off(found, "torch's own")


def test_a_later_run_keeps_the_other_groups(tmp_path: Path) -> None:
    file = tmp_path / "2.6.0.json"
    found = begun(file, {"references": ["a"], "mutants": ["m"]}, small=True)
    found |= {"references": {"a": {}}, "mutants": {"m": {}}}
    found["seconds"] = {"references": 30, "mutants": 240}
    file.write_text(json.dumps(found))
    found = begun(file, {"mutants": ["m", "n"]}, small=False)
    assert found["references"] == {"a": {}}
    assert found["mutants"] == {}
    assert found["small"] == ["references"]
    assert found["seconds"] == {"references": 30}
    assert not is_cut_off(found, "references")
    assert is_cut_off(found, "mutants")


def test_a_run_that_was_cut_off_is_resumed(tmp_path: Path) -> None:
    """Subjects that have left the subset, or could not be judged, are not kept."""
    file = tmp_path / "2.6.0.json"
    found = begun(file, {"mutants": ["left", "broken", "judged"]}, small=True)
    judged = {"refused by": {"2.1": "a reason"}}
    found["mutants"] = {"left": judged, "broken": {"error": "a reason"}, "judged": judged}
    found["seconds"] = {"mutants": 240}
    file.write_text(json.dumps(found))
    found = begun(file, {"mutants": ["new", "broken", "judged"]}, small=True, resume=True)
    assert found["mutants"] == {"judged": judged}
    assert found["planned"] == {"mutants": 3}
    assert found["seconds"] == {"mutants": 240}
    assert is_cut_off(found, "mutants")

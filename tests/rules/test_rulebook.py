"""The rule book is consistent: rules, scenarios, golden list, page and mutants fit together."""

import importlib
import re
from pathlib import Path

import expecttest
import pytest
from markdown_it import MarkdownIt

import conformance
from conformance.judging.rule import MUST, SECTIONS, SHOULD, Rule, golden_list
from conformance.judging.rule import rule as enter_rule
from conformance.rules import book
from conformance.scenarios.hook import ALL, BY_NAME
from conformance.session.options import Options
from conformance.subjects.claims import claims_table
from conformance.subjects.kinds import KINDS
from tests.rules.rulebook_page import INTRODUCTION, ordered_sections, page

SCENARIOS = tuple(scenario for kind in KINDS.values() for scenario in kind.scenarios)
PAGE = Path(conformance.__file__).parent / "RULES.md"


def test_numbers_belong_to_sections_without_gaps(rules: dict[str, Rule]) -> None:
    assert {rule.section for rule in rules.values()} == set(SECTIONS)
    for section in SECTIONS:
        places = [rule.order[1] for rule in rules.values() if rule.section == section]
        assert places == list(range(1, len(places) + 1))


def test_every_rule_has_its_texts(rules: dict[str, Rule]) -> None:
    for rule in rules.values():
        assert rule.level in (MUST, SHOULD), rule.number
        assert rule.requirement.endswith("."), rule.number
        assert rule.title, rule.number
        assert rule.remedy, rule.number
        assert rule.source, rule.number
        assert re.fullmatch(r"\d+\.\d+", rule.since), rule.number


def test_the_files_of_a_section_hold_its_rules_and_no_others(rules: dict[str, Rule]) -> None:
    """pytest collects the rules among the names of a file."""
    for section in SECTIONS:
        held: list[str] = []
        for path in (PAGE.parent / "rules").glob(f"section_{section}_*.py"):
            module = importlib.import_module(f"conformance.rules.{path.stem}")
            held += [value.number for value in vars(module).values() if isinstance(value, Rule)]
        assert len(held) == len(set(held)), "two files of a section hold one rule"
        assert set(held) == {rule.number for rule in rules.values() if rule.section == section}


def test_every_rule_reads_a_scenario_and_every_scenario_is_read(rules: dict[str, Rule]) -> None:
    read = {scenario.name for rule in rules.values() for scenario in rule.on}
    assert all(rule.on for rule in rules.values())
    assert read == {scenario.name for scenario in SCENARIOS}
    assert {scenario.name for scenario in ALL} == set(BY_NAME)
    assert len(SCENARIOS) == len(read), "two scenarios have one name"


def test_a_rule_reads_scenarios_of_its_kind(rules: dict[str, Rule]) -> None:
    for rule in rules.values():
        assert {scenario.kind for scenario in rule.on} == {rule.kind}, rule.number
        assert all(rules[needed].kind == rule.kind for needed in rule.needs), rule.number


def test_every_kind_has_a_section_and_an_option() -> None:
    assert sorted(section for kind in KINDS.values() for section in kind.sections) == sorted(
        SECTIONS
    )
    assert all(hasattr(Options(), name) for name in KINDS)


def test_every_scenario_has_an_owner(rules: dict[str, Rule]) -> None:
    """A failed run must fail a rule."""
    owned = {scenario.name for rule in rules.values() for scenario in rule.owns}
    without_owner = {scenario.name for scenario in SCENARIOS} - owned
    assert without_owner == {"at_scale"}, "which has no real ranks"
    for rule in rules.values():
        assert set(rule.owns) <= set(rule.on), rule.number


def test_needs_have_no_circle(rules: dict[str, Rule]) -> None:
    def depth(number: str, seen: tuple[str, ...] = ()) -> int:
        assert number not in seen, seen
        needs = (depth(needed, (*seen, number)) for needed in rules[number].needs)
        return 1 + max(needs, default=0)

    assert max(map(depth, rules)) < 10


def test_must_rules_certify_the_machine(rules: dict[str, Rule]) -> None:
    for kind in KINDS:
        of_kind = [rule for rule in rules.values() if rule.kind == kind]
        certifying = [rule for rule in of_kind if rule.certifies_machine]
        assert certifying
        assert all(rule.level == MUST for rule in certifying)


def test_the_golden_list_is_the_must_rules(rules: dict[str, Rule]) -> None:
    """A rule enters or leaves the list by a change of golden.txt, which a reviewer reads."""
    for kind in KINDS:
        for device in ("cpu", "cuda", "xpu"):
            must = [number for number, one in book(kind, device).items() if one.level == MUST]
            assert golden_list(kind, device) == must
    assert {rule.device for rule in rules.values()} == {"", "cuda"}


def test_the_page_is_as_the_rules_say(rules: dict[str, Rule]) -> None:
    """conformance/RULES.md is written from the rules and the mutants by EXPECTTEST_ACCEPT=1."""
    text = page(rules)
    if expecttest.ACCEPT:
        PAGE.write_text(text)
    assert text == PAGE.read_text()


def test_the_page_has_the_claims_of_every_kind(rules: dict[str, Rule]) -> None:
    text = page(rules)
    for name, kind in KINDS.items():
        assert f"### Claims of {kind.with_article}\n\n{claims_table(name)}" in text


def test_the_page_has_the_sections_of_hooks_together() -> None:
    hooks, others = (*range(1, 14), *range(20, 26)), range(14, 20)
    assert ordered_sections() == [str(section) for section in (*hooks, *others)]


def test_the_page_describes_each_scenario_once(rules: dict[str, Rule]) -> None:
    text = page(rules)
    for scenario in SCENARIOS:
        rows = re.findall(rf'^\| <a name="{scenario.name}"></a>.*', text, re.MULTILINE)
        assert len(rows) == 1, scenario.name
    names = re.findall(r'<a name="([^"]+)"', text)
    assert len(names) == len(set(names)) == len(rules) + len(SCENARIOS)


def test_the_page_counts_mutants_as_their_list_has_them(rules: dict[str, Rule]) -> None:
    """The row of a rule in docs/mutants.md names as many mutants as the page counts."""
    listed = (PAGE.parent.parent / "docs" / "mutants.md").read_text()
    rows = re.findall(r'^\| <a name="([\d.]+)"></a>.* \| (.*) \|$', listed, re.MULTILINE)
    by_rule = {number: str(mutants.count("`, `") + 1) for number, mutants in rows}
    counted = re.findall(r"Mutants: \[(\d+)\]\(\.\./docs/mutants\.md#([\d.]+)\)", page(rules))
    assert by_rule == {number: count for count, number in counted}
    assert set(by_rule) == set(rules)


def test_markdown_marks_nothing_in_the_rules_by_mistake(rules: dict[str, Rule]) -> None:
    """Only the level of a rule is bold, and the words that the introduction explains."""
    html = MarkdownIt("commonmark").enable("table").render(page(rules))
    words = re.findall(r"^- \*\*(.+?)\*\*:", INTRODUCTION, re.MULTILINE)
    bold = set(re.findall("<strong>(.*?)</strong>", html))
    assert bold == {MUST, SHOULD, *words}
    assert "<em>" not in html


def test_the_list_of_upstream_tests_names_rules_and_their_scenarios(rules: dict[str, Rule]) -> None:
    """UPSTREAM.md names rules of the book, each followed by a scenario that it reads."""
    lines = (PAGE.parent / "UPSTREAM.md").read_text().splitlines()
    rows = [line.split("|")[2] for line in lines if line.startswith("| ")]
    numbers = {number for row in rows for number in re.findall(r"\b\d+\.\d+\b", row)}
    assert numbers <= set(rules)
    assert {rules[number].kind for number in numbers} == {*KINDS}
    for row in rows:
        for number, scenario in re.findall(r"(\d+\.\d+) `(\w+)`", row):
            assert scenario in {read.name for read in rules[number].on}, row


def test_a_number_cannot_be_used_twice(rules: dict[str, Rule]) -> None:
    enter = enter_rule("2.1", "again", on=(), remedy="", source="")
    with pytest.raises(ValueError, match=r"rule 2\.1 is in the book twice"):
        enter(lambda run, claims, found: None)

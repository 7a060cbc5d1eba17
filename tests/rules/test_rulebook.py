"""The rule book is consistent: rules, scenarios, golden list, page and mutants fit together."""

import importlib
import re
from pathlib import Path

import expecttest
import pytest

import conformance
from conformance.judging.rule import MUST, SECTIONS, SHOULD, Rule, golden_list
from conformance.judging.rule import rule as enter_rule
from conformance.rules import book
from conformance.scenarios.hook import ALL, BY_NAME
from conformance.session.options import Options
from conformance.subjects.claims import claims_table
from conformance.subjects.kinds import KINDS
from tests.mutants import catalogue

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


INTRODUCTION = """# The rule book

The requirements that a subject must meet to be certified. This page is written by
`tests/rules/test_rulebook.py` from `conformance/rules`, `conformance/subjects/kinds` and
`tests/mutants`; change it there.

- A **MUST** rule decides the certificate; a SHOULD is reported beside it. The MUST rules are in
  `golden.txt`.
- A rule is judged on records, by a process that never imports the subject. Records that are missing
  never pass.
- A rule that builds on another is judged only if that rule holds: one defect, one failure.
- A failure counts against the subject only if the reference of its kind (for hooks, the allreduce)
  passes the same rule on the same machine.
- Section 21 is judged on CUDA devices alone, and only a certificate for such a profile needs its
  rules.
- Sections 1 to 13 and 20 to 25 apply to hooks. Each of the sections 14 to 19 applies to one other
  kind of subject, and no other section does.
- A claim changes which result is right. Another rule holds the subject to the claim: 2.10 for most,
  2.7 for `world_only`.
- If a claim is lossy, no single result is right or wrong. Runs are longer then, and the rules on
  results judge all their steps together, by the rule of section 13 for that claim: also for shapes,
  dtypes, buckets, groups and world sizes. `judging/oracles/lossy/__init__.py` has the requirements,
  and derives their bounds.

## Words

- **scenario**: what the ranks of a run do: a model, its gradients, the number of steps, options of
  DDP. `values@2` is the scenario `values` on two ranks.
- **drawn**: chosen at random from the session's seed, which the certificate names; `--seed` makes
  the same choices again.
- **crafted gradients**: values whose mean is exact in every order of additions, so that a right
  result has the same bits.
- **reference**: the subject of `hooks_ref` that a rule or a run is compared with.
- **lossy claim**: `compressed`, `unbiased` or `local`: a single result is not the mean, and all
  steps are judged together.
- **shadowed step**: a step in which a rank that has run out of inputs issues the collectives of
  those that train.
- **simulated ranks**: many ranks in one process, whose collectives are computed there (section 20).
- **holds**: a MUST rule that passed, or that does not apply for the reason given.
- **not applicable**: the claims, the profile or the subject's kind leave nothing to judge; a
  certificate lists why, and calls it a limit.
- **not run**: the rule had no chance to fail: no certificate.
- **advice**: a SHOULD rule that fails; it does not change the verdict.
- **kit error**: the kit or the machine is at fault: the reference fails as well, or the rule itself
  does.
- **development run**: a run of chosen rules or world sizes: no certificate.
- **golden list**: the MUST rules that a certificate needs, in `golden.txt`.

## Claims

Each entry is an example of a claim as it is typed. Claims combine with commas. `-` stands for
claims that only select runs.

{claims}
## Untested here

Requirements that are part of the book although nothing judges them yet:

- a port that a hook opens and leaves open (9.6): Gloo opens ports of its own, and they cannot be
  told apart from outside;
- on other devices than CUDA's: their generators, streams and memory (section 21 for them);
- on NCCL and backends built on it, that a peer's failure surfaces (12.2, 12.3): a future is
  complete once its collective is enqueued, and the backend's watchdog ends the process, whatever
  the hook does;
- on the same backends, that a collective's failure surfaces from other kinds than hooks (14.22,
  15.30, 15.31, 16.30, 18.26, 18.27): the rank that raises leaves its peers, which would wait on the
  device;
- a subject that sets out to forge its records: it runs in the process that writes them. The kit
  defends against accidents and patched functions, not against an attacker with the same user id.
"""


def claims_of_every_kind() -> str:
    """Return a section for each kind, with the table of its claims."""
    sections = []
    for name, kind in KINDS.items():
        sections.append(f"### Claims of {kind.with_article}\n\n{claims_table(name)}")
    return "\n".join(sections)


def page(rules: dict[str, Rule]) -> str:
    """Return the page of the rule book."""
    mutants: dict[str, list[str]] = {}
    for module, mutant in catalogue():
        name = f"`{module.rpartition('.')[2]}:{mutant.name}`"
        mutants.setdefault(mutant.breaks[0], []).append(name)
    parts = [INTRODUCTION.replace("{claims}", claims_of_every_kind())]
    for section, title in SECTIONS.items():
        parts.append(f"## {section} {title}\n")
        for rule in rules.values():
            if rule.section == section:
                parts += _paragraphs(rule, mutants.get(rule.number, ["none"]))
    return "\n".join(parts)


def _paragraphs(rule: Rule, mutants: list[str]) -> list[str]:
    scenarios = "; ".join(f"`{scenario.name}` ({scenario.summary})" for scenario in rule.on)
    if rule.watches:
        scenarios = "every scenario of this kind that a claim selects"
    parts = [
        f'### <a name="{rule.number}"></a>{rule.number} {rule.title}\n',
        f"**{rule.level}**, since {rule.since}. {rule.requirement}\n",
    ]
    if rule.intent:
        parts.append(f"Intent: {rule.intent}\n")
    parts.append(f"- Source: {rule.source}")
    parts.append(f"- Judged on: {scenarios}; {rule.worlds.value} that the scenario is meant for")
    if rule.needs:
        parts.append(f"- Builds on: {', '.join(rule.needs)}")
    parts.append(f"- If this fails, look at: {rule.remedy}")
    parts.append(f"- Mutants: {', '.join(mutants)}\n")
    return parts

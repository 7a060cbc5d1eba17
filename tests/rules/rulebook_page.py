"""conformance/RULES.md, made of the rules, their scenarios, the claims and the mutants."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from conformance.judging.rule import SECTIONS, SHOULD, Rule, WorldSizes
from conformance.scenarios.model import Scenario
from conformance.subjects.claims import claims_table
from conformance.subjects.kinds import HOOK, KINDS, kind_of
from tests.mutants import catalogue

INTRODUCTION = """# The rule book

The requirements that a subject must meet to be certified. This page is written by
`tests/rules/rulebook_page.py` from `conformance/rules`, `conformance/scenarios`,
`conformance/subjects/kinds` and `tests/mutants`; change it there.

- [Sections](#sections)
- [How rules decide](#how-rules-decide)
- [Words](#words)
- [Claims](#claims) of each kind of subject
- [Untested here](#untested-here)
- The rules: [hooks](#{first_of_hooks}), and [other kinds](#{first_of_others})
- [Scenarios](#scenarios): what the runs do that rules are judged on

## Sections

A section applies to one kind of subject, and to no other. Hooks come first, so that their sections
20 to 25 stand before 14 to 19.

{sections}
## How rules decide

- A **MUST** rule decides the certificate; a SHOULD is reported beside it. The MUST rules are in
  `golden.txt`.
- A rule is judged on records, by a process that never imports the subject. Records that are missing
  never pass.
- A rule that builds on another is judged only if that rule holds: one defect, one failure.
- A failure counts against the subject only if the reference of its kind (for hooks, the allreduce)
  passes the same rule on the same machine.
- Section 21 is judged on CUDA devices alone, and only a certificate for such a profile needs its
  rules.
- A claim changes which result is right. Another rule holds the subject to the claim: 2.10 for most,
  2.7 for `world_only`.
- If a claim is lossy, no single result is right or wrong. Runs are longer then, and the rules on
  results judge all their steps together, by the rule of section 13 for that claim: also for shapes,
  dtypes, buckets, groups and world sizes. `judging/oracles/lossy/__init__.py` has the requirements,
  and derives their bounds.

The text of a rule begins with its requirement. The paragraphs after it have the reason, or the
cases that are judged. Then come the source of the requirement, the scenarios that the rule is
judged on, the rules that it builds on, likely places of the mistake, and the number of mutants that
the rule refuses.

## Words

- **scenario**: what the ranks of a run do: a model, its gradients, the number of steps, options of
  DDP. `values@2` is the scenario `values` on two ranks. [Scenarios](#scenarios) describes each.
- **drawn**: chosen at random from the session's seed, which the certificate names; `--seed` makes
  the same choices again.
- **crafted gradients**: values whose mean is exact in every order of additions, so that a right
  result has the same bits.
- **margin**: the largest error in the runs of a rule, as a fraction of the error that is allowed:
  the rule fails if it is above 1. A rule that allows no error, or has no bound, may have no margin.
- **mutant**: a subject with one deliberate defect, which the kit's own tests judge: it shows that
  the rule can fail. `docs/mutants.md` in the sources lists them by rule.
- **since 1.6**: the version of the rule book that introduced the rule. These versions are those of
  the book alone: the kit has another version.
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
- **golden list**: the MUST rules that a certificate needs, in `golden.txt`. A certificate names the
  list's digest, which changes with the list.

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

SCENARIOS = """## Scenarios

The numbers of ranks are those at which rules are judged on the scenario, unless the rule names
fewer. "All" stands for every world size of the profile, usually 1 to 4. If a profile has none of
the numbers, the scenario runs at its smallest world size above 1. Claims may change a scenario.
"""

_OF_SCENARIO = re.compile(r"`(\w+)`")
_CODE = re.compile(r"(`+[^`]*`+)")
_POWER = re.compile(r"(?<=\d)\*\*(?=[\d-])")
_DUNDER = re.compile(r"\b__\w+?__\b")


def ordered_sections() -> list[str]:
    """Return the sections of hooks, and then those of the other kinds, in the page's order."""
    return sorted(SECTIONS, key=lambda section: (kind_of(section) != HOOK, int(section)))


def page(rules: Mapping[str, Rule]) -> str:
    """Return the page of the rule book."""
    refused = mutants_by_rule()
    parts = [_introduction(rules)]
    for section in ordered_sections():
        parts.append(f"## {_heading(section)}\n")
        for rule in rules.values():
            if rule.section == section:
                parts += _paragraphs_of_rule(rule, refused[rule.number])
    parts.append(SCENARIOS)
    for kind in KINDS.values():
        parts.append(f"### Scenarios of {kind.with_article}\n")
        parts.append(_scenarios_table(kind.scenarios))
    return "\n".join(parts)


def mutants_by_rule() -> Counter[str]:
    """Return the number of mutants that each rule refuses, as docs/mutants.md lists them."""
    return Counter(number for _, mutant in catalogue() for number in mutant.breaks)


def _introduction(rules: Mapping[str, Rule]) -> str:
    others = [section for section in ordered_sections() if kind_of(section) != HOOK]
    replaced = {
        "{first_of_hooks}": _anchor(ordered_sections()[0]),
        "{first_of_others}": _anchor(others[0]),
        "{sections}": _sections_table(rules),
        "{claims}": _claims_of_every_kind(),
    }
    text = INTRODUCTION
    for name, value in replaced.items():
        text = text.replace(name, value)
    return text


def _heading(section: str) -> str:
    return f"{section} {SECTIONS[section]}"


def _anchor(section: str) -> str:
    """Return the anchor that GitHub gives the heading of a section."""
    return re.sub(r"[^\w -]", "", _heading(section).lower()).replace(" ", "-")


def _sections_table(rules: Mapping[str, Rule]) -> str:
    lines = ["| section | subject | kind | rules | of these SHOULD |", "|---|---|---|---|---|"]
    for section in ordered_sections():
        levels = [rule.level for rule in rules.values() if rule.section == section]
        cells = (
            section,
            f"[{SECTIONS[section]}](#{_anchor(section)})",
            kind_of(section),
            str(len(levels)),
            str(levels.count(SHOULD)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _claims_of_every_kind() -> str:
    """Return a section for each kind, with the table of its claims."""
    sections = []
    for name, kind in KINDS.items():
        sections.append(f"### Claims of {kind.with_article}\n\n{claims_table(name)}")
    return "\n".join(sections)


def _paragraphs_of_rule(rule: Rule, refused: int) -> list[str]:
    scenarios = ", ".join(f"[`{scenario.name}`](#{scenario.name})" for scenario in rule.on)
    if rule.watches:
        scenarios = "every scenario of this kind that a claim selects"
    if rule.worlds is not WorldSizes.ALL:
        scenarios += f"; {rule.worlds.value}"
    parts = [
        f'### <a name="{rule.number}"></a>{rule.number} {rule.title}\n',
        f"**{rule.level}**, since {rule.since}. {_as_markdown(rule.requirement)}\n",
        *(f"{_as_markdown(paragraph)}\n" for paragraph in rule.reasons),
        f"- Source: {_as_markdown(rule.source)}",
        f"- Judged on: {scenarios}",
    ]
    if rule.needs:
        needed = ", ".join(f"[{number}](#{number})" for number in rule.needs)
        parts.append(f"- Builds on: {needed}")
    parts.append(f"- If this fails, look at: {_as_markdown(rule.remedy)}")
    parts.append(f"- Mutants: [{refused}](../docs/mutants.md#{rule.number})\n")
    return parts


def _scenarios_table(scenarios: Iterable[Scenario]) -> str:
    scenarios = tuple(scenarios)
    names = {scenario.name for scenario in scenarios}

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[`{name}`](#{name})" if name in names else match[0]

    lines = ["| scenario | ranks | description |", "|---|---|---|"]
    for scenario in scenarios:
        name = f'<a name="{scenario.name}"></a>`{scenario.name}`'
        description = _OF_SCENARIO.sub(link, _as_markdown(scenario.summary)).replace("|", r"\|")
        lines.append(f"| {name} | {_ranks(scenario)} | {description} |")
    return "\n".join(lines) + "\n"


def _ranks(scenario: Scenario) -> str:
    """Return the number of ranks of a scenario, or its numbers, as ``Scenario.fits`` has them."""
    if scenario.simulated:
        return "simulated"
    if scenario.own_size:
        return str(scenario.own_size)
    return ", ".join(map(str, scenario.world_sizes)) or "all"


def _as_markdown(text: str) -> str:
    """Return a text in which Markdown finds nothing bold: 2**24 and __init__ stand in code, or as
    2^24 and `__init__`.
    """
    parts = _CODE.split(text)
    parts[::2] = [_DUNDER.sub(r"`\g<0>`", _POWER.sub("^", part)) for part in parts[::2]]
    # A path that a docstring breaks after a slash.
    parts[1::2] = [part.replace("``", "`").replace("/ ", "/") for part in parts[1::2]]
    return "".join(parts)

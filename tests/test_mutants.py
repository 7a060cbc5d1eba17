"""Every rule can fail: each mutant is refused by the rules that it names, with a reason, and by no
other MUST rule.

``pytest tests/test_mutants.py -k rule-2.2-`` runs those that break rule 2.2.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import expecttest
import pytest

from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Failure, Verdict
from conformance.rules import book
from tests.cases import Case, Judgements, is_costly, own_judge
from tests.mutants import Mutant, catalogue

BOOK = book()
CATALOGUE = catalogue()
PAGE = Path(__file__).resolve().parent.parent / "docs" / "mutants.md"
SAID = Path(__file__).resolve().parent / "mutants_said.json"


def case(module: str, mutant: Mutant) -> Case:
    """Judged by the rules that it breaks; by the whole book with --thorough."""
    hangs = mutant.hangs or module.endswith("process")
    return Case(
        f"{module}:{mutant.name}",
        mutant.claims,
        mutant.state,
        mutant.setup,
        mutant.worlds,
        hangs,
        mutant.breaks,
        mutant.kind,
        # Rules that watch every run would otherwise need all runs of the book, as soon as a rule
        # builds on them. Of mutants that break such a rule it is not known which run shows it.
        partly=not any(BOOK[number].watches for number in mutant.breaks),
    )


EVERY = {case(module, mutant): mutant for module, mutant in CATALOGUE}
# those of a device are judged by test_cuda.py
CASES = {case: mutant for case, mutant in EVERY.items() if not mutant.device}


def rarely_judged() -> set[Case]:
    """Return the mutants that are judged with --thorough alone.

    Every run judges the first mutant of each rule. Of rules whose runs take long, it judges the
    first mutant of each section.
    """
    often: dict[str, Case] = {}
    for case, mutant in CASES.items():
        rule = BOOK[mutant.breaks[0]]
        often.setdefault(rule.section if is_costly(rule) else rule.number, case)
    return set(CASES) - set(often.values())


RARELY = rarely_judged()
SECTIONS = list(dict.fromkeys(module for module, _ in CATALOGUE))


def rules_and_name(case: Case) -> str:
    """Return a test id in which ``-k rule-2.2-`` finds the mutants that break rule 2.2, and no
    others.
    """
    return "".join(f"rule-{number}-" for number in CASES[case].breaks) + str(case)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.rarely] * (case in RARELY)) for case in CASES],
    ids=rules_and_name,
)
def test_is_refused(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    """A mutant is refused by the rules that it names, with the reason on file, and by no other MUST
    rule.
    """
    wrong = differences(case, judgements_of(case), rules)
    if wrong and case.hangs:
        # The deadline of mutants that hang is short. On a busy machine it may pass before the ranks
        # are where they hang, or have failed in another way.
        wrong = differences(case, own_judge().judge(replace(case, hangs=False)), rules)
    assert wrong == {}


def differences(case: Case, judgements: Judgements, rules: dict[str, Rule]) -> dict[str, object]:
    """Return the differences between the judgements on a mutant and the expected ones."""
    mutant = CASES[case]
    errors = [
        judgement.reason
        for judgement in judgements.values()
        if judgement.verdict is Verdict.KIT_ERROR
    ]
    failed = [
        number for number, judgement in judgements.items() if judgement.verdict is Verdict.FAIL
    ]
    missed = {number: judgements[number].reason for number in mutant.breaks if number not in failed}
    expected = {*mutant.breaks, *mutant.because}
    unexpected = {
        number: judgements[number].reason
        for number in failed
        if rules[number].level == MUST and number not in expected
    }
    wrong: dict[str, object] = {
        "kit errors": errors,
        "not refused by": missed,
        "refused by others": unexpected,
    }
    if not any(wrong.values()):
        wrong = {
            "reason": unlike_on_file(
                case, mutant.breaks[0], judgements[mutant.breaks[0]].failures[0]
            )
        }
    return {name: value for name, value in wrong.items() if value}


# If several ranks fail, chance decides which of them is first, and so whether the first failure is
# the defect or an error of Gloo's that follows from it. Such lines are not compared.
RACES = re.compile(r"gloo|SIGABRT|Connection|Timed out|timed out")

# Of a run that hangs, the kit reports where the ranks are at the deadline, or how the collectives
# differ that they have issued by then. On a busy machine ranks may not have come as far. So of a
# mutant that hangs, any such line is as good as another; test_pool.py has the lines themselves.
HANGS = re.compile("did not return|was never completed|did not come to its end|ranks disagree")


# The norms of all steps, which follow a cause or stand alone.
NORMS = re.compile(r"(^| \[)norm of result / norm of mean.*", re.DOTALL)


def unlike_on_file(case: Case, rule: str, first: Failure) -> dict[str, str]:
    """Compare a failure with the line on file for this mutant; EXPECTTEST_ACCEPT=1 stores the line.

    The stored line is null if ranks race to fail first. Return both lines if they differ.
    """
    races = RACES.search(first.actual) is not None
    line = f"{rule} {normal(NORMS.sub('', first.cause) or first.actual)}"
    said = json.loads(SAID.read_text()) if SAID.exists() else {}
    if expecttest.ACCEPT:
        said[str(case)] = None if races else line
        SAID.write_text(json.dumps(dict(sorted(said.items())), indent=1, ensure_ascii=False) + "\n")
    if str(case) not in said:
        return {"line": line, "on file": "no line; EXPECTTEST_ACCEPT=1 writes it"}
    on_file = said[str(case)]
    if races or on_file is None or line == on_file:
        return {}
    if case.hangs and HANGS.search(on_file) and HANGS.search(line):
        return {}
    return {"line": line, "on file": on_file}


def test_each_mutant_has_a_line_on_file() -> None:
    """A mutant that a run rarely judges would miss its line long after it was written."""
    assert set(json.loads(SAID.read_text())) == {str(case) for case in CASES}


WIDTH = 120
_NUMBER = r"[-+]?\d+(?:\.\d+)*(?:e[-+]?\d+)?"
# Values that a run does not determine become "?", or are cut off. The order matters.
_VARIES = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        # The deadline decides how far each rank has come if it hangs.
        (r"(did not return|was never completed|did not come to its end): .*", r"\1"),
        # All ranks that failed are listed; how many had failed by then depends on the clock.
        (r"; rank [\d?].*", ""),
        # With unseeded draws, hashes or addresses, so does the place of the first difference.
        (r"differ at step .*", "differ"),
        # Addresses, network endpoints, paths, and the line of a path. A file name in quotes stays.
        (r"0x[0-9a-f]+", "?"),
        (r"\[[0-9a-f.:]+\]:\d+|\[?127\.0\.0\.1\]?:\d+|\blocalhost:\d+", "?"),
        (r'"/[^"]*/', '"'),
        (r"""(?<![^\s"'(=])/[^\s,;:)"']*(?::\d+)?""", "?"),
        # All numbers, except in names such as float16. A value, a count or an index depends on the
        # order in which ranks and parameters come wherever a mutant does, and mutants do so by
        # design.
        (rf"(?<![\w.]){_NUMBER}(?!\w)", "?"),
        # Digests of environment variables.
        (r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b", "?"),
        # For the same reason: the parameter that is the first to differ, and how many are listed.
        (r"\bp\d+\b", "p?"),
        (r"(p?\?)(?:(?:, | and |,? )\1(?![\w?]))+", r"\1"),
        (r"\(\?,\)", "(?)"),
    )
]


def normal(text: str) -> str:
    """Return ``text`` without values that differ from run to run, cut to ``WIDTH`` columns between
    words.
    """
    for pattern, plain in _VARIES:
        text = pattern.sub(plain, text)
    text = " ".join(text.split())
    return text if len(text) <= WIDTH else text[: WIDTH + 1].rpartition(" ")[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step 1, p3: 1.53199995 instead of 1.27999997", "step 1, p4: -1e-07 instead of 1"),
        (
            "index (0, 2); 30 of 94 elements are wrong",
            ("index (11,); 102 of 3136 elements are wrong"),
        ),
        ("right in all buckets but 1", "right in all buckets but 1, 2, 3"),
        ("grads of p0, p1 and p12 changed", "grads of p2 changed"),
        ("was /root/a b, is /", "was /tmp/x b, is /home"),
        ("left /dev/shm/a, /tmp/b /tmp/c", "left /dev/shm/d"),
        ('at "/work/kit/process.py", line 12 in spins', 'at "/usr/process.py", line 7 in spins'),
        (
            ("waits in /work/kit/contract.py:12: future.wait()"),
            "waits in /contract.py:3: future.wait()",
        ),
        ("<object at 0x7f00>, KEY=f6fc20493fba3776", "<object at 0xabcdef>, KEY=1bf41ef6fd6f6f6c"),
        (
            "two runs on rank 1 differ at step 3, p0",
            ("two runs on rank 0 differ at step 0, bucket 1"),
        ),
        ("the hook did not return: rank 0 inside call 1", "the hook did not return: rank 1"),
        ("rank 0 died; rank 1 died", "rank 1 died"),
        ("connects to [::1]:2345, 127.0.0.1:80", "connects to localhost:81"),
        ("a" * 30 + " 1.25" * 40, "a" * 30 + " 1" * 50),
        ("word " * 30 + "1.53", "word " * 30 + "12"),
    ],
)
def test_what_varies_is_not_compared(one: str, other: str) -> None:
    assert normal(one) == normal(other)
    assert normal(normal(one)) == normal(one)


@pytest.mark.parametrize(
    ("text", "compared"),
    [
        ("rank 1: float16, int64 on cpu", "rank ?: float16, int64 on cpu"),
        ("schedule_1 of schedule_1@2", "schedule_1 of schedule_1@?"),
        ("numel % world_size elements", "numel % world_size elements"),
        ("torch.allclose (now from tests.mutants)", "torch.allclose (now from tests.mutants)"),
    ],
)
def test_names_and_words_are_compared(text: str, compared: str) -> None:
    assert normal(text) == compared


def test_what_is_on_file_is_normal() -> None:
    """A line on file is a rule and a text that ``normal`` leaves as it is."""
    lines = [line for line in json.loads(SAID.read_text()).values() if line is not None]
    assert [
        line for line in lines if normal(line.partition(" ")[2]) != line.partition(" ")[2]
    ] == []


def test_every_rule_has_a_mutant(rules: dict[str, Rule]) -> None:
    """SHOULD rules too; those that no mutant fails alone have mutants that give the reason why
    others fail too.
    """
    assert set(rules) - {mutant.breaks[0] for _, mutant in CATALOGUE} == set()


def test_a_second_rule_needs_a_reason() -> None:
    for module, mutant in CATALOGUE:
        assert set(mutant.breaks[1:]) <= set(mutant.because), f"{module}:{mutant.name}"


def test_nothing_is_on_file_for_mutants_that_are_gone() -> None:
    assert set(json.loads(SAID.read_text())) <= set(map(str, CASES))


def test_the_matrix_is_as_published(rules: dict[str, Rule]) -> None:
    """docs/mutants.md: mutants by the rules that refuse them, as test_is_refused and test_cuda.py
    find. EXPECTTEST_ACCEPT=1 writes it.
    """
    page = matrix(rules)
    if expecttest.ACCEPT:
        PAGE.write_text(page)
    assert page == PAGE.read_text()


def matrix(rules: dict[str, Rule]) -> str:
    by_rule: dict[str, list[str]] = defaultdict(list)
    for case, mutant in EVERY.items():
        for number in mutant.breaks:
            by_rule[number].append(str(case))
    lines = [
        "# Mutants by rules",
        "",
        f"{len(EVERY)} broken subjects, and the rules that refuse each. Written by "
        "`tests/test_mutants.py`, which judges them all but",
        "`streams`, for which `tests/test_cuda.py` needs a GPU; they are in "
        "[tests/mutants](../tests/mutants). No mutant fails a MUST",
        "rule that is not in its row of the second table.",
        "",
        "| rule | | refuses |",
        "|---|---|---|",
        *(
            (f"| {number} | {rule.title} | {', '.join(f'`{name}`' for name in by_rule[number])} |")
            for number, rule in rules.items()
        ),
        "",
        "| mutant | fails | others that fail, or may, and why |",
        "|---|---|---|",
        *(
            (f"| `{case}` | {mutant.breaks[0]} | {others(mutant)} |")
            for case, mutant in EVERY.items()
        ),
        "",
    ]
    return "\n".join(lines)


def others(mutant: Mutant) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for number, reason in mutant.because.items():
        by_reason[reason].append(number)
    return "; ".join(f"{', '.join(numbers)}: {reason}" for reason, numbers in by_reason.items())

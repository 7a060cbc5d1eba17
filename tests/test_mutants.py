"""Every rule can fail: each mutant is refused by the rules that it names, with a reason, and by no
other MUST rule.

``pytest tests/test_mutants.py -k rule-2.2-`` runs those that break rule 2.2.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import expecttest
import pytest

from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Failure, Verdict
from conformance.rules import book
from tests import failures_on_file
from tests.cases import LONG_RULES, Case, Judgements, is_costly, own_judge
from tests.failures_on_file import normal
from tests.mutants import Mutant, catalogue

BOOK = book()
CATALOGUE = catalogue()
PAGE = Path(__file__).resolve().parent.parent / "docs" / "mutants.md"


def case(module: str, mutant: Mutant) -> Case:
    """Judged by the rules that it breaks; by the whole book with --thorough."""
    hangs = mutant.hangs or module.endswith("process")
    # Of mutants that break a rule that watches every run it is not known which run shows it.
    is_seen_anywhere = any(BOOK[number].watches for number in mutant.breaks)
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
        # builds on them.
        partly=not is_seen_anywhere,
        short_rules=() if is_seen_anywhere else mutant.breaks,
    )


EVERY = {case(module, mutant): mutant for module, mutant in CATALOGUE}
# those of a device are judged by test_cuda.py
CASES = {case: mutant for case, mutant in EVERY.items() if not mutant.device}


def rarely_judged() -> set[Case]:
    """Return the mutants that are judged with --every or --thorough alone.

    Every run judges the first mutant of each rule. Of costly rules, it judges the first mutant of
    the first such rule in each section; of other rules whose runs take long, that of each kind.
    """
    places = {number: place for place, number in enumerate(BOOK)}
    often: dict[str, Case] = {}
    for case in sorted(CASES, key=lambda case: places[CASES[case].breaks[0]]):
        rule = BOOK[CASES[case].breaks[0]]
        group = rule.number
        if is_costly(rule):
            group = rule.section
        elif rule.number in LONG_RULES:
            group = rule.kind
        often.setdefault(group, case)
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


def unlike_on_file(case: Case, rule: str, first: Failure) -> dict[str, failures_on_file.Entry]:
    """Compare a failure with the one on file for this mutant; return both if they differ.

    EXPECTTEST_ACCEPT=1 stores the failure.
    """
    on_file = failures_on_file.entries()
    if expecttest.ACCEPT:
        on_file[str(case)] = failures_on_file.entry(rule, first)
        failures_on_file.store(on_file)
    if str(case) not in on_file:
        return {"on file": "nothing; EXPECTTEST_ACCEPT=1 writes it"}
    return failures_on_file.unlike(rule, first, on_file[str(case)], case.hangs)


def test_a_failure_of_each_mutant_is_on_file() -> None:
    """A mutant that a run rarely judges would miss its failure long after it was written."""
    assert set(failures_on_file.entries()) == {str(case) for case in CASES}


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
    """Texts on file are as ``normal`` leaves them; a line is a rule and such a text."""
    texts = []
    for entry in failures_on_file.entries().values():
        if isinstance(entry, str):
            texts.append(entry.partition(" ")[2])
        elif entry is not None:
            texts += [entry[name] for name in ("expected", "actual", "cause")]
    assert [text for text in texts if normal(text) != text] == []


def test_whole_failures_are_on_file() -> None:
    """Of a mutant that every run judges, each sentence is compared."""
    on_file = failures_on_file.entries()
    often = [str(case) for case in CASES if case not in RARELY]
    assert [name for name in often if isinstance(on_file.get(name), str)] == []


FAILURE = Failure("the mean 1.5", "0.25 on rank 1", "divided twice [norm of result / norm of mean]")
WHOLE = {
    "rule": "2.1",
    "expected": "the mean ?",
    "actual": "? on rank ?",
    # A slash by itself is a path.
    "cause": "divided twice [norm of result ? norm of mean]",
}


@pytest.mark.parametrize("on_file", [WHOLE, "2.1 divided twice", None])
def test_a_failure_is_compared_in_the_form_on_file(on_file: failures_on_file.Entry) -> None:
    assert failures_on_file.unlike("2.1", FAILURE, on_file, hangs=False) == {}


@pytest.mark.parametrize("name", WHOLE)
def test_each_text_of_a_whole_failure_is_compared(name: str) -> None:
    on_file = WHOLE | {name: "other"}
    wrong = failures_on_file.unlike("2.1", FAILURE, on_file, hangs=False)
    assert wrong == {"found": WHOLE, "on file": on_file}


def test_a_short_line_is_compared() -> None:
    wrong = failures_on_file.unlike("2.1", FAILURE, "2.1 not divided", hangs=False)
    assert wrong == {"found": "2.1 divided twice", "on file": "2.1 not divided"}


def test_ranks_that_race_to_fail_are_not_compared() -> None:
    race = Failure("a run that comes to its end", "rank 0 died (signal SIGABRT)")
    assert failures_on_file.entry("2.1", race) is None
    assert failures_on_file.unlike("2.1", race, WHOLE, hangs=False) == {}


def test_the_places_of_a_hang_are_not_compared() -> None:
    hang = Failure("a run that comes to its end", "a rank did not come to its end: rank 0 in step")
    on_file = "2.1 ranks disagree in collective ?"
    assert failures_on_file.unlike("2.1", hang, on_file, hangs=True) == {}
    assert failures_on_file.unlike("2.1", hang, on_file, hangs=False) != {}


def test_every_rule_has_a_mutant(rules: dict[str, Rule]) -> None:
    """SHOULD rules too; those that no mutant fails alone have mutants that give the reason why
    others fail too.
    """
    assert set(rules) - {mutant.breaks[0] for _, mutant in CATALOGUE} == set()


def test_a_second_rule_needs_a_reason() -> None:
    for module, mutant in CATALOGUE:
        assert set(mutant.breaks[1:]) <= set(mutant.because), f"{module}:{mutant.name}"


def test_nothing_is_on_file_for_mutants_that_are_gone() -> None:
    assert set(failures_on_file.entries()) <= set(map(str, CASES))


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
            f'| <a name="{number}"></a>{number} | {rule.title} | {names(by_rule[number])} |'
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


def names(mutants: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in mutants)


def others(mutant: Mutant) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for number, reason in mutant.because.items():
        by_reason[reason].append(number)
    return "; ".join(f"{', '.join(numbers)}: {reason}" for reason, numbers in by_reason.items())

"""Every rule can fail: each mutant is refused by the rules that it names, with a reason, and by no other MUST rule."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import expecttest
import pytest

from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Failure, Verdict
from tests.cases import Case, Judgements
from tests.mutants import Mutant, catalogue

CATALOGUE = catalogue()
PAGE = Path(__file__).resolve().parent.parent / "docs" / "mutants.md"
SAID = Path(__file__).resolve().parent / "mutants_said.json"


def case(module: str, mutant: Mutant) -> Case:
    """Judged by the rules that it breaks; by the whole book with --thorough."""
    hangs = mutant.hangs or module.endswith("process")
    return Case(f"{module}:{mutant.name}", mutant.claims, mutant.state, mutant.setup, mutant.worlds, hangs, mutant.breaks, mutant.kind)


EVERY = {case(module, mutant): mutant for module, mutant in CATALOGUE}
CASES = {case: mutant for case, mutant in EVERY.items() if not mutant.device}  # those of a device are judged by test_cuda.py
SECTIONS = list(dict.fromkeys(module for module, _ in CATALOGUE))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_refused(judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case) -> None:
    """Refused by the rules that it names, with the reason that is on file, and by no other MUST rule."""
    judgements, mutant = judgements_of(case), CASES[case]
    assert [j.reason for j in judgements.values() if j.verdict is Verdict.KIT_ERROR] == []
    failed = [number for number, judgement in judgements.items() if judgement.verdict is Verdict.FAIL]
    assert set(mutant.breaks) <= set(failed), {number: judgements[number].reason for number in mutant.breaks}
    unexpected = {n: judgements[n].reason for n in failed if rules[n].level == MUST and n not in {*mutant.breaks, *mutant.because}}
    assert unexpected == {}
    expect_said(case, mutant.breaks[0], judgements[mutant.breaks[0]].failures[0])


# One rank's Gloo thread notices what another did: which of them speaks first is not determined.
RACES = re.compile(r"gloo|SIGABRT|Connection|Timed out|timed out")

DISAGREE = "ranks disagree"


def expect_said(case: Case, rule: str, first: Failure) -> None:
    """Compare with the line on file for this mutant. EXPECTTEST_ACCEPT=1 puts it there: null where ranks race to speak first.

    What explains a hang is not waited for as long as it takes on a machine that is busy: it may be missing.
    """
    races = RACES.search(first.actual) is not None
    line = f"{rule} {message(first)}"
    said = json.loads(SAID.read_text()) if SAID.exists() else {}
    if expecttest.ACCEPT:
        said[str(case)] = None if races else line
        SAID.write_text(json.dumps(dict(sorted(said.items())), indent=1, ensure_ascii=False) + "\n")
    on_file = said[str(case)]
    if races or on_file is None or (case.hangs and DISAGREE in on_file and not first.cause):
        return
    assert line == on_file


def message(failure: Failure) -> str:
    """The likely cause, or else what was seen; without what differs from run to run."""
    text = failure.cause.partition(" [norm")[0] or failure.actual
    for pattern, plain in (
        (r"differ at step .*", "differ"),
        (r"was /\S+,", "was ...,"),
        (r"0x[0-9a-f]+", "0x..."),
        (r'"/[^"]*/', '"'),
        (r"/\S+\.py:\d+: ", "..., "),
        (r"/tmp/\S+|/dev/shm/\S+", "..."),
        (r"\[[0-9.:]+\]:\d+|\[?127\.0\.0\.1\]?:\d+", "peer"),
        (r"line \d+", "line ?"),
        (r"rank \d", "rank ?"),
        (r"(ranks \d and \d)", "two ranks"),
        (r"\d{5,}", "..."),
        (r"; rank \?.*", ""),
        (r"-?\d+\.\d+(e[-+]\d+)?( and -?\d+\.\d+(e[-+]\d+)?)?", "x"),
    ):
        text = re.sub(pattern, plain, text)
    return " ".join(text.split())[:150]


def test_every_rule_has_a_mutant(rules: dict[str, Rule]) -> None:
    """SHOULD rules too; those that no mutant fails alone have their mutants say why others fail beside them."""
    assert set(rules) - {mutant.breaks[0] for _, mutant in CATALOGUE} == set()


def test_a_second_rule_needs_a_reason() -> None:
    for module, mutant in CATALOGUE:
        assert set(mutant.breaks[1:]) <= set(mutant.because), f"{module}:{mutant.name}"


def test_nothing_is_on_file_for_mutants_that_are_gone() -> None:
    assert set(json.loads(SAID.read_text())) <= set(map(str, CASES))


def test_the_matrix_is_as_published(rules: dict[str, Rule]) -> None:
    """docs/mutants.md: mutants by the rules that refuse them, as test_is_refused and test_cuda.py find. EXPECTTEST_ACCEPT=1 writes it."""
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
        f"{len(EVERY)} broken subjects, and the rules that refuse each. Written by `tests/test_mutants.py`, which judges them all but",
        "`streams`, for which `tests/test_cuda.py` needs a GPU; they are in [tests/mutants](../tests/mutants). No mutant fails a MUST",
        "rule that is not in its row of the second table.",
        "",
        "| rule | | refuses |",
        "|---|---|---|",
        *(f"| {number} | {rule.title} | {', '.join(f'`{name}`' for name in by_rule[number])} |" for number, rule in rules.items()),
        "",
        "| mutant | fails | others that fail, or may, and why |",
        "|---|---|---|",
        *(f"| `{case}` | {mutant.breaks[0]} | {others(mutant)} |" for case, mutant in EVERY.items()),
        "",
    ]
    return "\n".join(lines)


def others(mutant: Mutant) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for number, reason in mutant.because.items():
        by_reason[reason].append(number)
    return "; ".join(f"{', '.join(numbers)}: {reason}" for reason, numbers in by_reason.items())

"""Every sentence of a failure is compared with a text on file, or with one in a test.

``tests/sentences.py`` finds the sentences in the sources of rules and oracles, and the texts.
"""

from pathlib import Path

import pytest

from tests import failures_on_file, sentences
from tests.sentences import PLACE, Template

# Folders of the tests that compare messages.
COMPARING = ("judging", "rules", "session", "hosts", "ranks")

# Sentences that are part of no failure, by the place of a module.
NO_FAILURES = {
    "conformance/judging/oracles/coverage.py": "entries of the certificate on lines that ran",
    "conformance/judging/oracles/error_curves.py": "pictures of the report",
    "conformance/judging/rule.py": "titles of sections and world sizes in the rule book",
    "conformance/judging/verdict.py": "ends of reasons of other verdicts",
    "conformance/rules/section_21_cuda.py": "no test of every run has a GPU",
}
# Parts of texts that the code looks for, and names of records and settings.
NO_SENTENCES = {
    "broken pipe",
    "connection closed",
    "connection refused",
    "connection reset",
    "finders of imports",
    "in new_group",
    "not simulated",
    "root logger",
    "timed out waiting",
    "wait timeout",
}


def shown_texts() -> set[str]:
    """Return the texts of failures on file, and those that tests compare with."""
    texts: set[str] = set()
    for entry in failures_on_file.entries().values():
        if isinstance(entry, dict):
            texts |= {entry["expected"], entry["actual"], entry["cause"]}
        elif entry is not None:
            texts.add(entry.partition(" ")[2])
    for folder in COMPARING:
        for path in (sentences.ROOT / "tests" / folder).rglob("test_*.py"):
            if path.name != "test_sentences.py":
                texts.update(sentences.compared_texts(path))
    return texts


def test_every_sentence_of_a_failure_is_compared() -> None:
    texts = shown_texts()
    missing = [
        str(template)
        for template in sentences.templates()
        if not template.is_reason
        and template.path not in NO_FAILURES
        and template.text not in NO_SENTENCES
        and not template.is_shown_by(texts)
    ]
    assert missing == []


# Reasons of other verdicts and notes that no test shows yet. The list may only get shorter: show a
# new reason by a test (tests/rules/test_more_reasons.py), and take the shown ones away.
REASONS_LEFT = Path(__file__).parent / "reasons_left.txt"
MOST_REASONS_LEFT = 20


def test_every_reason_is_compared_or_on_the_list() -> None:
    texts = shown_texts()
    missing = [
        template.text.replace(PLACE, "{}")
        for template in sentences.templates()
        if template.is_reason
        and template.path not in NO_FAILURES
        and template.text not in NO_SENTENCES
        and not template.is_shown_by(texts)
    ]
    assert sorted(missing) == REASONS_LEFT.read_text(encoding="utf-8").splitlines()
    assert len(missing) <= MOST_REASONS_LEFT


def test_the_exceptions_are_there() -> None:
    """An exception for a sentence that is gone would hide another one."""
    found = sentences.templates()
    assert set(NO_FAILURES) <= {template.path for template in found}
    assert {template.text for template in found} >= NO_SENTENCES


@pytest.mark.parametrize(
    ("text", "shown", "is_shown"),
    [
        (f"{PLACE} bytes in {PLACE} steps", "64 bytes in 3 steps", True),
        (f"{PLACE} bytes in {PLACE} steps", "64 bytes, then in 3 steps", False),
        (f"rank {PLACE}: {PLACE} differs", "rank ?: p? differs, and more", True),
        (f"rank {PLACE}: {PLACE} differs", "differs: rank ?: p?", False),
        ("the same bits", "the same bit", False),
    ],
)
def test_all_constant_parts_have_to_come_in_their_order(
    text: str, shown: str, is_shown: bool
) -> None:
    assert Template("", 1, text).is_shown_by([shown]) is is_shown


SOURCE = '''
"""A docstring is no sentence."""

CAUSES = {"no sentence": "a cause in a table"}


@rule("1.1", "a title is none", source="a source is none")
def check(run, found):
    """Nor is this."""
    actual = f"rank {rank}: {', '.join(names)} are wrong"
    if "a word that is compared" in actual:
        found.does_not_apply("a reason is marked")
    found.require(False, "the right" f" names, {count}", actual + " in the end", CAUSES[actual])
    raise ValueError("an error of the kit")
'''


def test_sentences_are_found_by_their_use() -> None:
    found = sentences.of_module("source.py", SOURCE)
    assert [(template.text.replace(PLACE, "{}"), template.is_reason) for template in found] == [
        ("a cause in a table", False),
        ("rank {}: {} are wrong", False),
        ("a reason is marked", True),
        ("the right names, {}", False),
        ("{} in the end", False),
    ]

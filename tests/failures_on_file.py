"""The failures of mutants on file: ``mutants_said.json`` has the first failure of each mutant.

Of mutants that every run of the suite judges, the file has the whole failure: rule, expected,
actual and cause. Others may have a line, the rule and the cause or the actual value, from the time
before whole failures were kept. The entry is null if chance decides which rank fails first. Values
that differ from run to run are left out of all texts.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from conformance.judging.verdict import Failure

FILE = Path(__file__).resolve().parent / "mutants_said.json"

# A whole failure, a short line, or null.
Entry = dict[str, str] | str | None

# If several ranks fail, chance decides which of them is first, and so whether the first failure is
# the defect or an error of Gloo's that follows from it. Such failures are not compared.
RACES = re.compile(r"gloo|SIGABRT|Connection|Timed out|timed out")

# Of a run that hangs, the kit reports where the ranks are at the deadline, or how the collectives
# differ that they have issued by then. On a busy machine ranks may not have come as far. So of a
# mutant that hangs, any such failure is as good as another; test_pool.py has the texts themselves.
HANGS = re.compile("did not return|was never completed|did not come to its end|ranks disagree")

# The norms of all steps, which follow a cause or stand alone.
_NORMS = re.compile(r"(^| \[)norm of result / norm of mean.*", re.DOTALL)


def entries() -> dict[str, Entry]:
    """Return what is on file, by the name of the mutant's case."""
    on_file: dict[str, Entry] = json.loads(FILE.read_text())
    return on_file


def store(entries: Mapping[str, Entry]) -> None:
    """Write the file."""
    FILE.write_text(json.dumps(dict(sorted(entries.items())), indent=1, ensure_ascii=False) + "\n")


def entry(rule: str, first: Failure) -> Entry:
    """Return the entry of a mutant with this first failure."""
    if RACES.search(first.actual):
        return None
    texts = {"expected": first.expected, "actual": first.actual, "cause": first.cause}
    return {"rule": rule, **{name: normal(text) for name, text in texts.items()}}


def unlike(rule: str, first: Failure, on_file: Entry, hangs: bool) -> dict[str, Entry]:
    """Return a failure and the entry on file if they differ; nothing if they do not.

    Args:
        rule: the number of the rule that fails.
        first: its first failure.
        on_file: the entry.
        hangs: the mutant hangs, so that its texts depend on the deadline.
    """
    found = entry(rule, first)
    if isinstance(on_file, str) and found is not None:
        found = _line(rule, first)
    if found is None or on_file is None or found == on_file:
        return {}
    if hangs and HANGS.search(str(found)) and HANGS.search(str(on_file)):
        return {}
    return {"found": found, "on file": on_file}


def _line(rule: str, first: Failure) -> str:
    """Return a failure in the short form."""
    return f"{rule} {cut(normal(_NORMS.sub('', first.cause) or first.actual))}"


WIDTH = 120
_NUMBER = r"[-+]?\d+(?:\.\d+)*(?:e[-+]?\d+)?"
# What a run does not determine is cut off, or becomes "?". The order matters.
_CUTS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        # The deadline decides how far each rank has come if it hangs.
        (r"(did not return|was never completed|did not come to its end): .*", r"\1"),
        # All ranks that failed are listed; how many had failed by then depends on the clock.
        (r"; rank [\d?].*", ""),
        # With unseeded draws, hashes or addresses, so does the place of the first difference.
        (r"differ at step .*", "differ"),
    )
]
_VALUES = [
    (re.compile(pattern), plain)
    for pattern, plain in (
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
    """Return ``text`` without parts that differ from run to run."""
    for pattern, plain in _CUTS:
        text = pattern.sub(plain, text)
    return without_values(text)


def without_values(text: str) -> str:
    """Return ``text`` with "?" for numbers, paths and addresses, and one blank between words."""
    for pattern, plain in _VALUES:
        text = pattern.sub(plain, text)
    return " ".join(text.split())


def cut(text: str) -> str:
    """Return ``text`` cut to ``WIDTH`` columns between words."""
    return text if len(text) <= WIDTH else text[: WIDTH + 1].rpartition(" ")[0]

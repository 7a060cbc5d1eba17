"""Count the habits that make the text and the code of this repository hard to read.

Text is read in four media: ``prose`` (docstrings and comments), ``messages`` (other string
literals of at least four words: errors, rule titles, remedies, help), ``markdown`` (files) and
``commits`` (subjects since ``--base``). Words in backticks, in double quotes, in fenced code and
in links are not read, but they count as words. The habits, each a rate per 1000 words:

``headless``
    A clause that stands in place of a noun: "what", "who", "whoever", "whatever". Not counted:
    questions, "what is what", "what" and "whatever" before a noun ("what dtype"), "who" after a
    person ("those who come") or a comma, "whatever" after a comma or at the start of a sentence.
``where``
    "where". Not counted: after a noun of place ("the folder where"), after "from" or "to",
    as part of a name (``torch.where``), and before a symbol ("where n is the group size").
``says``
    A form of "say", "ask", "speak" or "tell" that is not the first word of a sentence. Not
    counted: after a person ("users ask"), and "tell" with "apart".
``opening``
    The same verbs as the first word of a sentence: "Says that it averages".
``of_which``
    "of which", "of it", "of those", "of them", "of what". Not counted: "all of it", "one of them"
    and the like.

Code is counted per 1000 lines, comments and blank lines included:

``tuples``
    Assignments of several values at once, such as ``a, b = x, y``. Assignments that need the old
    values, such as ``a, b = b, a``, are not counted.
``conditionals``, ``nested``
    Conditional expressions, and those inside another one.
``long_lines``
    Lines of more than 100 columns, in percent of all lines.
``fine_strings``
    Docstrings in which an empty string stands for no error, or for none.
``where_fields``
    Assignments to an attribute called ``where``.
``comment_lines``
    Lines that hold nothing but a comment. More is better.

The limits of ``--check`` are ``LIMITS``. ``[tool.style.limits]`` in pyproject.toml replaces
them one by one, and ``[tool.style.packages."conformance/rules"]`` does so for one package.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

HABITS = ("headless", "where", "says", "opening", "of_which")
CODE = (
    "tuples",
    "conditionals",
    "nested",
    "long_lines",
    "fine_strings",
    "where_fields",
    "comment_lines",
)
MEDIA = ("prose", "messages", "markdown", "commits")
LIMITS: Mapping[str, float] = {
    "headless": 2.0,
    "where": 1.5,
    "says": 1.0,
    "opening": 1.0,
    "of_which": 1.0,
    "nested": 0.0,
    "long_lines": 0.5,
}
# A package with fewer words has no meaningful rate: one clause would break the limit.
MIN_WORDS = 500
# The tests of this script hold examples of every habit.
EXCLUDED = frozenset({"tests/test_style.py"})
MAX_COLUMNS = 100
MIN_MESSAGE_WORDS = 4

_FILLER = "§"
_FENCE = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"(`+)(?:[^`]|(?!\1)`)+\1")
_QUOTE = re.compile(r'"[^"]{1,300}"')
_LINK = re.compile(r"(?<=\])\([^)\s]*\)|https?://\S+")
_PRAGMA = re.compile(r"#\s*(?:!|type:|noqa|mypy:|ruff:|fmt:|pragma:|shellcheck)")
_LOOKS_LIKE_CODE = re.compile(r"^\s*(?:def |class |import |from \S+ import |@|\[\w)", re.MULTILINE)
_FINE_STRING = re.compile(r"(?<![\w'`])''(?!['`])")

_HEADLESS = re.compile(r"\b(?:what|who)(?:ever)?\b", re.IGNORECASE)
_WHERE = re.compile(r"(?<![.\w])where\b(?![:=(\w])", re.IGNORECASE)
_SAYS = re.compile(
    r"\b(?:says?|said|asks?|asked|speaks?|spoken|tells?|told)\b(?![:=(])", re.IGNORECASE
)
_OF_WHICH = re.compile(r"\bof\s+(?:which|it|those|them|what)\b", re.IGNORECASE)

_WHAT_IS_WHAT = re.compile(r"\bwhat(?:'s|\s+(?:is|was|are))\s+what\b", re.IGNORECASE)
# "what" before one of these nouns is a determiner. They are nouns that otherwise need an article:
# in "what rank 0 sends" the noun is the subject of the clause, and the clause counts.
_DETERMINED = re.compile(
    r"\s+(?:kinds?|sorts?|order|dtypes?|shapes?|sizes?|way|names?|number|factor|share|point"
    r"|moment|time|reason|extent|device|backend|version|type|value|state|group|step|index)\b"
    r"(?!')",
    re.IGNORECASE,
)
_PERSON = re.compile(
    r"\b(?:people|persons?|those|others|one|(?:some|any|every|no)(?:one|body)|users?|readers?"
    r"|authors?|writers?|maintainers?|contributors?|developers?|reviewers?|you|we|they|I|who)$",
    re.IGNORECASE,
)
_PLACE = re.compile(
    r"\b(?:places?|folders?|director(?:y|ies)|files?|lines?|pages?|paths?|points?|positions?"
    r"|locations?|spots?|columns?|from|to)$",
    re.IGNORECASE,
)
_SYMBOL_IS = re.compile(r"\s+(?:[A-Za-zα-ωΑ-Ω]|§+)\s+(?:is\s+(?:the|an?|one)|are\s+the|=)\b")
_QUANTIFIER = re.compile(r"\b(?:all|one|none|each|both)$", re.IGNORECASE)
_APART = re.compile(r"(?:\s+[\w'-]+){0,6}?\s+apart\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.?!](?=[\s\"')]|$)|\n\s*\n")


@dataclass(frozen=True)
class Passage:
    """A piece of text, and the place where it begins.

    Attributes:
        path: the file, relative to the root of the repository.
        line: the line of the first character of ``text``.
        medium: one of ``MEDIA``.
        text: the text, with its line breaks.
        exact: whether line breaks of ``text`` are line breaks of the file.
    """

    path: str
    line: int
    medium: str
    text: str
    exact: bool = True


@dataclass(frozen=True)
class Occurrence:
    """One use of a habit; ``medium`` is ``code`` for the habits of code."""

    path: str
    line: int
    habit: str
    medium: str
    text: str


@dataclass
class Counts:
    """Everything that is counted in some files.

    Attributes:
        words: the number of words by medium.
        lines: the number of lines of Python.
        comment_lines: the number of these that hold nothing but a comment.
        occurrences: the uses of all habits.
    """

    words: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    comment_lines: int = 0
    occurrences: list[Occurrence] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        """Add the counts of other files."""
        for medium, words in other.words.items():
            self.words[medium] = self.words.get(medium, 0) + words
        self.lines += other.lines
        self.comment_lines += other.comment_lines
        self.occurrences.extend(other.occurrences)

    def uses(self, medium: str, habit: str) -> list[Occurrence]:
        """Return the uses of a habit in a medium."""
        return [use for use in self.occurrences if (use.medium, use.habit) == (medium, habit)]

    def rate(self, medium: str, habit: str) -> float:
        """Return the rate of a habit: per 1000 words, per 1000 lines, or in percent of lines."""
        totals = {**self.words, "code": self.lines}
        total = totals.get(medium, 0)
        if total == 0:
            return 0.0
        if habit == "comment_lines":
            return 1000 * self.comment_lines / total
        count = len(self.uses(medium, habit))
        if habit == "long_lines":
            return 100 * count / total
        return 1000 * count / total


def _fill(match: re.Match[str]) -> str:
    return re.sub(r"\S", _FILLER, match[0])


def _clear(match: re.Match[str]) -> str:
    return re.sub(r"\S", " ", match[0])


def hide_quoted(text: str) -> str:
    """Replace code, quotations and links, so that every other character keeps its place."""
    text = _FENCE.sub(_clear, text)
    text = _CODE_SPAN.sub(_fill, text)
    text = _QUOTE.sub(_fill, text)
    return _LINK.sub(_fill, text)


def _before(text: str, start: int) -> str:
    return text[max(0, start - 40) : start].rstrip()


def _starts_sentence(text: str, start: int) -> bool:
    before = text[max(0, start - 40) : start]
    stripped = before.rstrip(" \t\n-*#>|([")
    if not stripped or before.endswith("\n\n"):
        return True
    return stripped[-1] in ".!?:;"


def _is_question(text: str, end: int) -> bool:
    stop = _SENTENCE_END.search(text, end)
    return stop is not None and stop[0] == "?"


def _is_headless(text: str, match: re.Match[str]) -> bool:
    word = match[0].lower()
    before = _before(text, match.start())
    if text[match.end() : match.end() + 1] in {":", "="} or _is_question(text, match.end()):
        return False
    if word.startswith("what"):
        if _DETERMINED.match(text, match.end()) or before.endswith("no matter"):
            return False
        if any(m.start() <= match.start() < m.end() for m in _WHAT_IS_WHAT.finditer(text)):
            return False
        concessive = before.endswith((",", "(")) or _starts_sentence(text, match.start())
        return word == "what" or not concessive
    if word == "who":
        return not _PERSON.search(before) and not before.endswith(",")
    return True


def _is_condition(text: str, match: re.Match[str]) -> bool:
    if _PLACE.search(_before(text, match.start())):
        return False
    return not _SYMBOL_IS.match(text, match.end())


def _is_verb_of_things(text: str, match: re.Match[str]) -> bool:
    if match[0].lower().startswith("t") and _APART.match(text, match.end()):
        return False
    return not _PERSON.search(_before(text, match.start()))


def _is_chain(text: str, match: re.Match[str]) -> bool:
    relative = match[0].lower().endswith(("which", "what"))
    return relative or not _QUANTIFIER.search(_before(text, match.start()))


def find_habits(text: str) -> Iterator[tuple[str, int]]:
    """Return every use of a habit of language in a text: its name, and its offset."""
    text = hide_quoted(text)
    tests: list[tuple[str, re.Pattern[str], Callable[[str, re.Match[str]], bool]]] = [
        ("headless", _HEADLESS, _is_headless),
        ("where", _WHERE, _is_condition),
        ("says", _SAYS, _is_verb_of_things),
        ("of_which", _OF_WHICH, _is_chain),
    ]
    for habit, pattern, counts in tests:
        for match in pattern.finditer(text):
            if not counts(text, match):
                continue
            if habit == "says" and _starts_sentence(text, match.start()):
                yield "opening", match.start()
            else:
                yield habit, match.start()


def count_passage(passage: Passage) -> Counts:
    """Count the words and the habits of a passage."""
    counts = Counts(words={passage.medium: len(hide_quoted(passage.text).split())})
    for habit, offset in find_habits(passage.text):
        line = passage.line
        if passage.exact:
            line += passage.text.count("\n", 0, offset)
        excerpt = " ".join(passage.text[max(0, offset - 50) : offset + 60].split())
        counts.occurrences.append(Occurrence(passage.path, line, habit, passage.medium, excerpt))
    return counts


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _comments(path: str, source: str) -> Iterator[Passage]:
    """Join comments on adjacent lines, so that a sentence is read as a whole."""
    lines: list[str] = []
    first = last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _PRAGMA.match(token.string):
            continue
        row = token.start[0]
        if lines and row != last + 1:
            yield Passage(path, first, "prose", "\n".join(lines))
            lines = []
        if not lines:
            first = row
        lines.append(token.string.lstrip("# "))
        last = row
    if lines:
        yield Passage(path, first, "prose", "\n".join(lines))


def _string_text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts.append(str(value.value))
        else:
            parts.append(_FILLER)
    return "".join(parts)


def _messages(path: str, tree: ast.AST) -> Iterator[Passage]:
    skipped = {id(node) for node in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(value) for value in node.values)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr) or id(node) in skipped:
            continue
        text = _string_text(node)
        if len(text.split()) >= MIN_MESSAGE_WORDS and not _LOOKS_LIKE_CODE.search(text):
            yield Passage(path, node.lineno, "messages", text, exact=False)


def read_passages(path: str, source: str) -> Iterator[Passage]:
    """Return the passages of a Python or Markdown file."""
    if path.endswith(".md"):
        yield Passage(path, 1, "markdown", source)
        return
    tree = ast.parse(source)
    for node in _docstrings(tree):
        if isinstance(node.value, str):
            yield Passage(path, node.lineno, "prose", node.value)
    yield from _comments(path, source)
    yield from _messages(path, tree)


def _is_packed(node: ast.Assign) -> bool:
    """Return whether an assignment could be written as several, one after the other."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    if len(target.elts) != len(node.value.elts):
        return False
    assigned: set[str] = set()
    for name, value in zip(target.elts, node.value.elts, strict=True):
        if assigned & {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.expr)}:
            return False
        assigned.add(ast.unparse(name))
    return True


def _sets_where(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return any(_sets_where(part) for part in target.elts)
    return isinstance(target, ast.Attribute) and target.attr == "where"


def find_packed_code(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Return every use of a habit of code in a tree: its name, and its line."""
    nested: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            inner = (part for part in ast.walk(node) if part is not node)
            nested.update(id(part) for part in inner if isinstance(part, ast.IfExp))
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            yield "conditionals", node.lineno
            if id(node) in nested:
                yield "nested", node.lineno
        elif isinstance(node, ast.Assign):
            if _is_packed(node):
                yield "tuples", node.lineno
            if any(_sets_where(target) for target in node.targets):
                yield "where_fields", node.lineno
    for docstring in _docstrings(tree):
        if isinstance(docstring.value, str) and _FINE_STRING.search(docstring.value):
            yield "fine_strings", docstring.lineno


def count_code(path: str, source: str) -> Counts:
    """Count the habits of code of a Python file."""
    lines = source.splitlines()
    found = list(find_packed_code(ast.parse(source)))
    counts = Counts(lines=len(lines))
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_COLUMNS:
            found.append(("long_lines", number))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            counts.comment_lines += 1
    for habit, number in found:
        text = lines[number - 1].strip()
        counts.occurrences.append(Occurrence(path, number, habit, "code", text))
    return counts


def count_source(path: str, source: str) -> Counts:
    """Count everything in one file."""
    counts = Counts()
    if path.endswith(".py"):
        counts.add(count_code(path, source))
    for passage in read_passages(path, source):
        counts.add(count_passage(passage))
    return counts


def package_of(path: str) -> str:
    """Return the package of a file: the folder at the top, or a package of ``conformance``."""
    parts = path.split("/")
    if len(parts) == 1:
        return "(root)"
    if parts[0] == "conformance" and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0]


def _git(root: Path, *arguments: str) -> list[str]:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def list_files(root: Path, base: str | None = None) -> list[str]:
    """Return the Python and Markdown files of a repository, or those changed since ``base``."""
    if base is None:
        names = _git(root, "ls-files", "--cached", "--others", "--exclude-standard")
    else:
        names = _git(root, "diff", "--name-only", "--relative", "--diff-filter=d", base)
        names += _git(root, "ls-files", "--others", "--exclude-standard")
    wanted = {name for name in names if name.endswith((".py", ".md"))} - EXCLUDED
    return sorted(name for name in wanted if (root / name).is_file())


def read_commits(root: Path, base: str) -> Iterator[Passage]:
    """Return the subjects of the commits since ``base``."""
    for line in _git(root, "log", "--format=%h %s", f"{base}..HEAD"):
        commit, _, subject = line.partition(" ")
        yield Passage(f"commit {commit}", 1, "commits", subject)


def count_files(root: Path, files: Iterable[str]) -> dict[str, Counts]:
    """Return the counts of files by package."""
    packages: dict[str, Counts] = {}
    for name in files:
        counts = packages.setdefault(package_of(name), Counts())
        counts.add(count_source(name, (root / name).read_text(encoding="utf-8")))
    return dict(sorted(packages.items()))


def read_limits(root: Path) -> tuple[dict[str, float], dict[str, dict[str, float]], int]:
    """Return the limits, the limits of single packages, and the least number of words."""
    settings: dict[str, Any] = {}
    project = root / "pyproject.toml"
    if project.is_file():
        settings = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {})
        settings = settings.get("style", {})
    limits = {**LIMITS, **settings.get("limits", {})}
    packages = settings.get("packages", {})
    for names in (limits, *packages.values()):
        unknown = set(names) - set(HABITS) - set(CODE)
        if unknown:
            raise SystemExit(f"pyproject.toml, tool.style: no such habit: {sorted(unknown)}")
    return limits, packages, settings.get("min_words", MIN_WORDS)


def _worst_files(uses: Iterable[Occurrence]) -> str:
    files: dict[str, int] = {}
    for use in uses:
        files[use.path] = files.get(use.path, 0) + 1
    worst = sorted(files.items(), key=lambda item: (-item[1], item[0]))[:3]
    return ", ".join(f"{path} ({count})" for path, count in worst)


def find_excesses(
    packages: Mapping[str, Counts],
    limits: Mapping[str, float],
    package_limits: Mapping[str, Mapping[str, float]],
    min_words: int = MIN_WORDS,
) -> list[str]:
    """Return one line for each habit that is above its limit in a package."""
    excesses = []
    for package, counts in packages.items():
        allowed = {**limits, **package_limits.get(package, {})}
        media = [medium for medium in MEDIA if counts.words.get(medium, 0) >= min_words]
        pairs = [(medium, habit) for medium in media for habit in HABITS]
        pairs += [("code", habit) for habit in CODE if habit != "comment_lines"]
        for medium, habit in pairs:
            rate = counts.rate(medium, habit)
            if habit in allowed and rate > allowed[habit]:
                worst = _worst_files(counts.uses(medium, habit))
                excesses.append(
                    f"{package}: {habit} in {medium}: {rate:.2f}, limit {allowed[habit]:g}; most "
                    f"in {worst}"
                )
    return excesses


def _with_total(packages: Mapping[str, Counts]) -> dict[str, Counts]:
    """Add a row for all of ``conformance``, if it has packages."""
    rows = dict(packages)
    inside = [name for name in packages if name.split("/")[0] == "conformance"]
    if len(inside) > 1:
        total = Counts()
        for name in inside:
            total.add(packages[name])
        rows["conformance (all)"] = total
        rows["conformance (top level)"] = rows.pop("conformance", Counts())
    return dict(sorted(rows.items()))


def to_markdown(packages: Mapping[str, Counts]) -> str:
    """Return a table for each medium, and one for code."""
    blocks = []
    rows = _with_total(packages)
    for medium in MEDIA:
        with_words = {name: counts for name, counts in rows.items() if counts.words.get(medium)}
        if not with_words:
            continue
        lines = [
            f"Rates per 1000 words of {medium}:",
            "",
            f"| package | words | {' | '.join(HABITS)} |",
            f"|---|{'---|' * (1 + len(HABITS))}",
        ]
        for name, counts in with_words.items():
            rates = [f"{counts.rate(medium, habit):.1f}" for habit in HABITS]
            lines.append(f"| {name} | {counts.words[medium]} | {' | '.join(rates)} |")
        blocks.append("\n".join(lines))
    lines = [
        "Rates per 1000 lines of code (long_lines: percent):",
        "",
        f"| package | lines | {' | '.join(CODE)} |",
        f"|---|{'---|' * (1 + len(CODE))}",
    ]
    for name, counts in rows.items():
        if counts.lines:
            rates = [f"{counts.rate('code', habit):.1f}" for habit in CODE]
            lines.append(f"| {name} | {counts.lines} | {' | '.join(rates)} |")
    blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def to_json(packages: Mapping[str, Counts]) -> dict[str, Any]:
    """Return the rates of ``to_markdown`` by medium, package and habit, and the totals."""
    rows = _with_total(packages)
    result: dict[str, Any] = {}
    for medium in MEDIA:
        result[medium] = {
            name: {
                "words": counts.words[medium],
                **{habit: round(counts.rate(medium, habit), 2) for habit in HABITS},
            }
            for name, counts in rows.items()
            if counts.words.get(medium)
        }
    result["code"] = {
        name: {
            "lines": counts.lines,
            **{habit: round(counts.rate("code", habit), 2) for habit in CODE},
        }
        for name, counts in rows.items()
        if counts.lines
    }
    return result


def _selects(paths: Sequence[str], name: str) -> bool:
    cleaned = [path.removeprefix("./").rstrip("/") for path in paths]
    return not paths or any(name == path or name.startswith(f"{path}/") for path in cleaned)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rates, the uses of one habit, or the packages above a limit."""
    parser = argparse.ArgumentParser(
        description="Count habits that make text and code hard to read."
    )
    parser.add_argument("paths", nargs="*", help="files and folders, relative to --root")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--base", metavar="REV", help="read only files changed since REV")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is exceeded")
    listed = [*HABITS, *(habit for habit in CODE if habit != "comment_lines")]
    parser.add_argument("--list", metavar="HABIT", choices=listed, help="print each use of HABIT")
    options = parser.parse_args(arguments)

    files = [
        name for name in list_files(options.root, options.base) if _selects(options.paths, name)
    ]
    packages = count_files(options.root, files)
    if options.base is not None and not options.paths:
        commits = Counts()
        for passage in read_commits(options.root, options.base):
            commits.add(count_passage(passage))
        packages["(commits)"] = commits

    if options.list:
        uses = [use for counts in packages.values() for use in counts.occurrences]
        for use in sorted(uses, key=lambda use: (use.path, use.line)):
            if use.habit == options.list:
                print(f"{use.path}:{use.line}: {use.text}")
        return 0
    if options.check:
        excesses = find_excesses(packages, *read_limits(options.root))
        for excess in excesses:
            print(excess)
        return 1 if excesses else 0
    if options.json:
        print(json.dumps(to_json(packages), indent=2))
    else:
        print(to_markdown(packages))
    return 0


if __name__ == "__main__":
    sys.exit(main())

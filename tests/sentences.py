"""The sentences in the code that judges, as templates, and the texts of tests that show them.

A template is a string of the source: a constant, or an f-string with places for its values. It is
shown by a text that has all of its constant parts, in their order. Two sorts of texts count: those
of failures on file, and those that an assertion of a test compares with.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.failures_on_file import without_values

ROOT = Path(__file__).resolve().parent.parent
JUDGING = ("conformance/rules", "conformance/judging")

# Stands in a template for a value that is known at run time.
PLACE = "\ue000"

# Arguments of rules that RULES.md publishes, and that test_rulebook.py compares.
_OF_THE_BOOK = {"number", "remedy", "since", "source", "summary", "title"}
_NUMBER_OF_A_RULE = re.compile(r"\d+\.\d+")
# Calls whose arguments are reasons of other verdicts than "fail".
_REASONS = {"does_not_apply", "leaves_out", "lacks_evidence", "note", "skip_if_lossy"}
# Calls whose arguments are patterns, names or parts of records.
_NO_TEXT = {
    "compile",
    "search",
    "sub",
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
    "parse_target",
}


@dataclass(frozen=True)
class Template:
    """A sentence in the source, with ``PLACE`` for each value.

    Attributes:
        path, line: its place.
        text: the sentence, without values that differ from run to run.
        is_reason: it is a reason of another verdict than "fail".
    """

    path: str
    line: int
    text: str
    is_reason: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text.replace(PLACE, '{}')}"

    @cached_property
    def parts(self) -> list[str]:
        """The constant parts, the longest of which a text is searched for first."""
        return [part for part in self.text.split(PLACE) if part]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(".*?".join(map(re.escape, self.parts)))

    def is_shown_by(self, texts: Iterable[str]) -> bool:
        longest = max(self.parts, key=len)
        return any(longest in text and self.pattern.search(text) for text in texts)


@cache
def templates() -> list[Template]:
    """Return the sentences of the code that judges."""
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for folder in JUDGING
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    names = _Names()
    for tree in trees.values():
        names.visit(tree)
    found: list[Template] = []
    for path, tree in trees.items():
        sentences = _Sentences(path, names)
        sentences.visit(tree)
        found += sentences.found
    return found


def of_module(path: str, source: str) -> list[Template]:
    """Return the sentences of one module."""
    tree = ast.parse(source)
    names = _Names()
    names.visit(tree)
    sentences = _Sentences(path, names)
    sentences.visit(tree)
    return sentences.found


class _Names(ast.NodeVisitor):
    """Finds the names of constants and functions whose texts are in no message of a failure.

    Attributes:
        published: sources, remedies and titles of rules.
        reasons: reasons of other verdicts than "fail".
    """

    def __init__(self) -> None:
        self.published: set[str] = set()
        self.reasons: set[str] = set()

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg in _OF_THE_BOOK:
            self.published |= _names_in(node.value)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        # The names that were last assigned to a variable, for reasons that are held in one.
        held: dict[str, set[str]] = {}
        for inner in ast.walk(node):
            match inner:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    held.setdefault(name, set()).update(_names_in(value))
                case ast.NamedExpr(target=ast.Name(id=name), value=value):
                    held.setdefault(name, set()).update(_names_in(value))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and _name_of_function(inner) in _REASONS:
                for argument in inner.args:
                    names = _names_in(argument)
                    self.reasons |= names.union(*(held.get(name, set()) for name in names))
        self.generic_visit(node)


def _names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


class _Sentences(ast.NodeVisitor):
    """Finds the sentences of one module."""

    def __init__(self, path: str, names: _Names) -> None:
        self.found: list[Template] = []
        self._path = path
        self._names = names
        self._in_reason = False

    def visit(self, node: ast.AST) -> None:
        parts = _parts(node)
        if parts is None:
            super().visit(node)
            return
        text = "".join(part if isinstance(part, str) else PLACE for part in parts)
        line = getattr(node, "lineno", 0)
        template = Template(self._path, line, _plain(text), self._in_reason)
        if _is_sentence(template.text):
            self.found.append(template)
        for part in parts:
            if isinstance(part, ast.AST):
                self.visit(part)

    def _visit_reason(self, node: ast.AST, is_reason: bool) -> None:
        before = self._in_reason
        self._in_reason = before or is_reason
        self.generic_visit(node)
        self._in_reason = before

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit the body alone: the book publishes the arguments of decorators and defaults."""
        before = self._in_reason
        self._in_reason = before or node.name in self._names.reasons
        for statement in node.body:
            self.visit(statement)
        self._in_reason = before

    def visit_Assign(self, node: ast.Assign) -> None:
        names = _names_in(ast.Tuple(node.targets))
        if not names & self._names.published:
            self._visit_reason(node, all(map(str.isupper, names)) and names <= self._names.reasons)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name_of_function(node)
        if name in _NO_TEXT:
            return
        if _is_factory(node):
            node = ast.Call(node.func, [], node.keywords)
        self._visit_reason(node, name in _REASONS)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _OF_THE_BOOK:
            self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        """Visit values: keys are names."""
        for value in node.values:
            self.visit(value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Leave out texts that are compared with others."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave out the kit's own errors; IncompleteRecord is one of a failure."""
        if isinstance(node.exc, ast.Call) and _name_of_function(node.exc) == "IncompleteRecord":
            self.generic_visit(node)


def _is_factory(call: ast.Call) -> bool:
    """Whether a call makes a rule: its positional arguments are the number and the title."""
    match call.args:
        case [ast.Constant(value=str(number)), *_]:
            return _NUMBER_OF_A_RULE.fullmatch(number) is not None
    return False


def _name_of_function(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _parts(node: ast.AST) -> list[str | ast.AST] | None:
    """Return the constants and values that make up a text, or None if the node is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return [part for value in values for part in _parts(value) or [value]]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first = _parts(left)
            second = _parts(right)
            if first is None and second is None:
                return None
            return [*(first or [left]), *(second or [right])]
    return None


_SAME_PLACES = re.compile(rf"(?:{PLACE}|\?)(?:(?:, | and |,? )(?:{PLACE}|\?))+")


def _plain(text: str) -> str:
    """Return a template as ``without_values`` leaves the texts that it makes."""
    return _SAME_PLACES.sub(PLACE, without_values(text)).strip()


def _is_sentence(text: str) -> bool:
    words = re.findall(r"[^\W\d_]{2,}", text.replace(PLACE, " "))
    return len(words) > 1 and any(" " in part for part in text.split(PLACE))


# An expected text of several lines; a line that is indented continues the one before it.
_LINES = re.compile(r"\n(?=\S)")


def compared_texts(path: Path) -> Iterator[str]:
    """Yield the texts that the assertions of a test module compare with.

    These are constants in assertions, and in the values of parametrized tests and of tables in
    capital letters.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        for value in _comparing(node):
            for inner in ast.walk(value):
                parts = _parts(inner)
                if parts is not None:
                    text = "".join(part if isinstance(part, str) else "?" for part in parts)
                    yield from map(without_values, _LINES.split(text))


def _comparing(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assert(test=test):
            return [test]
        case ast.Call(func=ast.Attribute(attr="parametrize"), args=[_, values]):
            return [values]
        case ast.Call(func=ast.Attribute(attr="assert_expected_inline"), args=[_, text]):
            return [text]
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
            return [value]
    return []

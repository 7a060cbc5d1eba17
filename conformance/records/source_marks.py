"""Marks in the source of a subject: the places that a rank notes when they run.

A mark is an assignment, ``__conformance_ran__[7] = 1``, to an element of a list among the module's
globals. There is one before each statement, at the entry of each function, and at the start of each
arm: both sides of an ``if``, of a conditional expression and of an operand that may be skipped, the
body of a loop, a handler, a case, and a lambda. A mark adds no name to a function, changes no line
number and calls no code of the kit, so that closures, signatures, tracebacks, pickles by reference
and ``torch.compile(fullgraph=True)`` stay as they are. It works in every thread, also in one that
Python did not start, and in every version of Python.

The rank marks the source that it imports, and the controller marks the same text again to learn the
meaning of each number: marks are numbered in the order of one traversal. This module imports no
torch.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LIST_NAME = "__conformance_ran__"
_LOCATION = ("lineno", "col_offset", "end_lineno", "end_col_offset")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Function:
    """A function of a source file.

    Attributes:
        name: its qualified name; ``lambda`` for a lambda.
        line: the line of its ``def``.
        entry: the mark at its entry.
        node: its definition.
        is_method: whether a class holds it directly.
        outer: the function that defines it, or None.
    """

    name: str
    line: int
    entry: int
    node: ast.AST
    is_method: bool
    outer: "Function | None"

    @property
    def owner(self) -> str:
        """The name of the class of a method, or of the function around a function."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Arm:
    """One way that a decision can go.

    Attributes:
        line: the line of the decision.
        mark: the mark that shows that it was taken.
        reached: the mark of the statement that decides; None at the start of a module.
        side: how the decision never went, for people: ``never true``, or
            ``never false before "or"`` of what stands to the left of an ``or``.
        tests: the expressions that decide.
        body: the statements of the arm; empty if it has none.
        function: the function around it, or None at the level of the module.
    """

    line: int
    mark: int
    reached: int | None
    side: str
    tests: tuple[ast.expr, ...]
    body: tuple[ast.stmt, ...]
    function: Function | None


@dataclass
class Marks:
    """The marks of one source file.

    Attributes:
        count: the number of marks.
        lines: the line of each mark that stands before a statement.
        functions_of_lines: for these marks, the mark at the entry of the function around it.
        functions: all functions.
        arms: all arms.
        tree: the source as it was parsed.
    """

    count: int = 0
    lines: dict[int, int] = field(default_factory=dict)
    functions_of_lines: dict[int, int] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []))


def sha256(source: bytes) -> str:
    """Return the digest by which a source is recognised."""
    return hashlib.sha256(source).hexdigest()


def marked(source: bytes) -> tuple[ast.Module, int]:
    """Return the marked syntax tree of a source, and the number of its marks.

    Raises:
        SyntaxError, ValueError, RecursionError: the source cannot be parsed.
    """
    marker = _Marker({})
    return marker.module(ast.parse(source)), marker.marks.count


@functools.lru_cache(maxsize=256)
def marks_of(source: bytes) -> Marks:
    """Return the meaning of the marks of a source.

    Raises:
        SyntaxError, ValueError, RecursionError: the source cannot be parsed.
    """
    tree, as_written = ast.parse(source), ast.parse(source)
    # Nodes do not change before they are visited, so both trees have them in the same order.
    originals = {
        id(node): original
        for node, original in zip(ast.walk(tree), ast.walk(as_written), strict=True)
    }
    marker = _Marker(originals)
    marker.marks.tree = as_written
    marker.module(tree)
    return marker.marks


class _Marker(ast.NodeTransformer):
    """Inserts the marks into a tree, and notes their meanings.

    Args:
        originals: the node that stays as it was written, by the id of the one that is visited; for
            the decisions and the bodies of functions. The rank needs the marks alone, and has none.
    """

    def __init__(self, originals: dict[int, ast.AST]) -> None:
        self.marks = Marks()
        self._originals = originals
        self._names: list[str] = []
        self._functions: list[Function] = []
        self._in_class = False
        self._statement: int | None = None

    def module(self, tree: ast.Module) -> ast.Module:
        tree.body = self._block(tree.body, has_docstring=True)
        return tree

    # --- marks ------------------------------------------------------------------------------------

    def _new(self) -> int:
        self.marks.count += 1
        return self.marks.count - 1

    def _assignment(self, mark: int, place: Any) -> ast.stmt:
        at = _location(place)
        name = ast.Name(LIST_NAME, ast.Load(), **at)
        element = ast.Subscript(name, ast.Constant(mark, **at), ast.Store(), **at)
        return ast.Assign([element], ast.Constant(1, **at), **at)

    def _noting(self, mark: int, value: ast.expr) -> ast.expr:
        """Return an expression that sets a mark, and then has the value of another one."""
        # list.__setitem__ returns None, so that `or` goes on to the value.
        at = _location(value)
        name = ast.Name(LIST_NAME, ast.Load(), **at)
        method = ast.Attribute(name, "__setitem__", ast.Load(), **at)
        call = ast.Call(method, [ast.Constant(mark, **at), ast.Constant(1, **at)], [], **at)
        return ast.BoolOp(ast.Or(), [call, value], **at)

    def _arm(
        self,
        place: Any,
        mark: int,
        side: str,
        tests: Sequence[ast.expr],
        body: Sequence[ast.stmt] = (),
    ) -> None:
        function = self._functions[-1] if self._functions else None
        self.marks.arms.append(
            Arm(place.lineno, mark, self._statement, side, tuple(tests), tuple(body), function)
        )

    def _as_written(self, nodes: Sequence[Any]) -> list[Any]:
        """Return nodes that are about to change as they were written; none in a rank."""
        return [self._originals[id(node)] for node in nodes] if self._originals else []

    # --- statements -------------------------------------------------------------------------------

    def _block(self, body: list[ast.stmt], *, has_docstring: bool = False) -> list[ast.stmt]:
        """Return the statements of a block, each with a mark before it."""
        found: list[ast.stmt] = []
        for index, statement in enumerate(body):
            stays_first = has_docstring and index == 0 and _is_text(statement)
            if stays_first or _is_future_import(statement):
                found.append(statement)
                continue
            mark = self._new()
            self.marks.lines[mark] = statement.lineno
            if self._functions:
                self.marks.functions_of_lines[mark] = self._functions[-1].entry
            outer = self._statement
            self._statement = mark
            found.append(self._assignment(mark, statement))
            found.append(self.visit(statement))
            self._statement = outer
        return found

    def _decided_block(
        self, place: ast.AST, body: list[ast.stmt], side: str, tests: Sequence[ast.expr]
    ) -> list[ast.stmt]:
        """Return the marked block of an arm; the mark of its first statement is the arm's."""
        self._arm(place, self.marks.count, side, tests, self._as_written(body))
        return self._block(body)

    def visit_If(self, node: ast.If) -> ast.AST:
        tests = self._as_written([node.test])
        node.test = self.visit(node.test)
        node.body = self._decided_block(node, node.body, "never true", tests)
        if node.orelse:
            node.orelse = self._decided_block(node, node.orelse, "never false", tests)
        else:
            mark = self._new()
            self._arm(node, mark, "never false", tests)
            node.orelse = [self._assignment(mark, node)]
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        tests = self._as_written([node.test])
        node.test = self.visit(node.test)
        node.body = self._decided_block(node, node.body, "never true", tests)
        node.orelse = self._block(node.orelse)
        return node

    def visit_For(self, node: Any) -> ast.AST:
        tests = self._as_written([node.iter])
        node.target = self.visit(node.target)
        node.iter = self.visit(node.iter)
        node.body = self._decided_block(node, node.body, "a loop that never ran", tests)
        node.orelse = self._block(node.orelse)
        return node

    visit_AsyncFor = visit_For

    def visit_Try(self, node: Any) -> ast.AST:
        node.body = self._block(node.body)
        for handler in node.handlers:
            tests = self._as_written([handler.type] if handler.type else [])
            side = "a handler that never ran"
            handler.body = self._decided_block(handler, handler.body, side, tests)
        node.orelse = self._block(node.orelse)
        node.finalbody = self._block(node.finalbody)
        return node

    visit_TryStar = visit_Try

    def visit_With(self, node: Any) -> ast.AST:
        node.items = [self.visit(item) for item in node.items]
        node.body = self._block(node.body)
        return node

    visit_AsyncWith = visit_With

    def visit_Match(self, node: ast.Match) -> ast.AST:
        subject = self._as_written([node.subject])
        node.subject = self.visit(node.subject)
        for case in node.cases:
            tests = [*subject, *(part for part in ast.walk(case.pattern) if _is_expression(part))]
            side = "a case that never matched"
            case.body = self._decided_block(case.pattern, case.body, side, tests)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value:
            node.value = self.visit(node.value)
        return node

    # --- functions and classes --------------------------------------------------------------------

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        self._visit_defaults(node.args)
        definition = self._originals.get(id(node), node)
        with_docstring = bool(node.body) and _is_text(node.body[0])
        entry = self._enter(node.name, node.lineno, definition)
        body = self._block(node.body, has_docstring=True)
        body.insert(1 if with_docstring else 0, self._assignment(entry, node))
        node.body = body
        self._leave()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._visit_defaults(node.args)
        entry = self._enter("lambda", node.lineno, *self._as_written([node]))
        node.body = self._noting(entry, self.visit(node.body))
        self._leave()
        return node

    def _enter(self, name: str, line: int, node: ast.AST | None = None) -> int:
        """Begin a function; return the mark at its entry."""
        outer = self._functions[-1] if self._functions else None
        entry = self._new()
        qualified = ".".join([*self._names, name])
        definition = node or ast.Pass()
        function = Function(qualified, line, entry, definition, self._in_class, outer)
        self.marks.functions.append(function)
        self._functions.append(function)
        self._names.append(name)
        self._in_class = False
        self._outer_statements = [*getattr(self, "_outer_statements", []), self._statement]
        # What a function decides is reached once it was entered.
        self._statement = entry
        return entry

    def _leave(self) -> None:
        function = self._functions.pop()
        self._names.pop()
        self._in_class = function.is_method
        self._statement = self._outer_statements.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        was_in_class = self._in_class
        self._in_class = True
        self._names.append(node.name)
        # No marks of its own: the namespace of a class may be an object with rules of its own.
        node.body = [self.visit(statement) for statement in node.body]
        self._names.pop()
        self._in_class = was_in_class
        return node

    def _visit_defaults(self, arguments: ast.arguments) -> None:
        """Visit default values. Annotations stay as they are: they may be kept as text."""
        arguments.defaults = [self.visit(value) for value in arguments.defaults]
        arguments.kw_defaults = [value and self.visit(value) for value in arguments.kw_defaults]

    # --- expressions ------------------------------------------------------------------------------

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        tests = self._as_written([node.test])
        node.test = self.visit(node.test)
        for name, side in (("body", "never true"), ("orelse", "never false")):
            mark = self._new()
            self._arm(node, mark, side, tests)
            setattr(node, name, self._noting(mark, self.visit(getattr(node, name))))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        is_and = isinstance(node.op, ast.And)
        side = 'never true before "and"' if is_and else 'never false before "or"'
        operands = self._as_written(node.values)
        first, *others = node.values
        values = [self.visit(first)]
        for index, value in enumerate(others):
            mark = self._new()
            self._arm(value, mark, side, operands[index : index + 1])
            values.append(self._noting(mark, self.visit(value)))
        node.values = values
        return node

    def visit_ListComp(self, node: Any) -> ast.AST:
        tests = self._as_written([test for part in node.generators for test in part.ifs])
        has_tests = any(part.ifs for part in node.generators)
        self.generic_visit(node)
        if has_tests:
            mark = self._new()
            self._arm(node, mark, "never true", tests)
            name = "key" if isinstance(node, ast.DictComp) else "elt"
            setattr(node, name, self._noting(mark, getattr(node, name)))
        return node

    visit_SetComp = visit_ListComp
    visit_GeneratorExp = visit_ListComp
    visit_DictComp = visit_ListComp


def _location(place: Any) -> dict[str, Any]:
    """Return the location of a node, for new nodes that stand in its place."""
    return {name: getattr(place, name) for name in _LOCATION}


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_future_import(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _is_expression(node: ast.AST) -> bool:
    return isinstance(node, ast.expr)


def enclosing(function: Function | None) -> Iterator[Function]:
    """Yield a function and those around it, the innermost first."""
    while function:
        yield function
        function = function.outer

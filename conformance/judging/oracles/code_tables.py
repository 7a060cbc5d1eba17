"""Find the expressions that bound something without a comparison.

No branch shows that a cache is full, that the places of a pool come again, that a plan has come to
its end, or that a loop has chosen another row of a table. These are looked for:

    lru_cache(maxsize=N), deque(maxlen=N)       containers of a fixed size
    [None] * N, torch.zeros(N, 8)               lists and tensors of a fixed size
    [True, False, False] * N                    N and 3 N
    islice(plan, N), range(N), repeat(x, N)     sequences that end
    x % N, x // N, x & N                        places that come again, or last for a while
    ((0, a), (N, b)), {N: a}, [Phase(N, a)]     tables: the numbers in their rows
    (a, b, c, ...)                              tables with many rows: the number of rows

They stand in functions that were entered, their decorators and default values, and in values that
are assigned to names that these functions use: of a module, of a class, or of a module that is only
imported, such as one that has constants alone.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from conformance.judging.oracles.code_names import assignments, last_name, nodes_of
from conformance.judging.oracles.coverage import (
    Coverage,
    FileCoverage,
    names_in,
    names_in_entered_functions,
)
from conformance.records.source_marks import Function, marks_of

_SIZING_CALLS = (
    "lru_cache",
    "deque",
    "Queue",
    "LifoQueue",
    "Semaphore",
    "BoundedSemaphore",
    "bytearray",
    "islice",
    "range",
    "repeat",
    "arange",
    "zeros",
    "ones",
    "empty",
    "full",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
)
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
_PLACES = (ast.Mod, ast.FloorDiv, ast.BitAnd)
# Other scenarios go on beyond the end of a shorter table.
_LEAST_ROWS = 65
# More numbers are values to look up, and no limits.
_MOST_IN_A_TABLE = 32


@dataclass(frozen=True)
class Sized:
    """An expression that bounds something without a comparison.

    Attributes:
        file: the file that it stands in.
        line: its line.
        function: the function around it, or None.
        parts: the expressions whose numbers are bounds.
        is_table: whether these are the rows of a table.
    """

    file: FileCoverage
    line: int
    function: Function | None
    parts: tuple[ast.expr, ...]
    is_table: bool = False


def used_files(coverage: Coverage) -> list[FileCoverage]:
    """Return the files that were only imported and that a used one, or one of these, names."""
    left = list(coverage.imported)
    found: list[FileCoverage] = []
    texts = [file.file.source.decode("utf-8", errors="replace") for file in coverage.files]
    while texts:
        text = texts.pop()
        for source in [one for one in left if one.module.rpartition(".")[2] in text]:
            left.remove(source)
            found.append(FileCoverage(source, marks_of(source.source)))
            texts.append(source.source.decode("utf-8", errors="replace"))
    return found


def sized_in(coverage: Coverage, files: Iterable[FileCoverage]) -> Iterator[Sized]:
    """Yield the expressions that bound something, those of functions first; tables come last.

    Args:
        coverage: which functions were entered.
        files: the files that are used.
    """
    files = list(files)
    found = [
        sized
        for file in coverage.files
        for function in file.marks.functions
        if file.has_entered(function)
        for sized in _in_expressions(function.node, function, file)
    ]
    for file, value in _used_values(files, names_in_entered_functions(coverage.files)):
        found += _in_expressions(ast.Expr(value), None, file)
    yield from sorted(found, key=lambda sized: sized.is_table)


def _used_values(
    files: list[FileCoverage], used: set[str]
) -> Iterator[tuple[FileCoverage, ast.expr]]:
    """Yield the values that modules and classes assign to names in use, or to names in these."""
    left = [
        (file, target.id, value)
        for file in files
        for statement in _outside_functions(file.marks.tree)
        for target, value in assignments(statement)
        if isinstance(target, ast.Name)
    ]
    names = set(used)
    for file in files:
        for part in nodes_of(file.marks.tree):
            if isinstance(part, ast.alias) and part.asname in names:
                names.add(part.name.rpartition(".")[2])
    while taken := [entry for entry in left if entry[1] in names]:
        left = [entry for entry in left if entry[1] not in names]
        for file, _, value in taken:
            names.update(names_in(value))
            yield file, value


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module, and of its classes, that stand in no function."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.expr)):
            yield child
            yield from _outside_functions(child)


def _in_expressions(
    node: ast.AST, function: Function | None, file: FileCoverage
) -> Iterator[Sized]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(child, _DISPLAYS) and (rows := _rows(child, is_named=function is None)):
            yield Sized(file, child.lineno, function, rows, is_table=True)
            continue
        if isinstance(child, ast.expr) and (parts := _bounds(child)):
            yield Sized(file, child.lineno, function, parts)
        yield from _in_expressions(child, function, file)


def _bounds(node: ast.expr) -> tuple[ast.expr, ...]:
    """Return the expressions that an expression takes as bounds."""
    if isinstance(node, ast.Call) and last_name(node.func) in _SIZING_CALLS:
        return (*node.args, *(keyword.value for keyword in node.keywords))
    if not isinstance(node, ast.BinOp):
        return ()
    if isinstance(node.op, _PLACES):
        is_text = isinstance(node.left, (ast.JoinedStr, ast.Constant))
        return () if is_text else (node.right,)
    if isinstance(node.op, ast.Mult):
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(one, (ast.List, ast.Tuple)):
                count = ast.copy_location(ast.Constant(len(one.elts)), one)
                length = ast.copy_location(ast.BinOp(count, ast.Mult(), other), node)
                return (other, length) if len(one.elts) > 1 else (other,)
    return ()


def _rows(node: ast.AST, *, is_named: bool) -> tuple[ast.expr, ...]:
    """Return the parts of a table, its length if it is long, or () for another display.

    Args:
        node: the display.
        is_named: the display has a name outside of functions; in a function it may as well be a
            shape, arguments or results, and has to have numbers of its own.
    """
    if isinstance(node, ast.Dict):
        parts = [part for part in (*node.keys, *node.values) if part is not None]
    else:
        parts = list(getattr(node, "elts", ()))
    count = len(node.values) if isinstance(node, ast.Dict) else len(parts)
    if count >= _LEAST_ROWS:
        return (ast.copy_location(ast.Constant(count), node),)
    numbers = [
        part
        for whole in parts
        for part in ast.walk(whole)
        if isinstance(part, ast.Constant) and isinstance(part.value, (int, float))
    ]
    least = 0 if is_named else 1
    return tuple(parts) if least <= len(numbers) <= _MOST_IN_A_TABLE else ()

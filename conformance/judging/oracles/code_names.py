"""Evaluate expressions in a subject's own files to numbers, as far as their text tells."""

import ast
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from conformance.judging.oracles.coverage import FileCoverage
from conformance.records.source_marks import Function, enclosing

LARGEST = 2**31
DEPTH = 4  # names that stand for names


class Project:
    """The subject's own files, in which names are looked up.

    Args:
        files: the files.
        arguments: the arguments in the target.
    """

    def __init__(self, files: Iterable[FileCoverage], arguments: Mapping[str, Any]) -> None:
        self._files = list(files)
        self._arguments = arguments
        self._attributes: dict[str, list[tuple[ast.expr, Function | None, FileCoverage]]] = {}
        self._given: dict[str, list[ast.expr]] = {}
        for file in self._files:
            self._note_attributes(file)
            for part in nodes_of(file.marks.tree):
                if isinstance(part, ast.keyword) and part.arg:
                    self._given.setdefault(part.arg, []).append(part.value)

    def _note_attributes(self, file: FileCoverage) -> None:
        for function in file.marks.functions:
            for part in nodes_of(function.node):
                for target, value in assignments(part):
                    if isinstance(target, ast.Attribute):
                        entry = (value, function, file)
                        self._attributes.setdefault(target.attr, []).append(entry)
        for part in nodes_of(file.marks.tree):
            if isinstance(part, ast.ClassDef):
                for statement in part.body:
                    for target, value in assignments(statement):
                        if isinstance(target, ast.Name):
                            self._attributes.setdefault(target.id, []).append((value, None, file))

    def collect(
        self,
        node: ast.AST,
        function: Function | None,
        file: FileCoverage,
        values: list[float],
        words: set[str],
        depth: int = DEPTH,
    ) -> None:
        """Add the numbers and the names in an expression."""
        if isinstance(node, ast.expr):
            value = self.value(node, function, file, depth)
            if value is not None:
                words.update(_identifiers(node))
                if abs(value) <= LARGEST:
                    values.append(abs(value))
                return
        if isinstance(node, ast.Name) and depth:
            words.add(node.id)
            assigned = [value for _, value in self._local(node.id, function)]
            # A value that is read from the environment may have a default in the code.
            for part in assigned or _assigned_in_module(node.id, file):
                self.collect(part, function, file, values, words, depth - 1)
            return
        if isinstance(node, ast.Attribute):
            words.add(node.attr)
        for child in ast.iter_child_nodes(node):
            self.collect(child, function, file, values, words, depth)

    def value(
        self, node: ast.AST, function: Function | None, file: FileCoverage, depth: int = DEPTH
    ) -> float | None:
        """Return the number that an expression has, or None if it is not known."""
        if isinstance(node, ast.Constant):
            return _number(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self.value(node.operand, function, file, depth)
            return None if operand is None else -operand
        if isinstance(node, ast.BinOp):
            left = self.value(node.left, function, file, depth)
            right = self.value(node.right, function, file, depth)
            return None if left is None or right is None else _operate(node.op, left, right)
        if isinstance(node, ast.Call):
            return self._value_of_call(node, function, file, depth)
        if not depth:
            return None
        if isinstance(node, ast.Name):
            return self._value_of_name(node.id, function, file, depth - 1)
        if isinstance(node, ast.Attribute):
            return self._value_of_attribute(node.attr, depth - 1)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self._value_of_key(node.slice.value, depth - 1)
        return None

    def _value_of_call(
        self, node: ast.Call, function: Function | None, file: FileCoverage, depth: int
    ) -> float | None:
        """Return the number that a conversion, a look-up or a check of a number returns."""
        name = last_name(node.func)
        if name in ("int", "float", "round") and len(node.args) == 1:
            written = node.args[0]
            if isinstance(written, ast.Constant) and isinstance(written.value, str):
                return _number_in(written.value)
            return self.value(written, function, file, depth)
        if name in ("get", "getenv") and len(node.args) == 2:
            # The default of an option, or of a variable of the environment.
            default = node.args[1]
            if isinstance(default, ast.Constant) and isinstance(default.value, str):
                return _number_in(default.value)
            return self.value(default, function, file, depth)
        # A check such as `self.limit = positive("limit", limit)`.
        names = [argument for argument in node.args if isinstance(argument, ast.Name)]
        values = [self.value(name, function, file, depth) for name in names]
        known = [value for value in values if value is not None]
        return known[0] if len(known) == 1 and len(names) == 1 else None

    def _value_of_name(
        self, name: str, function: Function | None, file: FileCoverage, depth: int
    ) -> float | None:
        for around in enclosing(function):
            is_argument, default = _argument(around.node, name)
            if is_argument:
                return self._value_of_argument(name, default, around.outer, file, depth)
            assigned = list(self._local(name, around, only_here=True))
            if assigned:
                return self._only_value([value for _, value in assigned], around, file, depth)
        return self._value_in_modules(name, file, depth)

    def _value_of_argument(
        self,
        name: str,
        default: ast.expr | None,
        function: Function | None,
        file: FileCoverage,
        depth: int,
    ) -> float | None:
        """Return the argument of the target, or of a call in the subject's code, or the default."""
        given = _number(self._arguments.get(name))
        if given is not None:
            return given
        for value in self._given.get(name, []):
            if isinstance(value, ast.Constant) and (found := _number(value.value)) is not None:
                return found
        return None if default is None else self.value(default, function, file, depth)

    def _value_of_attribute(self, name: str, depth: int) -> float | None:
        given = _number(self._arguments.get(name, self._arguments.get(name.lstrip("_"))))
        if given is not None:
            return given
        for value, function, file in self._attributes.get(name, []):
            found = self.value(value, function, file, depth)
            # A counter begins at 0 or 1 and is no limit.
            if found is not None and found not in (-1, 0, 1):
                return found
        for file in self._files:
            found = self._value_in_module(name, file, depth)
            if found is not None:
                return found
        return None

    def _value_of_key(self, key: object, depth: int) -> float | None:
        """Return the value of a key in the only dict that has it."""
        if not isinstance(key, str):
            return None
        given = _number(self._arguments.get(key))
        if given is not None:
            return given
        for file in self._files:
            for part in nodes_of(file.marks.tree):
                if isinstance(part, ast.Dict):
                    for name, value in zip(part.keys, part.values, strict=True):
                        if isinstance(name, ast.Constant) and name.value == key:
                            return self.value(value, None, file, depth)
        values = self._given.get(key, [])
        return self.value(values[0], None, self._files[0], depth) if values else None

    def _value_in_modules(self, name: str, file: FileCoverage, depth: int) -> float | None:
        """Return the value of a global name, which another module may define."""
        for other in (file, *self._files):
            found = self._value_in_module(name, other, depth)
            if found is not None:
                return found
        return None

    def _value_in_module(self, name: str, file: FileCoverage, depth: int) -> float | None:
        return self._only_value(_assigned_in_module(name, file), None, file, depth)

    def _only_value(
        self, values: list[ast.expr], function: Function | None, file: FileCoverage, depth: int
    ) -> float | None:
        """Return the number that is assigned, if a single one is."""
        if len(values) != 1 or not depth:
            return None
        return self.value(values[0], function, file, depth - 1)

    def _local(
        self, name: str, function: Function | None, *, only_here: bool = False
    ) -> Iterator[tuple[Function, ast.expr]]:
        """Yield the values that are assigned to a name in the functions around a place."""
        for around in enclosing(function):
            for part in nodes_of(around.node):
                for target, value in assignments(part):
                    if isinstance(target, ast.Name) and target.id == name:
                        yield around, value
            if only_here:
                return


@functools.lru_cache(maxsize=4096)
def nodes_of(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of ``ast.walk``; the same functions are searched for many names."""
    return tuple(ast.walk(node))


def _assigned_in_module(name: str, file: FileCoverage) -> list[ast.expr]:
    """Return the values that are assigned to a global name."""
    return _assigned_in(file.marks.tree).get(name, [])


@functools.lru_cache(maxsize=256)
def _assigned_in(module: ast.Module) -> dict[str, list[ast.expr]]:
    """Return the values that are assigned to each global name."""
    found: dict[str, list[ast.expr]] = {}
    for statement in module.body:
        for target, value in assignments(statement):
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
    return found


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets and the values of a statement."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value


def _argument(node: ast.AST, name: str) -> tuple[bool, ast.expr | None]:
    """Return whether a function has an argument, and its default value."""
    arguments = getattr(node, "args", None)
    if not isinstance(arguments, ast.arguments):
        return False, None
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*[None] * missing, *arguments.defaults]
    named = [*zip(positional, defaults, strict=True)]
    named += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for argument, default in named:
        if argument.arg == name:
            return True, default
    return False, None


def _identifiers(node: ast.AST) -> Iterator[str]:
    for part in nodes_of(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) <= LARGEST else None


def _number_in(text: str) -> float | None:
    """Return the number that a text is, as ``int`` and ``float`` read it."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return _number(int(value) if value == int(value) else value)


def _operate(operator: ast.operator, left: float, right: float) -> float | None:
    """Return the result of an operation on two numbers, or None if it is too large or has none."""
    try:
        if isinstance(operator, ast.Add):
            return left + right
        if isinstance(operator, ast.Sub):
            return left - right
        if isinstance(operator, ast.Mult):
            return left * right
        if isinstance(operator, ast.Div):
            return left / right
        if isinstance(operator, ast.FloorDiv):
            return left // right
        if isinstance(operator, ast.Mod):
            return left % right
        if isinstance(operator, ast.Pow):
            return left**right if abs(right) <= 64 and abs(left) <= 1024 else None
        if isinstance(operator, ast.LShift):
            return int(left) << int(right) if 0 <= right <= 40 else None
        if isinstance(operator, ast.RShift):
            return int(left) >> int(right) if 0 <= right <= 64 else None
    except (ArithmeticError, ValueError):
        return None
    return None


def last_name(node: ast.expr) -> str:
    """Return the last name of a dotted one; '' for other expressions."""
    return str(getattr(node, "attr", getattr(node, "id", "")))

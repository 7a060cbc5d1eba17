"""Find the numbers that a subject's code compares with, in decisions that were not seen both ways.

Such a decision is an arm that no run took. Marks show no decision inside an expression: the value
of a comparison that is kept, the bounds of a slice, and arguments of ``min``, ``range``, ``split``,
``clamp`` and their like count as decisions, too. A number may be written in many ways; these are
evaluated:

    100_000, 1 << 20, 25 * 1024 * 1024, int(1e6)         constant expressions
    LIMIT, config.LIMIT                                  assigned once in a module of the subject
    limit                                                an argument of the target, a default value,
                                                         or assigned in a function around it
    self.limit, state.limit                              an argument of the target, or assigned in a
                                                         class of the subject
    options["limit"]                                     the value of that key in a dict

A name that is assigned a value that cannot be evaluated stands for the numbers in that value:
``is_large`` for the number in ``is_large = tensor.numel() > LIMIT``. If a decision has several
numbers, their product and their sum are candidates too: ``numel // 1024 > 16``.
"""

import ast
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.judging.oracles.coverage import Coverage, FileCoverage
from conformance.records.source_marks import Function, enclosing

LARGEST = 2**31
_DEPTH = 4  # names that stand for names
_WORDS = {
    "steps": ("step", "iter", "epoch", "call", "round", "tick", "seen", "age", "warm", "period"),
    "sizes": ("numel", "size", "elem", "shape", "byte", "large", "small", "big", "length"),
    "counts": ("len", "index", "param", "bucket", "count", "grad"),
    "worlds": ("world", "rank", "nproc", "peers"),
    "values": (
        "norm",
        "abs",
        "amax",
        "max",
        "min",
        "value",
        "clamp",
        "clip",
        "scale",
        "std",
        "eps",
    ),
}
_VALUES = "values"
_LEAST_HIDDEN = 64  # smaller numbers in slices and calls are axes, counts of bits and the like
_FEW_STEPS = 512
_LEAST_VALUE = 2.0**-100
_DECIDING_CALLS = (
    "min",
    "max",
    "range",
    "split",
    "chunk",
    "narrow",
    "islice",
    "clamp",
    "clamp_",
    "clip",
    "minimum",
    "maximum",
    "topk",
)
_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "cdouble": "complex128"}


@dataclass(frozen=True)
class Number:
    """A number that code compares with.

    Attributes:
        value: the number.
        file, line: the place of the decision.
        quantities: the quantities that the names in the decision suggest: ``steps``, ``sizes``,
            ``counts``, ``worlds``, ``values``; all of them if the names suggest none.
    """

    value: float
    file: str
    line: int
    quantities: frozenset[str]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Dtype:
    """A dtype that code compares with; the name that torch has for it."""

    value: str
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def numbers_in(coverage: Coverage, arguments: Mapping[str, Any]) -> list[Number]:
    """Return the distinct numbers of decisions that were not seen both ways, in their order.

    Args:
        coverage: what no run took.
        arguments: the arguments in the target.
    """
    project = _Project(coverage.files, arguments)
    found: dict[float, Number] = {}
    for file, line, function, tests in _decisions(coverage):
        values: list[float] = []
        words: set[str] = set()
        for test in tests:
            project.collect(test, function, file, values, words)
        if isinstance(tests[0] if tests else None, (ast.Slice, ast.Call)):
            # Axes, widths in bits and the like.
            values = [value for value in values if value > _LEAST_HIDDEN or value != int(value)]
        for value in _with_combinations(values):
            quantities = frozenset(_quantities(words))
            if value <= _FEW_STEPS:
                # Cheap to try, whatever the counter is called.
                quantities |= {"steps"}
            if value != int(value):
                quantities = frozenset((_VALUES,))
            number = Number(value, file.file.name, line, quantities)
            found.setdefault(value, number)
    return list(found.values())


def dtypes_in(coverage: Coverage) -> list[Dtype]:
    """Return the dtypes of conditions that were not seen both ways."""
    found: dict[str, Dtype] = {}
    for file, line, _, tests in _decisions(coverage):
        for test in tests:
            for part in ast.walk(test):
                name = getattr(part, "attr", None)
                name = _ALIASES.get(str(name), name)
                if name in _DTYPES:
                    found.setdefault(str(name), Dtype(str(name), file.file.name, line))
    return list(found.values())


_Decision = tuple[FileCoverage, int, Function | None, tuple[ast.expr, ...]]


def _decisions(coverage: Coverage) -> Iterator[_Decision]:
    """Yield the decisions that were not seen both ways: untaken arms, then kept comparisons."""
    files = {file.file.name: file for file in coverage.files}
    for untaken in coverage.untaken:
        arm = untaken.arm
        yield files[untaken.file], untaken.line, arm.function, arm.tests
    for file in coverage.files:
        for function in file.marks.functions:
            if file.has_entered(function):
                for part in _kept_comparisons(function.node):
                    yield file, part.lineno, function, (part,)
    for file in coverage.files:
        for function in file.marks.functions:
            if file.has_entered(function):
                for bound in _bounds(function.node):
                    yield file, bound.lineno, function, (bound,)


def _bounds(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the slices in a function, and the calls whose arguments decide."""
    for part in _inner(node):
        if isinstance(part, ast.expr) and _is_bound(part):
            yield part


def _is_bound(node: ast.expr) -> bool:
    """Whether an expression is a slice, or a call that takes bounds."""
    if isinstance(node, ast.Call):
        return _last_name(node.func) in _DECIDING_CALLS
    return isinstance(node, ast.Slice)


def _inner(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of the functions that it defines."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            yield from _inner(child)


def _last_name(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _kept_comparisons(node: ast.AST) -> Iterator[ast.Compare]:
    """Yield the comparisons in a function whose values are kept, and not decided on.

    Operands of a kept ``and`` or ``or``, and filters of comprehensions, are among them: marks show
    one side of these alone.
    """
    for name, value in ast.iter_fields(node):
        is_decision = name == "test"
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if not isinstance(part, ast.AST) or isinstance(
                part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            ):
                continue
            if isinstance(part, ast.Compare) and not is_decision:
                yield part
            if is_decision:
                continue
            yield from _kept_comparisons(part)


def _with_combinations(values: list[float]) -> list[float]:
    """Return distinct numbers of at least 2, then their product and their sum, then fractions."""
    numbers = dict.fromkeys(value for value in values if value <= LARGEST)
    distinct = [value for value in numbers if value >= 2 and value == int(value)]
    fractions = [value for value in numbers if value != int(value) and value >= _LEAST_VALUE]
    if len(distinct) > 1:
        for value in (math.prod(distinct), sum(distinct)):
            if value not in distinct and value <= LARGEST:
                distinct.append(value)
    return [*map(int, distinct), *fractions]


def _quantities(words: Iterable[str]) -> Iterator[str]:
    text = " ".join(words).lower()
    found = [name for name, parts in _WORDS.items() if any(part in text for part in parts)]
    yield from found or _WORDS


# --- the values of names --------------------------------------------------------------------------


class _Project:
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
            for part in ast.walk(file.marks.tree):
                if isinstance(part, ast.keyword) and part.arg:
                    self._given.setdefault(part.arg, []).append(part.value)

    def _note_attributes(self, file: FileCoverage) -> None:
        for function in file.marks.functions:
            for part in ast.walk(function.node):
                for target, value in _assignments(part):
                    if isinstance(target, ast.Attribute):
                        entry = (value, function, file)
                        self._attributes.setdefault(target.attr, []).append(entry)
        for part in ast.walk(file.marks.tree):
            if isinstance(part, ast.ClassDef):
                for statement in part.body:
                    for target, value in _assignments(statement):
                        if isinstance(target, ast.Name):
                            self._attributes.setdefault(target.id, []).append((value, None, file))

    def collect(
        self,
        node: ast.AST,
        function: Function | None,
        file: FileCoverage,
        values: list[float],
        words: set[str],
        depth: int = _DEPTH,
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
        self, node: ast.AST, function: Function | None, file: FileCoverage, depth: int = _DEPTH
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
        """Return the number that a conversion or a check of a number returns."""
        if _last_name(node.func) in ("int", "float", "round") and len(node.args) == 1:
            return self.value(node.args[0], function, file, depth)
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
            for part in ast.walk(file.marks.tree):
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
            for part in ast.walk(around.node):
                for target, value in _assignments(part):
                    if isinstance(target, ast.Name) and target.id == name:
                        yield around, value
            if only_here:
                return


def _assigned_in_module(name: str, file: FileCoverage) -> list[ast.expr]:
    """Return the values that are assigned to a global name."""
    return [
        value
        for statement in file.marks.tree.body
        for target, value in _assignments(statement)
        if isinstance(target, ast.Name) and target.id == name
    ]


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
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
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) <= LARGEST else None


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

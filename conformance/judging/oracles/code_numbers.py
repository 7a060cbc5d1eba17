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

Numbers that bound something without a comparison, such as the size of a cache, the length of a
table, and the rows of one, come last: ``code_tables.py``. Modules that are only imported are read,
too, if a module that is used names them.

A name that is assigned a value that cannot be evaluated stands for the numbers in that value:
``is_large`` for the number in ``is_large = tensor.numel() > LIMIT``. If a decision has several
numbers, their product and their sum are candidates too: ``numel // 1024 > 16``.
"""

import ast
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.judging.oracles.code_names import LARGEST, Project, last_name
from conformance.judging.oracles.code_tables import Sized, sized_in, used_files
from conformance.judging.oracles.coverage import Coverage, FileCoverage
from conformance.records.source_marks import Function

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
_LARGEST_HIDDEN = 2**26  # larger ones are seeds, moduli of hashes and the like
_COUNTED = frozenset(("steps", "sizes", "counts"))
_LEAST_HIDDEN = 64  # smaller numbers in slices and calls are axes, counts of bits and the like
_FEW_STEPS = 512
_MOST_COMBINED = 4  # more numbers in one decision are a table, and their sum is no bound
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
    files = [*coverage.files, *used_files(coverage)]
    project = Project(files, arguments)
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
    for sized in sized_in(coverage, files):
        for number in _numbers_of(sized, project):
            found.setdefault(number.value, number)
    return list(found.values())


def _numbers_of(sized: Sized, project: Project) -> Iterator[Number]:
    """Yield the numbers of an expression that bounds something without a comparison."""
    for part in sized.parts:
        values: list[float] = []
        words: set[str] = set()
        project.collect(part, sized.function, sized.file, values, words)
        if sized.is_table:
            # What the columns of a table are, no name tells.
            words.clear()
        for value in dict.fromkeys(values):
            if _LEAST_HIDDEN < value <= _LARGEST_HIDDEN and value == int(value):
                quantities = frozenset(_quantities(words)) - {_VALUES, "worlds"}
                yield Number(int(value), sized.file.file.name, sized.line, quantities or _COUNTED)


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
        return last_name(node.func) in _DECIDING_CALLS
    return isinstance(node, ast.Slice)


def _inner(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of the functions that it defines."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            yield from _inner(child)


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
    if 1 < len(distinct) <= _MOST_COMBINED:
        for value in (math.prod(distinct), sum(distinct)):
            if value not in distinct and value <= LARGEST:
                distinct.append(value)
    return [*map(int, distinct), *fractions]


def _quantities(words: Iterable[str]) -> Iterator[str]:
    text = " ".join(words).lower()
    found = [name for name, parts in _WORDS.items() if any(part in text for part in parts)]
    yield from found or _WORDS
